"""Encodings of text: `main` (GPT-2's byte pairs), `test` (letters), `reviews` (words)."""

import dataclasses
import functools
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import SupportsInt

import tiktoken

from lm_human_preferences import storage
from lm_human_preferences.datasets.registry import LETTERS
from lm_human_preferences.datasets.reviews import WORDS as REVIEW_WORDS
from lm_human_preferences.errors import UserError

# GPT-2's pattern (see its encoder.py) splits text into words, numbers, punctuation and white space.
WORDS = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
END_OF_TEXT = '<|endoftext|>'
# {file name in OpenAI's release: file name in transformers}
BYTE_PAIR_FILES = {'encoder.json': 'vocab.json', 'vocab.bpe': 'merges.txt'}


class Encoder(ABC):
    """Encoder of text to token ids and back. padding_token: may be outside the vocabulary.

    special: {id of a special token: its text}; `encode` treats such a text as ordinary letters.
    """

    padding_token: int
    eot_token: int | None
    special: Mapping[int, str] = {}

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`."""

    @abstractmethod
    def decode(self, tokens: Iterable[SupportsInt]) -> str:
        """Return the text of token ids (list, numpy array or tensor)."""

    def without_padding(self, tokens: Iterable[int]) -> list[int]:
        """Return the token ids that are not padding."""
        return [token for token in tokens if token != self.padding_token]

    def with_special_tokens(self) -> 'Encoder':
        """Return an encoder that also encodes special tokens; self if no special tokens exist."""
        return self

    def without_special_texts(self) -> 'Encoder':
        """Return an encoder that omits special tokens when it decodes; self if none exist."""
        return self

    def own_ends(self) -> frozenset[int]:
        """Return the ids of the tokens with which the model ends a text."""
        return frozenset() if self.eot_token is None else frozenset([self.eot_token])

    def single_token(self, text: str) -> int:
        """Return the id of `text` as a token; UserError unless `text` is exactly one token."""
        tokens = self.encode(text)
        if len(tokens) != 1:
            raise UserError(f'{text!r} must be a single token, not {len(tokens)}')
        return tokens[0]


class BytePairEncoder(Encoder):
    """GPT-2's encoder. pieces: bytes of all tokens by id, without the last token, END_OF_TEXT."""

    def __init__(self, pieces: Sequence[bytes], special_tokens: bool = False) -> None:
        self.eot_token = len(pieces)
        self.padding_token = len(pieces) + 3
        ranks = {piece: token for token, piece in enumerate(pieces)}
        special = {END_OF_TEXT: self.eot_token} if special_tokens else {}
        self._bpe = tiktoken.Encoding(
            'gpt2', pat_str=WORDS, mergeable_ranks=ranks, special_tokens=special
        )
        self._pieces = pieces
        self._bytes = {
            **dict(enumerate(pieces)),
            self.eot_token: END_OF_TEXT.encode(),
            self.padding_token: b'',
        }

    def encode(self, text: str) -> list[int]:
        return self._bpe.encode(text, allowed_special='all')

    def with_special_tokens(self) -> Encoder:
        return BytePairEncoder(self._pieces, special_tokens=True)

    def decode(self, tokens: Iterable[SupportsInt]) -> str:
        """Return the text, with U+FFFD for bytes that are not UTF-8; KeyError for an unknown id."""
        text = b''.join(self._bytes[int(token)] for token in tokens)
        return text.decode('utf-8', errors='replace')


class LetterEncoder(Encoder):
    """Encoder of a to z, each with a token; the full stop and all other characters share one."""

    eot_token = None
    padding_token = len(LETTERS)

    def encode(self, text: str) -> list[int]:
        return [LETTERS.find(letter) if letter in LETTERS else len(LETTERS) - 1 for letter in text]

    def decode(self, tokens: Iterable[SupportsInt]) -> str:
        """Return the text. As in the original, id 29 gives '' and any other unknown id <unk>."""
        texts = {**dict(enumerate(LETTERS)), len(LETTERS) + 2: ''}
        return ''.join(texts.get(int(token), '<unk>') for token in tokens)


class WordEncoder(Encoder):
    """Encoder of the words of film reviews, separated by white space."""

    eot_token = None
    padding_token = len(REVIEW_WORDS)
    token_of = {word: token for token, word in enumerate(REVIEW_WORDS)}

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`; UserError for a word that is not in REVIEW_WORDS."""
        try:
            return [self.token_of[word] for word in text.split()]
        except KeyError as e:
            raise UserError(
                f"encoding 'reviews' has no word {e}; its only words are those of the film reviews"
            ) from e

    def decode(self, tokens: Iterable[SupportsInt]) -> str:
        """Return the text; IndexError for an id that is neither a word nor padding."""
        words = self.without_padding(int(token) for token in tokens)
        return ' '.join(REVIEW_WORDS[word] for word in words)


@dataclasses.dataclass(frozen=True)
class Encoding:
    """Named encoding with its vocabulary. base_path: directory or URL of GPT-2's files, or None."""

    name: str
    n_vocab: int
    eot_token: int | None
    base_path: str | None = None

    def get_encoder(self) -> Encoder:
        """Return the encoder; UserError if its files are missing or damaged."""
        if self.base_path is None:
            return WordEncoder() if self.name == 'reviews' else LetterEncoder()
        vocab_path, merges_path = map(self.path, BYTE_PAIR_FILES)
        return _byte_pair_encoder(vocab_path, merges_path, self.n_vocab)

    def path(self, name: str) -> str:
        """Return the path or URL of a file, in $LMHP_GPT2_ENCODINGS or else in `base_path`."""
        base_path = os.environ.get('LMHP_GPT2_ENCODINGS') or self.base_path
        assert base_path is not None
        return storage.join(base_path, name)

    @property
    def is_here(self) -> bool:
        """Return whether this encoding can be used without a download."""
        return self.base_path is None or storage.is_here(self.path('encoder.json'))

    def fits(self, rows: int) -> bool:
        """Return whether a network whose embedding has `rows` rows can use this encoding."""
        return rows == self.n_vocab

    def copy_files(self, directory: str) -> None:
        """Copy a tokeniser's files to a directory; the built-in encodings have none to copy."""

    def write_tokeniser(self, directory: str) -> None:
        """Write GPT-2's tokeniser files, named as in transformers; other encodings write none."""
        if self.base_path is not None:
            for ours, theirs in BYTE_PAIR_FILES.items():
                source = storage.cached_path(self.path(ours))
                shutil.copyfile(source, os.path.join(directory, theirs))

    def write_files(self, directory: str) -> None:
        self.copy_files(directory)
        storage.write_json(storage.join(directory, 'encoding'), self.name)


