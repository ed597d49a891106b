"""Encoding of texts by a transformers model's own tokeniser, as AutoTokenizer loads it.

The tokeniser is used in two ways. Contexts, which a policy reads, have the tokens that transformers
makes. Queries and responses are parts of longer texts, so they are encoded without special tokens
around them, and without the space that some tokenisers put before a text. So `decode(encode(text))`
is `text`, and the tokens of parts can be joined. Text that spells a special token is read as
ordinary text. Code in the model's directory is never run.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import hashlib
import json
import os
import tempfile
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, SupportsInt

import tokenizers

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError, no_panics
from lm_human_preferences.language import encodings
from lm_human_preferences.language.encodings import Encoder, Encoding
from lm_human_preferences.language.networks.model_kinds import CONFIG_FILE, released_name
from lm_human_preferences.runs import run_files

TOKENISER, SETTINGS = run_files.TOKENISER, run_files.TOKENISER_SETTINGS
GENERATION = run_files.GENERATION_CONFIG
PREFIX = 'tokenizer-'  # an encoding's name is this prefix and 12 digits of its digest
# Settings that switch off cutting, padding, and special tokens around a text.
_PLAIN = {'truncation': None, 'padding': None, 'post_processor': None}
_END_FILES = (CONFIG_FILE, GENERATION)  # files that may name the tokens that end a text
# A tokeniser is refused if decode(encode(text)) changes one of these texts.
_TEXTS = ('The fox, 12 times. It is.', ' a', 'a', 'a ', '  a  b', 'a\n\nb\n', '\n\na', "don't !")
# A tokeniser may change one of these texts if its vocabulary lacks a character of the text.
_OTHER_TEXTS = ('', '<s> </s>', 'A\tb\r\n', 'Bär, nai\u0308ve', '東京 ﬁ ①', 'x' * 40, '🙂')


class TokeniserEncoder(Encoder):
    """Encoder that uses a model's tokeniser; its padding token's id follows the tokeniser's ids.

    own: transformers' tokeniser. rules: its rules, without the space before a text. files: {name:
    path or URL} of the tokeniser and of model configs, which name the tokens that end a text.
    """

    def __init__(self, own: Any, rules: dict[str, Any], files: Mapping[str, str]) -> None:
        self.own, self.rules, self.files = own, rules, files
        self.padding_token = n_vocab = max(own.get_vocab().values()) + 1
        in_config, in_generation = (_ends_in(files.get(name), n_vocab) for name in _END_FILES)
        ends = [own.eos_token_id, *in_config, *in_generation]
        self.eot_token = next((end for end in ends if end is not None), None)
        self._ends = frozenset(in_generation or in_config)
        added = own.backend_tokenizer.get_added_tokens_decoder()
        self.special = {token: each.content for token, each in added.items() if each.special}
        # Unigram tokenisers encode a special token's text as that token in spite of all settings.
        self.is_unigram = rules['model']['type'] == 'Unigram'
        self.omits_special = False
        self.parts = tokenizer_of(rules)
        self.parts.encode_special_tokens = True

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a part of a longer text; UserError if the tokeniser fails."""
        with failing('encode', text):
            tokens = self.parts.encode(text, add_special_tokens=False).ids
        spelled = [self.special[token] for token in tokens if token in self.special]
        if self.is_unigram and spelled:
            raise UserError(f'the tokeniser of the model cannot encode {spelled[0]!r:.80} as text')
        return tokens

    def encode_whole(self, text: str) -> list[int]:
        """Return transformers' token ids for a whole text, without special tokens around it."""
        with failing('encode', text):
            return self.own(
                text,
                add_special_tokens=False,
                split_special_tokens=self.parts.encode_special_tokens,
            )['input_ids']

    @functools.cached_property
    def adds_space(self) -> bool:
        """Return whether the library transformers puts a space before a text."""
        return self.encode_whole('a') != self.encode('a')

    def decode(self, tokens: Iterable[SupportsInt]) -> str:
        """Return text with special tokens spelled out; KeyError for an id that is not a token."""
        ids = [int(token) for token in tokens]
        for token in ids:
            if not 0 <= token <= self.padding_token:
                raise KeyError(f'{token} is not a token id of this tokeniser')
        ids = self.without_padding(ids)
        with failing('decode', ids):
            return self.parts.decode(ids, skip_special_tokens=self.omits_special)

    def with_special_tokens(self) -> TokeniserEncoder:
        """Return a copy that encodes the text of a special token as that token."""
        encoder = copy.copy(self)
        encoder.special = {}
        encoder.parts = tokenizer_of(self.rules)
        return encoder

    def without_special_texts(self) -> TokeniserEncoder:
        """Return a copy that omits special tokens from decoded texts, for people to read."""
        encoder = copy.copy(self)
        encoder.omits_special = True
        return encoder

    def own_ends(self) -> frozenset[int]:
        return self._ends or super().own_ends()

    def single_token(self, text: str) -> int:
        """Return the special token with this text, or else the only token that encodes the text."""
        for token, spelled in self.special.items():
            if spelled == text:
                return token
        return super().single_token(text)


