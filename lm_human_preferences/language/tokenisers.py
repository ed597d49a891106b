"""Tokeniser of a model of transformers as an encoding, as AutoTokenizer reads it.

It is seen in two ways. Contexts, which a policy reads, have the tokens that transformers makes. All
else, queries and responses, are parts of longer texts: without special tokens around them, and
without the space that some tokenisers put before a text. So `decode(encode(text))` is `text`, and
parts can be put together. Text that spells a special token stays text there. No code from the
directory is run.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any, SupportsInt

import tokenizers

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError, no_panics
from lm_human_preferences.language import encodings
from lm_human_preferences.language.encodings import Encoder, Encoding
from lm_human_preferences.language.gpt2.released import released_name
from lm_human_preferences.language.tokeniser_rules import (
    CONFIG,
    Tokeniser,
    digest,
    load,
    tokenizer_of,
)
from lm_human_preferences.runs import run_files

TOKENISER, SETTINGS = run_files.TOKENISER, run_files.TOKENISER_SETTINGS
GENERATION = run_files.GENERATION_CONFIG
# Files whose absence beside one of these files means that there is none.
_COMES_WITH = {
    SETTINGS: (TOKENISER,),
    'special_tokens_map.json': (TOKENISER,),
    'added_tokens.json': (TOKENISER,),
    run_files.CHAT_TEMPLATE: (TOKENISER, SETTINGS),
}
PREFIX = 'tokenizer-'  # of these encodings' names; 12 digits of a digest follow
# SHA-256 of GPT-2's vocabulary: its encoder.json, sorted, without white space.
GPT2_VOCABULARY = 'e35d8b86ebd35ebd260d040aa455e09759f7e675f4dbb7f3d727516f27eca190'


class TokeniserEncoder(Encoder):
    """Encoder of a tokeniser; padding is the first id that is not a token. own: transformers'."""

    def __init__(
        self, encoding: TokeniserEncoding, tokeniser: Tokeniser, special_tokens: bool = False
    ) -> None:
        self.encoding = encoding
        self.own = tokeniser.own
        self.eot_token = encoding.eot_token
        self.padding_token = encoding.n_vocab
        self.spells_special = True
        self._splits_special = not special_tokens
        added = self.own.backend_tokenizer.get_added_tokens_decoder()
        special = {token: each.content for token, each in added.items() if each.special}
        self.special = {} if special_tokens else special  # read as text: {token: its text}
        # Unigram models make special tokens of what spells them in any case.
        is_unigram = tokeniser.rules['model']['type'] == 'Unigram'
        self._never_text = frozenset(self.special) if is_unigram else frozenset()
        self._parts = tokenizer_of(tokeniser.rules)
        self._parts.encode_special_tokens = not special_tokens
        self._tokeniser = tokeniser

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a part of a text; UserError for text without a token."""
        with failing('encode', text):
            tokens = self._parts.encode(text, add_special_tokens=False).ids
        for token in tokens:
            if token in self._never_text:
                spelled = self.special[token]
                raise UserError(f'the tokeniser of the model cannot read {spelled!r:.80} as text')
        return tokens

    def encode_whole(self, text: str) -> list[int]:
        """Return the token ids that transformers gives a text from its beginning."""
        with failing('encode', text):
            return self.own(
                text, add_special_tokens=False, split_special_tokens=self._splits_special
            )['input_ids']

    @functools.cached_property
    def adds_space(self) -> bool:
        """Return whether transformers puts a space before a text."""
        return self.encode_whole('a') != self.encode('a')

    def decode(self, tokens: Iterable[SupportsInt]) -> str:
        """Return text with special tokens spelled out; KeyError for an id that is not a token.

        UserError where the tokeniser fails.
        """
        ids = [int(token) for token in tokens]
        for token in ids:
            if not 0 <= token <= self.padding_token:
                raise KeyError(token)
        ids = [token for token in ids if token != self.padding_token]
        with failing('decode', ids):
            return self._parts.decode(ids, skip_special_tokens=not self.spells_special)

    def with_special_tokens(self) -> TokeniserEncoder:
        return TokeniserEncoder(self.encoding, self._tokeniser, special_tokens=True)

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
        with failing('decode', 'all tokens'):
            singles = [[token] for token in range(self.padding_token)]
            return self._parts.decode_batch(singles, skip_special_tokens=False)


@contextlib.contextmanager
def failing(what: str, value: Any) -> Iterator[None]:
    """Raise errors of a tokeniser that is to encode or decode a value as UserErrors."""
    try:
        with no_panics():
            yield
    except Exception as e:  # the library raises no other
        raise UserError(f'the tokeniser of the model cannot {what} {value!r:.80}: {e}') from e


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokeniserEncoding(Encoding):
    """Encoding of the tokeniser in `directory` (path or URL). base: where other files of it are."""

    directory: str
    base: str | None = None
    tokeniser: Tokeniser

    def file(self, name: str) -> str:
        """Return the path of a file of the tokeniser or of its model, which may be missing."""
        return _file(name, self.directory, self.base)

    def get_encoder(self) -> TokeniserEncoder:
        """Return the encoder, made once."""
        return _encoder(self)

    def fits(self, rows: int) -> bool:
        """Return whether a network can have it: an embedding may have rows without tokens."""
        return rows >= self.n_vocab

    def copy_files(self, directory: str) -> None:
        """Copy the tokeniser's files into the directory of a saved model."""
        for name, source in _files(run_files.TOKENISER_FILES, self.directory, self.base).items():
            _check_own(source)
            with open(storage.cached_path(source), 'rb') as file:
                storage.write_bytes(os.path.join(directory, name), file.read())
        if not os.path.exists(os.path.join(directory, CONFIG)):
            # A model's config decides the class of its tokeniser, so its rules; else this does.
            path = os.path.join(directory, SETTINGS)
            named = {'tokenizer_class': type(self.tokeniser.own).__name__}
            storage.write_json(path, read_object(path) | named)

    def write_tokeniser(self, directory: str) -> None:
        self.copy_files(directory)


