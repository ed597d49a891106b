"""Encoding by a transformers model's own tokeniser, as AutoTokenizer loads it.

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
import glob
import os
import re
from collections.abc import Iterable, Iterator, Mapping
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
    read_object,
    tokenizer_of,
)
from lm_human_preferences.runs import run_files

TOKENISER, SETTINGS = run_files.TOKENISER, run_files.TOKENISER_SETTINGS
GENERATION = run_files.GENERATION_CONFIG
PREFIX = 'tokenizer-'  # prefix of these encodings' names, before 12 digits of the digest
# SHA-256 of GPT-2's vocabulary: its encoder.json, sorted, without white space.
GPT2_VOCABULARY = 'e35d8b86ebd35ebd260d040aa455e09759f7e675f4dbb7f3d727516f27eca190'


class TokeniserEncoder(Encoder):
    """Encoder that uses a model's tokeniser; the padding token is the first id after its tokens.

    own: transformers' tokeniser. files: {name: path or URL} for the tokeniser and its model.
    ends: tokens that end a text according to the model's files; may be empty.
    """

    def __init__(
        self,
        tokeniser: Tokeniser,
        files: Mapping[str, str],
        eot_token: int | None,
        ends: Iterable[int],
    ) -> None:
        self.tokeniser = tokeniser
        self.own = tokeniser.own
        self.files = files
        self.eot_token = eot_token
        self.padding_token = tokeniser.n_vocab
        self._ends = frozenset(ends)
        added = self.own.backend_tokenizer.get_added_tokens_decoder()
        self.special = {token: each.content for token, each in added.items() if each.special}
        # Unigram tokenisers read a spelled special token as the token, whatever the setting below.
        self.is_unigram = tokeniser.rules['model']['type'] == 'Unigram'
        self.omits_special = False
        self.parts = tokenizer_of(tokeniser.rules)
        self.parts.encode_special_tokens = True

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a part of a text; UserError if the tokeniser fails."""
        with failing('encode', text):
            tokens = self.parts.encode(text, add_special_tokens=False).ids
        spelled = [self.special[token] for token in tokens if token in self.special]
        if self.is_unigram and spelled:
            raise UserError(f'the tokeniser of the model cannot read {spelled[0]!r:.80} as text')
        return tokens

    def encode_whole(self, text: str) -> list[int]:
        """Return a whole text's token ids from transformers, without special tokens around it."""
        with failing('encode', text):
            return self.own(
                text,
                add_special_tokens=False,
                split_special_tokens=self.parts.encode_special_tokens,
            )['input_ids']

    @functools.cached_property
    def adds_space(self) -> bool:
        """Return whether transformers puts a space before a text."""
        return self.encode_whole('a') != self.encode('a')

    def decode(self, tokens: Iterable[SupportsInt]) -> str:
        """Return text with special tokens spelled out; KeyError for an id that is not a token.

        UserError if the tokeniser fails.
        """
        ids = [int(token) for token in tokens]
        for token in ids:
            if not 0 <= token <= self.padding_token:
                raise KeyError(token)
        ids = self.without_padding(ids)
        with failing('decode', ids):
            return self.parts.decode(ids, skip_special_tokens=self.omits_special)

    def with_special_tokens(self) -> TokeniserEncoder:
        """Return a copy that reads a spelled special token as the token."""
        encoder = copy.copy(self)
        encoder.special = {}
        encoder.parts = tokenizer_of(self.tokeniser.rules)
        return encoder

    def without_special_texts(self) -> TokeniserEncoder:
        """Return a copy that omits special tokens from decoded texts, for people to read."""
        encoder = copy.copy(self)
        encoder.omits_special = True
        return encoder

    def own_ends(self) -> frozenset[int]:
        return self._ends or super().own_ends()

    def tokens_holding(self, text: str) -> frozenset[int]:
        """Return the tokens that contain `text` as whole words; UserError if no token does."""
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
        """Return each token's text, with U+FFFD for a part of a character."""
        with failing('decode', 'all tokens'):
            singles = [[token] for token in range(self.padding_token)]
            return self.parts.decode_batch(singles, skip_special_tokens=False)


@contextlib.contextmanager
def failing(what: str, value: Any, whose: str = 'the tokeniser of the model') -> Iterator[None]:
    """Within the context, turn an error into a UserError: `whose` cannot `what` `value`."""
    try:
        with no_panics():
            yield
    except Exception as e:  # the library raises plain Exceptions
        raise UserError(f'{whose} cannot {what} {value!r:.80}: {e}') from e


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokeniserEncoding(Encoding):
    """Encoding by a transformers tokeniser."""

    encoder: TokeniserEncoder

    def get_encoder(self) -> TokeniserEncoder:
        return self.encoder

    def fits(self, rows: int) -> bool:
        """Return whether an embedding of `rows` rows has a row for each token; it may have more."""
        return rows >= self.n_vocab

    def copy_files(self, directory: str) -> None:
        """Copy the tokeniser's files into the directory of a saved model."""
        for name, source in self.encoder.files.items():
            if name != CONFIG:
                _check_own(source, os.path.abspath(source).removesuffix(f'/{name}'))
                with open(storage.cached_path(source), 'rb') as file:
                    storage.write_bytes(os.path.join(directory, name), file.read())
        if not os.path.exists(os.path.join(directory, CONFIG)):
            # Without a model's config, these settings decide the tokeniser's class and rules.
            path = os.path.join(directory, SETTINGS)
            named = {'tokenizer_class': type(self.encoder.own).__name__}
            storage.write_json(path, read_object(path) | named)

    def write_tokeniser(self, directory: str) -> None:
        self.copy_files(directory)