@contextlib.contextmanager
def failing(verb: str, value: Any, tokeniser: str = 'the tokeniser of the model') -> Iterator[None]:
    """Within the context, turn errors into UserErrors such as "the tokeniser cannot encode ..."."""
    try:
        with no_panics():
            yield
    except Exception as e:  # the `tokenizers` library raises plain Exceptions
        raise UserError(f'{tokeniser} cannot {verb} {value!r:.80}: {e}') from e


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokeniserEncoding(Encoding):
    """Encoding by a transformers tokeniser."""

    encoder: TokeniserEncoder

    def get_encoder(self) -> TokeniserEncoder:
        return self.encoder

    def fits(self, rows: int) -> bool:
        """Return whether an embedding of `rows` rows has at least one row for each token."""
        return rows >= self.n_vocab

    def copy_files(self, directory: str) -> None:
        """Copy the tokeniser's files into the directory of a saved model."""
        for name, source in self.encoder.files.items():
            if name != CONFIG_FILE:
                _check_own(source, os.path.abspath(source).removesuffix(f'/{name}'))
                with open(storage.cached_path(source), 'rb') as file:
                    storage.write_bytes(os.path.join(directory, name), file.read())
        if not os.path.exists(os.path.join(directory, CONFIG_FILE)):
            # Without a model's config.json, tokenizer_config.json must name the tokeniser's class.
            path = os.path.join(directory, SETTINGS)
            named = {'tokenizer_class': type(self.encoder.own).__name__}
            storage.write_json(path, read_object(path) | named)

    def write_tokeniser(self, directory: str) -> None:
        self.copy_files(directory)


def _check_own(path: str, directory: str) -> None:
    """Raise UserError if `path` is a link out of `directory`: the target may be a private file."""
    blobs = os.path.join(directory, '../../blobs')  # where the hub's cache keeps its files
    if storage.is_remote(path) or any(storage.is_within(path, each) for each in (directory, blobs)):
        return
    raise UserError(
        f'{path} is a link to {os.path.realpath(path)}, outside of its directory, and would be'
        ' copied with the model: replace the link by the file'
    )


def find(name: Any, directory: str) -> Encoding:
    """Return the encoding `name`, built-in or from `directory`; UserError if there is none."""
    if not isinstance(name, str) or not name.startswith(PREFIX):
        return encodings.by_name(name)
    encoding = read(directory)
    if encoding.name != name:
        raise UserError(
            f'{storage.join(directory, TOKENISER)} defines the encoding {encoding.name}, not'
            f' {name:.80}: restore the original file'
        )
    return encoding


def encoding_in(directory: str) -> Encoding:
    """Return the encoding of a model that transformers saved: its tokeniser's, or else GPT-2's."""
    if storage.exists(storage.join(directory, TOKENISER)):
        return read(directory)
    if read_object(storage.join(directory, CONFIG_FILE)).get('model_type', 'gpt2') == 'gpt2':
        return encodings.Main
    raise UserError(
        f'{directory} has no {TOKENISER}: make one with'
        ' transformers.AutoTokenizer.from_pretrained(...).save_pretrained(...)'
    )


