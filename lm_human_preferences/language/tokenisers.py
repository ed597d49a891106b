"""Tokeniser in a directory of transformers as an encoding: tokenizer.json.

The library `tokenizers` reads it; no code from the directory is run. A text is encoded as a part of
a longer one: without special tokens around it, and without the space that some tokenisers put
before a text. So `decode(encode(text))` is `text`, and prefix, query and suffix can be encoded one
by one. Text that spells a special token stays text.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, SupportsInt

import tokenizers

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError, no_panics
from lm_human_preferences.language import encodings
from lm_human_preferences.language.encodings import Encoder, Encoding
from lm_human_preferences.language.gpt2.released import released_name
from lm_human_preferences.language.tokeniser_rules import digest as digest_of
from lm_human_preferences.language.tokeniser_rules import (
    encoding_rules,
    tokens_of,
    without_prefix_space,
)
from lm_human_preferences.runs import run_files

TOKENISER = run_files.TOKENISER
SETTINGS = run_files.TOKENISER_SETTINGS
TEMPLATE = run_files.CHAT_TEMPLATE
# Files whose absence beside one of these files means that there is none.
_COMES_WITH = {
    SETTINGS: (TOKENISER,),
    'special_tokens_map.json': (TOKENISER,),
    TEMPLATE: (TOKENISER, SETTINGS),
}
PREFIX = 'tokenizer-'  # of these encodings' names; 12 digits of a digest follow
# SHA-256 of GPT-2's vocabulary: its encoder.json, sorted, without white space.
GPT2_VOCABULARY = 'e35d8b86ebd35ebd260d040aa455e09759f7e675f4dbb7f3d727516f27eca190'


class TokeniserEncoder(Encoder):
    """Encoder of a tokenizer.json; padding is the first id that is not a token."""

    def __init__(
        self, encoding: TokeniserEncoding, rules: Mapping[str, Any], special_tokens: bool = False
    ) -> None:
        self.encoding = encoding
        self.eot_token = encoding.eot_token
        self.padding_token = encoding.n_vocab
        self.spells_special = True
        added = rules.get('added_tokens') or []
        self.special_texts = frozenset(
            each['content'] for each in added if each.get('special') and not special_tokens
        )
        self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(without_prefix_space(rules)))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = not special_tokens
        self._made_of = encoding, rules

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`; UserError for text without a token."""
        try:
            with no_panics():
                return self._tokenizer.encode(text, add_special_tokens=False).ids
        except Exception as e:  # the library raises no other
            raise UserError(f'the tokeniser of the model cannot encode {text!r:.80}: {e}') from e

    def decode(self, tokens: Iterable[SupportsInt]) -> str:
        """Return text with special tokens spelled out; KeyError for an id that is not a token.

        UserError where the tokeniser fails.
        """
        ids = [int(token) for token in tokens]
        for token in ids:
            if not 0 <= token <= self.padding_token:
                raise KeyError(token)
        ids = [token for token in ids if token != self.padding_token]
        try:
            with no_panics():
                return self._tokenizer.decode(ids, skip_special_tokens=not self.spells_special)
        except Exception as e:  # as above
            raise UserError(f'the tokeniser of the model cannot decode {ids!r:.80}: {e}') from e

    def with_special_tokens(self) -> TokeniserEncoder:
        return TokeniserEncoder(*self._made_of, special_tokens=True)

    def reader(self) -> TokeniserEncoder:
        """Return a copy that omits special tokens from texts, for people to read."""
        reader = copy.copy(self)
        reader.spells_special = False
        return reader

    def tokens_holding(self, text: str) -> frozenset[int]:
        """Return the tokens that contain `text`, but no word in a longer one; UserError if none."""
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
        """Return the text of each token, with U+FFFD for parts of characters."""
        decode, ids = self._tokenizer.decode, range(self.padding_token)
        with _explained(self.encoding.file(TOKENISER)):
            return [decode([token], skip_special_tokens=False) for token in ids]


@dataclasses.dataclass(frozen=True)
class TokeniserEncoding(Encoding):
    """Encoding of the tokeniser in `directory` (path or URL). base: where other files of it are."""

    directory: str = ''
    base: str | None = None

    def file(self, name: str) -> str:
        """Return the path of a file of the tokeniser or of its model, which may be missing."""
        return _file(name, self.directory, self.base)

    def get_encoder(self) -> TokeniserEncoder:
        """Return the encoder, made once; UserError if its file is missing or damaged."""
        return _encoder(self)

    def fits(self, rows: int) -> bool:
        """Return whether a network can have it: an embedding may have rows without tokens."""
        return rows >= self.n_vocab

    def copy_files(self, directory: str) -> None:
        """Copy the tokeniser's files into the directory of a saved model."""
        for name in run_files.TOKENISER_FILES:
            source = self.file(name)
            if storage.exists(source):
                _check_own(source)
                with open(storage.cached_path(source), 'rb') as file:
                    storage.write_bytes(os.path.join(directory, name), file.read())

    def write_tokeniser(self, directory: str) -> None:
        self.copy_files(directory)

    def rules(self) -> dict[str, Any]:
        return without_prefix_space(storage.read_json(self.file(TOKENISER)))