def _check_own(path: str, directory: str) -> None:
    """Raise UserError for a link from `directory` to a file elsewhere, which may be private.

    Links from a snapshot to blobs in the hub's cache are allowed.
    """
    snapshots = os.path.dirname(directory)
    allowed = [directory]
    if os.path.basename(snapshots) == 'snapshots':
        allowed.append(os.path.join(os.path.dirname(snapshots), 'blobs'))
    if storage.is_remote(path) or any(storage.is_within(path, each) for each in allowed):
        return
    raise UserError(
        f'{path} is a link to {os.path.realpath(path)}, outside of its directory, and would be'
        ' copied with the model: put the file itself in its place'
    )


def find(name: Any, directory: str) -> Encoding:
    """Return the encoding `name`; UserError if unknown or not of the tokeniser in `directory`."""
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
    """Return the encoding of a directory that transformers saved; `main` for GPT-2's tokeniser."""
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


def read(directory: str) -> TokeniserEncoding:
    """Return the encoding of the tokeniser in `directory`; UserError if it would change texts."""
    files = _tokeniser_in(directory) | _files_in(directory, [CONFIG])
    return _of_files({TOKENISER: storage.join(directory, TOKENISER), **files})


def encoding_of_adapter(directory: str, of_base: Encoding) -> Encoding:
    """Return the encoding of an adapter's own tokeniser, or else `of_base`, its base's encoding."""
    beside = _tokeniser_in(directory)
    if TOKENISER not in beside:
        return of_base
    if not isinstance(of_base, TokeniserEncoding):
        return of_base if _has_gpt2_vocabulary(beside[TOKENISER]) else read(directory)
    files = of_base.encoder.files
    of_model = {name: files[name] for name in (CONFIG, GENERATION) if name in files}
    return _of_files({**of_model, **beside})


def _tokeniser_in(directory: str) -> dict[str, str]:
    """Return {name: path} of the tokeniser's files; local ones with additional chat templates."""
    found = _files_in(directory, run_files.TOKENISER_FILES)
    if TOKENISER in found:
        folder = os.path.dirname(storage.cached_path(found[TOKENISER]))
        found |= _files_in(
            directory, glob.glob(f'{run_files.MORE_TEMPLATES}/*.jinja', root_dir=folder)
        )
    return found


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
    """Return the encoding that files (name, path, MD5) define; they are read only once."""
    files = {name: path for name, path, _ in digests}
    tokeniser = load(files)
    n_vocab = tokeniser.n_vocab
    in_config, in_generation = (_ends_in(files.get(each), n_vocab) for each in (CONFIG, GENERATION))
    ends = [tokeniser.own.eos_token_id, *in_config, *in_generation]
    eot_token = next((end for end in ends if end is not None), None)
    encoder = TokeniserEncoder(tokeniser, files, eot_token, in_generation or in_config)
    return TokeniserEncoding(
        f'{PREFIX}{tokeniser.digest[:12]}', n_vocab=n_vocab, eot_token=eot_token, encoder=encoder
    )


def _ends_in(path: str | None, n_vocab: int) -> list[int]:
    """Return the end tokens below `n_vocab` that a JSON file names; [] without a file."""
    named = None if path is None else read_object(path).get('eos_token_id')
    ids = named if isinstance(named, list) else [named]
    return [token for token in ids if type(token) is int and 0 <= token < n_vocab]


def for_people(encoder: Encoder, is_chat: bool | None) -> Encoder:
    """Return an encoder that decodes texts for people to read: chats without special tokens."""
    return encoder.without_special_texts() if is_chat else encoder


def unnamed_ids_are_of_gpt2(model: Encoding | Encoder) -> bool:
    """Return whether token ids in a file that names no encoding are GPT-2's.

    They are if the model has its own tokeniser; else they are ids of the model's encoding.
    """
    return isinstance(model, TokeniserEncoding | TokeniserEncoder)


@functools.lru_cache(maxsize=4)
def text_encoder(encoder: Encoder, special_tokens: bool) -> Encoder:
    return encoder.with_special_tokens() if special_tokens else encoder


def may_have_own(model: str) -> bool:
    """Return whether a model may have its own tokeniser, as far as known without a download."""
    if model in ('test', 'reviews') or released_name(model) is not None:
        return False
    if storage.is_remote(model) or not os.path.exists(model):
        return '/' in model  # as in every URL, and in the hub's ORG/NAME
    run = os.path.join(model, 'policy')
    return any(os.path.exists(os.path.join(folder, TOKENISER)) for folder in (model, run))


def _has_gpt2_vocabulary(path: str) -> bool:
    """Return whether the first tokens of a tokenizer.json are GPT-2's."""
    try:
        with no_panics():
            vocab = tokenizers.Tokenizer.from_file(storage.cached_path(path)).get_vocab()
    except Exception as e:  # the library raises plain Exceptions
        raise UserError(f'{path} is not a tokeniser: {e!r:.80}') from e
    n_gpt2 = encodings.Main.n_vocab
    first = {text: token for text, token in vocab.items() if token < n_gpt2}
    return len(first) == n_gpt2 and digest(first) == GPT2_VOCABULARY