def read(directory: str) -> TokeniserEncoding:
    """Return the encoding of a directory's tokeniser; UserError if the tokeniser cannot be used."""
    files = _files_in(directory, [*run_files.TOKENISER_FILES, CONFIG_FILE])
    return _of_files({TOKENISER: storage.join(directory, TOKENISER), **files})


def encoding_of_adapter(directory: str, of_base: Encoding) -> Encoding:
    """Return the encoding of an adapter's own tokeniser, or `of_base` if the adapter has none."""
    beside = _files_in(directory, run_files.TOKENISER_FILES)
    if TOKENISER not in beside:
        return of_base
    files = of_base.encoder.files if isinstance(of_base, TokeniserEncoding) else {}
    of_model = {name: files[name] for name in _END_FILES if name in files}
    return _of_files({**of_model, **beside})


def _files_in(directory: str, names: Iterable[str]) -> dict[str, str]:
    """Return {name: path or URL} of the named files that exist in `directory`."""
    paths = {name: storage.join(directory, name) for name in names}
    return {name: path for name, path in paths.items() if storage.exists(path)}


def _of_files(files: Mapping[str, str]) -> TokeniserEncoding:
    """Return the encoding that a tokeniser's files {name: path or URL} define."""
    digests = [(*file, storage.md5(storage.cached_path(file[1]))) for file in files.items()]
    return _encoding(tuple(digests))


@functools.lru_cache(maxsize=8)
def _encoding(digests: tuple[tuple[str, str, str], ...]) -> TokeniserEncoding:
    """Return the encoding that tokeniser files define. digests: (name, path, MD5) of each file."""
    files = {name: path for name, path, _ in digests}
    try:
        with no_panics():
            own = _own({name: storage.cached_path(path) for name, path in files.items()})
            rules = without_prefix_space(json.loads(own.backend_tokenizer.to_str()) | _PLAIN)
            tokens = _tokens_of_texts(tokenizer_of(rules), own)
            encoder = TokeniserEncoder(own, rules, files)
    except Exception as e:  # transformers may raise any type of error
        reason = ' '.join(str(e).split()) or repr(e)
        raise UserError(f'{files[TOKENISER]} cannot be used: {reason:.300}') from e
    vocab_and_tokens = json.dumps(
        [own.get_vocab(), tokens], sort_keys=True, ensure_ascii=True, separators=(',', ':')
    )
    digest = hashlib.sha256(vocab_and_tokens.encode()).hexdigest()
    name, n_vocab = f'{PREFIX}{digest[:12]}', encoder.padding_token
    return TokeniserEncoding(name, n_vocab=n_vocab, eot_token=encoder.eot_token, encoder=encoder)


def _own(files: Mapping[str, str]) -> Any:
    """Return transformers' tokeniser from files {name: path}; may raise any exception."""
    from transformers import AutoTokenizer, TokenizersBackend  # transformers loads slowly

    # AutoTokenizer needs the tokeniser's class from config.json or tokenizer_config.json.
    is_said = CONFIG_FILE in files or SETTINGS in files
    kind: Any = AutoTokenizer if is_said else TokenizersBackend
    with tempfile.TemporaryDirectory() as folder:
        for name, path in files.items():
            if name != CONFIG_FILE:
                os.symlink(os.path.abspath(path), os.path.join(folder, name))
        if CONFIG_FILE in files:  # copy only the settings needed, as others may be damaged
            content = read_object(files[CONFIG_FILE])
            kinds = ('model_type', 'tokenizer_class')
            content = {name: content[name] for name in kinds if name in content}
            storage.write_json(os.path.join(folder, CONFIG_FILE), content)
        own = kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if not isinstance(own, TokenizersBackend):
        raise TypeError(f'the tokeniser needs {type(own).__name__}, which is not a fast tokeniser')
    own.backend_tokenizer.no_truncation()
    own.backend_tokenizer.no_padding()
    if not own.get_vocab():
        raise ValueError('the tokeniser has no tokens')
    return own


