"""The tokeniser in a directory of transformers as an encoding: tokenizer.json.

It is read by the library `tokenizers`; no code from the directory is run. A text is encoded as a
part of a longer one: no special token is put before or after it, nor the space that some tokenisers
begin a text with. So `decode(encode(text))` is `text`, and prefix, query and suffix can be encoded
one by one. Special tokens are never made of what a text spells.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, SupportsInt

import tokenizers

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError
from lm_human_preferences.language import encodings
from lm_human_preferences.language.encodings import Encoder, Encoding
from lm_human_preferences.language.gpt2.released import released_name
from lm_human_preferences.runs import run_files

TOKENISER = run_files.TOKENISER
SETTINGS = run_files.TOKENISER_SETTINGS
TEMPLATE = run_files.CHAT_TEMPLATE
PREFIX = 'tokenizer-'  # of the names of these encodings; 12 digits of a digest follow
# SHA-256 of GPT-2's vocabulary: its encoder.json, sorted, without white space.
GPT2_VOCABULARY = 'e35d8b86ebd35ebd260d040aa455e09759f7e675f4dbb7f3d727516f27eca190'


class TokeniserEncoder:
    """Text to token ids of a tokenizer.json and back, see the head of this module.

    rules: what the file holds. The padding token is the first id that is no token.
    """

    def __init__(self, encoding: TokeniserEncoding, rules: Mapping[str, Any]) -> None:
        self.directory = encoding.directory
        self.eot_token = encoding.eot_token
        self.padding_token = encoding.n_vocab
        self.spells_special = True
        self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(_without_prefix_space(rules)))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # as the texts that they look like

    def encode(self, text: str) -> list[int]:
        """List of token ids of `text`; UserError for what the tokeniser has no token for."""
        try:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        except Exception as e:  # the library raises no other
            raise UserError(f'the tokeniser of the model cannot encode {text!r:.80}: {e}') from e

    def decode(self, tokens: Iterable[SupportsInt]) -> str:
        """Text of token ids (list, numpy array or tensor), without padding.

        Special tokens are spelled out. Raises KeyError for an id that is neither token nor padding.
        """
        ids = [int(token) for token in tokens]
        for token in ids:
            if not 0 <= token <= self.padding_token:
                raise KeyError(token)
        ids = [token for token in ids if token != self.padding_token]
        return self._tokenizer.decode(ids, skip_special_tokens=not self.spells_special)

    def reader(self) -> TokeniserEncoder:
        """The same, but without special tokens in texts: for what people read of a dialogue."""
        reader = copy.copy(self)
        reader.spells_special = False
        return reader

    def tokens_holding(self, text: str) -> frozenset[int]:
        """The tokens whose own text has `text` in it; UserError where none has.

        So '.' is in ' .' and '."', too. A word is not in a longer one.
        """
        before = r'(?<!\w)' if re.match(r'\w', text) else ''
        after = r'(?!\w)' if re.search(r'\w$', text) else ''
        pattern = re.compile(before + re.escape(text) + after)
        found = frozenset(
            token for token, own in enumerate(self._texts) if text in own and pattern.search(own)
        )
        if not found:
            raise UserError(f'{text!r} is in no token of the tokeniser of the model')
        return found

    @functools.cached_property
    def _texts(self) -> list[str]:
        """The text of each token; that of a token which is a part of a character has U+FFFD."""
        decode = self._tokenizer.decode
        return [decode([token], skip_special_tokens=False) for token in range(self.padding_token)]


@dataclasses.dataclass(frozen=True)
class TokeniserEncoding(Encoding):
    """The encoding of the tokeniser in `directory` (path or URL)."""

    directory: str = ''

    def get_encoder(self) -> TokeniserEncoder:
        """The encoder, made once. UserError where its file is missing or damaged."""
        return _encoder(self, _md5_of(self.directory))

    def fits(self, rows: int) -> bool:
        """See Encoding: an embedding may have more rows, which belong to no token."""
        return rows >= self.n_vocab

    def copy_files(self, directory: str) -> None:
        """Copy the tokeniser's own files.

        What is saved with them can be read without the directory that they are from.
        """
        for name in run_files.TOKENISER_FILES:
            source = storage.join(self.directory, name)
            if storage.exists(source):
                with open(storage.cached_path(source), 'rb') as file:
                    storage.write_bytes(os.path.join(directory, name), file.read())

    def write_tokeniser(self, directory: str) -> None:
        """See Encoding."""
        self.copy_files(directory)

    def rules(self) -> dict[str, Any]:
        """What tokenizer.json holds, without the space that it may put before a text."""
        return _without_prefix_space(_read_rules(storage.join(self.directory, TOKENISER)))


def find(name: Any, directory: str) -> Encoding:
    """The encoding called `name`, as the file `encoding` or a folder of labels in `directory` says.

    UserError for an unknown name, and where the tokeniser in there is another one.
    """
    if not isinstance(name, str) or not name.startswith(PREFIX):
        return encodings.by_name(name)
    encoding = read(directory)
    if encoding.name != name:
        raise UserError(
            f'{storage.join(directory, TOKENISER)} is {encoding.name}, not {name:.80}: put the'
            ' file back that was there'
        )
    return encoding


def of_directory(directory: str) -> Encoding:
    """The encoding of a directory of transformers: its tokeniser, or `main` for GPT-2's own.

    Without a tokenizer.json it is `main`, as in GPT-2's releases; UserError where config.json
    describes another model than GPT-2.
    """
    config = read_object(directory, 'config.json')
    model_type = config.get('model_type', 'gpt2')
    if not storage.exists(storage.join(directory, TOKENISER)):
        if model_type == 'gpt2':
            return encodings.Main
        raise UserError(
            f'{directory} has no {TOKENISER}: make one with'
            ' transformers.AutoTokenizer.from_pretrained(...).save_pretrained(...)'
        )
    is_of_gpt2 = model_type == 'gpt2' and config.get('vocab_size', 50257) == 50257
    if is_of_gpt2 and _summary_of(directory).has_gpt2_vocabulary:
        return encodings.Main
    return read(directory)


def read(directory: str) -> TokeniserEncoding:
    """The encoding of the tokenizer.json in `directory`, whatever else is there."""
    summary = _summary_of(directory)
    return TokeniserEncoding(
        f'{PREFIX}{summary.digest[:12]}',
        n_vocab=summary.n_vocab,
        eot_token=_eot_token(directory, summary),
        directory=directory,
    )


def reader(encoder: Encoder, is_chat: bool | None) -> Encoder:
    """What decodes texts for people to read: of a chat, without the marks of its template."""
    return encoder.reader() if is_chat and isinstance(encoder, TokeniserEncoder) else encoder


def of_unmarked_labels(encoding: Encoding) -> Encoding:
    """The encoding of labels of token ids that do not name it, for a model of `encoding`.

    It is the model's, if that is one of the original's, else that of the published labels.
    """
    return encodings.Main if isinstance(encoding, TokeniserEncoding) else encoding


def may_have_own(model: str) -> bool:
    """Whether a model may have a tokeniser of its own: see TrainedModel about its name.

    Nothing is fetched: of what is not on this machine that is not known.
    """
    if model in ('test', 'reviews') or released_name(model) is not None:
        return False
    if storage.is_remote(model) or not os.path.exists(model):
        return '/' in model  # as every URL has, and ORG/NAME of the hub
    run = os.path.join(model, 'policy')
    return any(os.path.exists(os.path.join(folder, TOKENISER)) for folder in (model, run))


class _Summary(NamedTuple):
    """What is kept of a tokenizer.json. digest: of all that decides how text is encoded."""

    digest: str
    n_vocab: int
    has_gpt2_vocabulary: bool
    token_of: dict[str, int]


def _md5_of(directory: str) -> str:
    """That of the tokenizer.json, which may change."""
    return storage.md5(storage.cached_path(storage.join(directory, TOKENISER)))


def _summary_of(directory: str) -> _Summary:
    return _summary(storage.join(directory, TOKENISER), _md5_of(directory))


@functools.lru_cache(maxsize=8)
def _summary(path: str, md5: str) -> _Summary:
    """md5: see _md5_of."""
    rules = _read_rules(path)
    try:
        token_of = tokens_of(rules)
        n_vocab = max(token_of.values()) + 1
        digest = _digest(_that_encode(rules))
    except (AttributeError, KeyError, TypeError, ValueError) as e:
        raise UserError(f'{path} is no tokeniser: {e!r:.80}') from e
    n_gpt2 = encodings.Main.n_vocab
    first = {text: token for text, token in token_of.items() if token < n_gpt2}
    is_gpt2 = len(first) == n_gpt2 and _digest(first) == GPT2_VOCABULARY
    return _Summary(digest, n_vocab, is_gpt2, token_of)


@functools.lru_cache(maxsize=8)
def _encoder(encoding: TokeniserEncoding, md5: str) -> TokeniserEncoder:
    """md5: see _md5_of."""
    path = storage.join(encoding.directory, TOKENISER)
    rules = _read_rules(path)
    try:
        return TokeniserEncoder(encoding, rules)
    except Exception as e:  # the library raises no other
        raise UserError(f'{path} is no tokeniser: {e}') from e


def _read_rules(path: str) -> dict[str, Any]:
    rules = storage.read_json(path)
    if not isinstance(rules, dict):
        raise UserError(f'{path} is no tokeniser: it is not a JSON object')
    return rules


def tokens_of(rules: Mapping[str, Any]) -> dict[str, int]:
    """{token as the file spells it: its id}, added tokens included."""
    vocab = rules['model']['vocab']
    if isinstance(vocab, list):  # of a unigram model: [token, score] in the order of the ids
        token_of = {token: number for number, (token, _) in enumerate(vocab)}
    else:
        token_of = {token: int(number) for token, number in vocab.items()}
    added = {token['content']: int(token['id']) for token in rules.get('added_tokens') or []}
    return {**token_of, **added}


def _that_encode(rules: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a tokenizer.json that decide how a text is encoded and decoded.

    Pairs that merge are written in two ways, 'a b' and ['a', 'b'].
    """
    names = ('added_tokens', 'normalizer', 'pre_tokenizer', 'decoder', 'model')
    parts = {name: rules.get(name) for name in names}
    model = parts['model']
    assert isinstance(model, dict)  # it has a vocabulary
    merges = model.get('merges') or []
    spelled = [pair if isinstance(pair, str) else ' '.join(pair) for pair in merges]
    return {**parts, 'model': {**model, 'merges': spelled}}


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(',', ':'))
    return hashlib.sha256(text.encode()).hexdigest()