def _check_own(path: str) -> None:
    """Raise UserError for a link to a file elsewhere, which nobody has meant to be copied.

    The links of the hub's cache lead from its snapshots to its blobs.
    """
    directory = os.path.dirname(os.path.abspath(path))
    snapshots = os.path.dirname(directory)
    allowed = [directory]
    if os.path.basename(snapshots) == 'snapshots':
        allowed.append(os.path.join(os.path.dirname(snapshots), 'blobs'))
    if storage.is_remote(path) or any(storage.is_within(path, each) for each in allowed):
        return
    raise UserError(
        f'{path} is a link to {os.path.realpath(path)}, outside of its directory: it would be'
        ' copied with the model; put the file itself in its place'
    )


def find(name: Any, directory: str) -> Encoding:
    """Return the encoding of that name; UserError if it is unknown or not that of `directory`."""
    if not isinstance(name, str) or not name.startswith(PREFIX):
        return encodings.by_name(name)
    encoding = read(directory)
    if encoding.name != name:
        raise UserError(
            f'{storage.join(directory, TOKENISER)} is {encoding.name}, not {name:.80}: put the'
            ' file back that was there'
        )
    return encoding


def encoding_in(directory: str) -> Encoding:
    """Return the encoding of a directory of transformers: `main` for GPT-2's own."""
    config = read_object(storage.join(directory, 'config.json'))
    model_type = config.get('model_type', 'gpt2')
    if not storage.exists(storage.join(directory, TOKENISER)):
        if model_type == 'gpt2':
            return encodings.Main
        raise UserError(
            f'{directory} has no {TOKENISER}: make one with'
            ' transformers.AutoTokenizer.from_pretrained(...).save_pretrained(...)'
        )
    is_of_gpt2 = model_type == 'gpt2' and config.get('vocab_size', 50257) == 50257
    if is_of_gpt2 and _summary_of(storage.join(directory, TOKENISER)).has_gpt2_vocabulary:
        return encodings.Main
    return read(directory)


def read(directory: str, base: str | None = None) -> TokeniserEncoding:
    """Return the encoding of the tokenizer.json in `directory`, or else in `base`."""
    summary = _summary_of(_file(TOKENISER, directory, base))
    _check_added(summary.token_of, _file(SETTINGS, directory, base))
    return TokeniserEncoding(
        f'{PREFIX}{summary.digest[:12]}',
        n_vocab=summary.n_vocab,
        eot_token=_eot_token(summary, directory, base),
        directory=directory,
        base=base,
    )


def _check_added(token_of: Mapping[str, int], settings: str) -> None:
    """Raise UserError for a token that transformers adds from a tokeniser's settings alone."""
    added = read_object(settings).get('added_tokens_decoder')
    if not isinstance(added, dict):
        return
    for number, token in added.items():
        text = token.get('content') if isinstance(token, dict) else None
        if isinstance(text, str) and str(token_of.get(text)) != number:
            raise UserError(
                f'{settings} adds the token {text!r:.80} as {number:.20}, which {TOKENISER} does'
                ' not: make both again with'
                ' transformers.AutoTokenizer.from_pretrained(...).save_pretrained(...)'
            )


def encoding_of_adapter(directory: str, of_base: Encoding) -> Encoding:
    """Return the encoding of an adapter: of the files beside it, and else of those of its base."""
    beside = {name for name in run_files.TOKENISER_FILES if _is_in(directory, name)}
    if isinstance(of_base, TokeniserEncoding):
        return read(directory, of_base.directory) if beside else of_base
    path = storage.join(directory, TOKENISER)
    if TOKENISER not in beside or _summary_of(path).has_gpt2_vocabulary:
        return of_base
    return read(directory)


def beside_adapter(encoder: Encoder) -> list[str]:
    """Return the paths of a tokeniser's files that are beside an adapter, not its base."""
    if not isinstance(encoder, TokeniserEncoder) or encoder.encoding.base is None:
        return []
    directory = encoder.encoding.directory
    names = [name for name in run_files.TOKENISER_FILES if _is_in(directory, name)]
    return [storage.join(directory, name) for name in names]


def _is_in(directory: str, name: str) -> bool:
    return storage.exists(storage.join(directory, name))


def _file(name: str, directory: str, base: str | None) -> str:
    if base is None or any(_is_in(directory, each) for each in (name, *_COMES_WITH.get(name, ()))):
        return storage.join(directory, name)
    return storage.join(base, name)