@functools.lru_cache(maxsize=8)
def _encoder(encoding: TokeniserEncoding) -> TokeniserEncoder:
    return TokeniserEncoder(encoding, encoding.tokeniser)


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
    config = read_object(storage.join(directory, CONFIG))
    model_type = config.get('model_type', 'gpt2')
    path = storage.join(directory, TOKENISER)
    if not storage.exists(path):
        if model_type == 'gpt2':
            return encodings.Main
        raise UserError(
            f'{directory} has no {TOKENISER}: make one with'
            ' transformers.AutoTokenizer.from_pretrained(...).save_pretrained(...)'
        )
    is_of_gpt2 = model_type == 'gpt2' and config.get('vocab_size', 50257) == 50257
    return encodings.Main if is_of_gpt2 and _has_gpt2_vocabulary(path) else read(directory)


def read(directory: str, base: str | None = None) -> TokeniserEncoding:
    """Return the encoding of the tokeniser in `directory`, or else in `base`."""
    tokeniser = _tokeniser(directory, base)
    n_vocab = max(tokeniser.own.get_vocab().values()) + 1
    ends = [tokeniser.own.eos_token_id]
    for file in (CONFIG, GENERATION):
        ends += _eos_ids(_file(file, directory, base), n_vocab)
    return TokeniserEncoding(
        f'{PREFIX}{tokeniser.digest[:12]}',
        n_vocab=n_vocab,
        eot_token=next((end for end in ends if end is not None), None),
        directory=directory,
        base=base,
        tokeniser=tokeniser,
    )


def encoding_of_adapter(directory: str, of_base: Encoding) -> Encoding:
    """Return the encoding of an adapter: of the files beside it, and else of those of its base."""
    beside = {name for name in run_files.TOKENISER_FILES if _is_in(directory, name)}
    if isinstance(of_base, TokeniserEncoding):
        return read(directory, of_base.directory) if beside else of_base
    if TOKENISER not in beside or _has_gpt2_vocabulary(storage.join(directory, TOKENISER)):
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


def _files(names: Iterable[str], directory: str, base: str | None) -> dict[str, str]:
    """Return the paths of those of the files that exist, by name."""
    paths = {name: _file(name, directory, base) for name in names}
    return {name: path for name, path in paths.items() if storage.exists(path)}


def _tokeniser(directory: str, base: str | None) -> Tokeniser:
    """Return the tokeniser in a directory as transformers reads it; UserError if it cannot be."""
    names = [TOKENISER, CONFIG, *run_files.TOKENISER_FILES]
    files = _files(names, directory, base)
    return load({TOKENISER: _file(TOKENISER, directory, base), **files})


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
    return any(text in together for text in encoder.special.values())


def own_ends(encoder: Encoder) -> frozenset[int]:
    """Return the tokens that end a text of a model, as its files say, or its encoding."""
    if isinstance(encoder, TokeniserEncoder):
        for file in (GENERATION, CONFIG):
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


def _has_gpt2_vocabulary(path: str) -> bool:
    """Return whether the first tokens of a tokenizer.json are GPT-2's."""
    try:
        with no_panics():
            vocab = tokenizers.Tokenizer.from_file(storage.cached_path(path)).get_vocab()
    except Exception as e:  # the library raises no other
        raise UserError(f'{path} is not a tokeniser: {e!r:.80}') from e
    n_gpt2 = encodings.Main.n_vocab
    first = {text: token for text, token in vocab.items() if token < n_gpt2}
    return len(first) == n_gpt2 and digest(first) == GPT2_VOCABULARY


def read_object(path: str) -> dict[str, Any]:
    """Return the object in a JSON file; empty if there is none."""
    value = storage.read_json(path) if storage.exists(path) else {}
    return value if isinstance(value, dict) else {}