def read_object(path: str) -> dict[str, Any]:
    """Return the object in a JSON file; {} if the file is missing or holds no object."""
    value = storage.read_json(path) if storage.exists(path) else {}
    return value if isinstance(value, dict) else {}


def tokenizer_of(rules: Mapping[str, Any]) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(json.dumps(rules))


def _tokens_of_texts(parts: tokenizers.Tokenizer, own: Any) -> list[list[int]]:
    """Return the tokens of test texts; ValueError if decoding them does not give the texts back."""
    parts.encode_special_tokens = True
    rules = f'{type(parts.model).__name__}, {parts.normalizer}, {parts.pre_tokenizer}'
    source = f'{type(own).__name__}: {rules}'
    found = []
    for text in _TEXTS + _OTHER_TEXTS:
        tokens = parts.encode(text, add_special_tokens=False).ids
        found.append(tokens)
        if text in _OTHER_TEXTS and own.unk_token_id in tokens:
            continue
        back = parts.decode(tokens, skip_special_tokens=False)
        # Compare Unicode normal forms, as Qwen's rules compose accents.
        if len({unicodedata.normalize('NFKC', each) for each in (back, text)}) > 1:
            raise ValueError(f'the tokens of {text!r} decode to another text, {back!r} ({source})')
    both = [parts.encode(text, add_special_tokens=False).ids for text in ('The fox', 'es ran.')]
    joined = parts.decode(both[0] + both[1], skip_special_tokens=False)
    if joined != 'The foxes ran.':
        raise ValueError(
            f"the joined tokens of 'The fox' and 'es ran.' decode to another text, {joined!r}"
            f' ({source})'
        )
    return found


def without_prefix_space(rules: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tokeniser's rules without the space that SentencePiece puts before a text."""
    parts = ('normalizer', 'pre_tokenizer', 'decoder')
    return {**rules, **{name: _bare(rules.get(name)) for name in parts}}


def _bare(rule: Any) -> Any:
    """Change a step of a tokeniser's pipeline to add no space before texts; None drops the step."""
    if not isinstance(rule, dict):
        return rule
    bare = dict(rule)
    kind = rule.get('type')
    if kind == 'Prepend' or (kind == 'Strip' and rule.get('content') == ' '):
        return None
    if kind in ('Metaspace', 'ByteLevel'):
        bare['add_prefix_space'] = False
    if kind == 'Metaspace':
        bare['prepend_scheme'] = 'never'
    if kind == 'Sequence':
        for name, value in rule.items():
            if isinstance(value, list):
                bare[name] = [part for part in map(_bare, value) if part is not None]
    return bare


def _ends_in(path: str | None, n_vocab: int) -> list[int]:
    """Return the end-of-text ids (below `n_vocab`) in a model's JSON file; [] without a file."""
    named = None if path is None else read_object(path).get('eos_token_id')
    ids = named if isinstance(named, list) else [named]
    return [token for token in ids if type(token) is int and 0 <= token < n_vocab]


def for_people(encoder: Encoder, is_chat: bool | None) -> Encoder:
    """Return `encoder`; for a chat, return an encoder whose decoded texts lack special tokens."""
    return encoder.without_special_texts() if is_chat else encoder


def unnamed_ids_are_of_gpt2(model: Encoding | Encoder) -> bool:
    """Return whether labels that name no encoding hold token ids of GPT-2, not of `model`."""
    return isinstance(model, TokeniserEncoding | TokeniserEncoder)


@functools.lru_cache(maxsize=4)
def text_encoder(encoder: Encoder, special_tokens: bool) -> Encoder:
    return encoder.with_special_tokens() if special_tokens else encoder


def may_have_own(model: str) -> bool:
    """Return whether a model may have its own tokeniser, judged without a download."""
    if model in ('test', 'reviews') or released_name(model) is not None:
        return False
    if storage.is_remote(model) or not os.path.exists(model):
        return '/' in model  # URLs, and names of models on the hub, have a slash
    run = os.path.join(model, 'policy')
    return any(os.path.exists(os.path.join(folder, TOKENISER)) for folder in (model, run))