def reader(encoder: Encoder, is_chat: bool | None) -> Encoder:
    """Return a decoder of texts for people: of a chat, without the marks of its template."""
    return encoder.reader() if is_chat and isinstance(encoder, TokeniserEncoder) else encoder


def unnamed_ids_are_of_gpt2(model: Encoding | Encoder) -> bool:
    """Return whether unnamed token ids are GPT-2's: if the model has a tokeniser of its own."""
    return isinstance(model, TokeniserEncoding | TokeniserEncoder)


@functools.lru_cache(maxsize=4)
def text_encoder(encoder: Encoder, special_tokens: bool) -> Encoder:
    return encoder.with_special_tokens() if special_tokens else encoder


def spells_special(encoder: Encoder, *texts: str) -> bool:
    """Return whether texts spell special tokens that `encoder` takes for ordinary letters."""
    if not isinstance(encoder, TokeniserEncoder):
        return False
    together = '\n'.join(texts)
    return any(map(together.__contains__, encoder.special_texts))


def own_ends(encoder: Encoder) -> frozenset[int]:
    """Return the tokens that end a text of a model, as its files say, or its encoding."""
    if isinstance(encoder, TokeniserEncoder):
        for file in ('generation_config.json', 'config.json'):
            ends = _eos_ids(encoder.encoding.file(file), encoder.padding_token)
            if ends:
                return frozenset(ends)
    return frozenset() if encoder.eot_token is None else frozenset([encoder.eot_token])


def _eos_ids(path: str, n_vocab: int) -> list[int]:
    """Return the tokens below `n_vocab` that a JSON file names as ends."""
    named = read_object(path).get('eos_token_id')
    ids = named if isinstance(named, list) else [named]
    return [token for token in ids if type(token) is int and 0 <= token < n_vocab]


def may_have_own(model: str) -> bool:
    """Return whether a model may have a tokeniser of its own, as far as known without fetching."""
    if model in ('test', 'reviews') or released_name(model) is not None:
        return False
    if storage.is_remote(model) or not os.path.exists(model):
        return '/' in model  # as every URL has, and ORG/NAME of the hub
    run = os.path.join(model, 'policy')
    return any(os.path.exists(os.path.join(folder, TOKENISER)) for folder in (model, run))


class _Summary(NamedTuple):
    """Summary of a tokenizer.json. digest: of all that affects encoding."""

    digest: str
    n_vocab: int
    has_gpt2_vocabulary: bool
    token_of: dict[str, int]


def _summary_of(path: str) -> _Summary:
    return _summary(path, storage.md5(storage.cached_path(path)))


@functools.lru_cache(maxsize=8)
def _summary(path: str, md5: str) -> _Summary:
    rules = storage.read_json(path)
    with _explained(path):
        token_of = tokens_of(rules)
        n_vocab = max(token_of.values()) + 1
        digest = digest_of(encoding_rules(rules))
    n_gpt2 = encodings.Main.n_vocab
    first = {text: token for text, token in token_of.items() if token < n_gpt2}
    is_gpt2 = len(first) == n_gpt2 and digest_of(first) == GPT2_VOCABULARY
    return _Summary(digest, n_vocab, is_gpt2, token_of)


@functools.lru_cache(maxsize=8)
def _encoder(encoding: TokeniserEncoding) -> TokeniserEncoder:
    path = encoding.file(TOKENISER)
    rules = storage.read_json(path)
    with _explained(path):
        return TokeniserEncoder(encoding, rules)


@contextlib.contextmanager
def _explained(path: str) -> Iterator[None]:
    """Raise any error about the tokeniser in a file as a UserError with the library's words."""
    try:
        with no_panics():
            yield
    except Exception as e:  # the library raises no other
        raise UserError(f'{path} is not a tokeniser: {e!r:.80}') from e


def _eot_token(summary: _Summary, directory: str, base: str | None) -> int | None:
    """Return the token that ends a text, from the first file that names one."""
    spelled = special_tokens(_file(SETTINGS, directory, base), ['eos_token']).get('eos_token')
    if spelled in summary.token_of:
        return summary.token_of[spelled]
    for file in ('config.json', 'generation_config.json'):
        for token in _eos_ids(_file(file, directory, base), summary.n_vocab):
            return token
    return None


def special_tokens(path: str, names: Iterable[str]) -> dict[str, str]:
    """Return {name: text} of the special tokens that a JSON file spells."""
    settings = read_object(path)
    found = {}
    for name in names:
        token = settings.get(name)
        spelled = token.get('content') if isinstance(token, dict) else token
        if isinstance(spelled, str):
            found[name] = spelled
    return found


def read_object(path: str) -> dict[str, Any]:
    """Return the object in a JSON file; empty if there is none."""
    value = storage.read_json(path) if storage.exists(path) else {}
    return value if isinstance(value, dict) else {}