def _without_prefix_space(rules: Mapping[str, Any]) -> dict[str, Any]:
    """The rules of a tokeniser that puts no space before a text, and takes none away.

    Those that come from SentencePiece do so, as the first word of a text then has the token that it
    has in the middle. Here most texts are from the middle of one.
    """
    parts = ('normalizer', 'pre_tokenizer', 'decoder')
    return {**rules, **{name: _bare(rules.get(name)) for name in parts}}


def _bare(rule: Any) -> Any:
    """One rule, or a sequence of them, without what concerns the space before a text."""
    if not isinstance(rule, dict):
        return rule
    kind = rule.get('type')
    if kind == 'Sequence':
        return {
            name: [bare for bare in map(_bare, value) if bare is not None]
            if isinstance(value, list)
            else value
            for name, value in rule.items()
        }
    if kind == 'Prepend' or (kind == 'Strip' and rule.get('content') == ' '):
        return None
    if kind == 'Metaspace':
        return {**rule, 'prepend_scheme': 'never', 'add_prefix_space': False}
    if kind == 'ByteLevel':
        return {**rule, 'add_prefix_space': False}
    return rule


def _eot_token(directory: str, summary: _Summary) -> int | None:
    """The token that ends a text, as the first file says that names one; None where none does."""
    spelled = special_tokens(directory, SETTINGS, ['eos_token']).get('eos_token')
    if spelled in summary.token_of:
        return summary.token_of[spelled]
    for name in ('config.json', 'generation_config.json'):
        tokens = read_object(directory, name).get('eos_token_id')
        first = tokens[0] if isinstance(tokens, list) and tokens else tokens
        if type(first) is int and 0 <= first < summary.n_vocab:
            return first
    return None


def special_tokens(directory: str, file: str, names: Iterable[str]) -> dict[str, str]:
    """{name: text} of those special tokens that a JSON file of the directory spells."""
    settings = read_object(directory, file)
    found = {}
    for name in names:
        token = settings.get(name)
        spelled = token.get('content') if isinstance(token, dict) else token
        if isinstance(spelled, str):
            found[name] = spelled
    return found


def read_object(directory: str, name: str) -> dict[str, Any]:
    """The object in a JSON file of the directory; an empty one where there is none."""
    path = storage.join(directory, name)
    value = storage.read_json(path) if storage.exists(path) else {}
    return value if isinstance(value, dict) else {}