@functools.lru_cache
def _byte_pair_encoder(vocab_path: str, merges_path: str, n_vocab: int) -> BytePairEncoder:
    """Read encoder.json and vocab.bpe; UserError unless the merges produce the vocabulary."""
    vocab = storage.read_json(vocab_path)
    merges = storage.read_text(merges_path).split('\n')[1:-1]
    byte_of = _byte_of()
    names = [*byte_of, *(merge.replace(' ', '') for merge in merges)]
    expected_vocab = {name: token for token, name in enumerate([*names, END_OF_TEXT])}
    is_whole = len(expected_vocab) == n_vocab and set(''.join(names)) <= byte_of.keys()
    if not is_whole or vocab != expected_vocab:
        raise UserError(f'{vocab_path} and {merges_path} do not belong together; get both again')
    table = str.maketrans({name: chr(byte) for name, byte in byte_of.items()})
    return BytePairEncoder([name.translate(table).encode('latin-1') for name in names])


def _byte_of() -> dict[str, int]:
    """Return {character in GPT-2's files: byte that it stands for}, in the order of token ids."""
    printable = [
        *range(ord('!'), ord('~') + 1),
        *range(ord('¡'), ord('¬') + 1),
        *range(ord('®'), ord('ÿ') + 1),
    ]
    rest = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable}
    for i, byte in enumerate(rest):
        byte_of[chr(256 + i)] = byte
    return byte_of


Main = Encoding('main', n_vocab=50257, eot_token=50256, base_path='gs://gpt-2/encodings/main')
Test = Encoding('test', n_vocab=27, eot_token=26)
Reviews = Encoding('reviews', n_vocab=len(REVIEW_WORDS), eot_token=None)


def by_name(name: str) -> Encoding:
    """Return the built-in encoding with this name; UserError for an unknown name."""
    encodings = {encoding.name: encoding for encoding in (Main, Test, Reviews)}
    if not isinstance(name, str) or name not in encodings:
        raise UserError(f'unknown encoding {name!r:.80}; there are {", ".join(encodings)}')
    return encodings[name]
