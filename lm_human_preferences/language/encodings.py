"""Text to token ids and back.

The encoding `main` is GPT-2's byte pair encoding, `test` has letters, `reviews` whole words. Those
of other models are in tokenisers.py.
"""

import dataclasses
import functools
import os
import shutil
from collections.abc import Iterable, Sequence
from typing import Protocol, SupportsInt

import tiktoken

from lm_human_preferences import storage
from lm_human_preferences.datasets.letters import LETTERS
from lm_human_preferences.datasets.reviews import WORDS as REVIEW_WORDS
from lm_human_preferences.errors import UserError

# GPT-2's pattern of words, numbers, punctuation and white space (section 2.2 of its paper;
# encoder.py of its release).
WORDS = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
END_OF_TEXT = '<|endoftext|>'
BYTE_PAIR_FILES = ('encoder.json', 'vocab.bpe')
# The files of OpenAI's release: what transformers calls them.
TRANSFORMERS_FILES = {'encoder.json': 'vocab.json', 'vocab.bpe': 'merges.txt'}


class Encoder(Protocol):
    """What all encoders of this module can do: turn text into token ids and back."""

    @property
    def padding_token(self) -> int:
        """The token id that pads a sequence; the model's vocabulary may not have it."""
        ...

    @property
    def eot_token(self) -> int | None:
        """The token id that ends a text; None where the encoding has none."""
        ...

    def encode(self, text: str) -> list[int]:
        """List of token ids of `text`."""
        ...

    def decode(self, tokens: Iterable[SupportsInt]) -> str:
        """Text of token ids (list, numpy array or tensor)."""
        ...

    def tokens_holding(self, text: str) -> frozenset[int]:
        """The tokens at which a text begins or ends that does so at `text`; UserError for none."""
        ...


class _OneToken:
    """Encodings of the original's: what a text begins or ends at is one token, as there."""

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def tokens_holding(self, text: str) -> frozenset[int]:
        """The token of `text`; UserError unless it is a single one."""
        tokens = self.encode(text)
        if len(tokens) != 1:
            raise UserError(f'{text!r} must be a single token, not {len(tokens)}')
        return frozenset(tokens)


class BytePairEncoder(_OneToken):
    """GPT-2's encoding (the original's ReversibleEncoder).

    pieces: the bytes of every token in the order in which pairs merge, without the last token,
    which ends a text.
    """

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.eot_token = len(pieces)
        self.padding_token = len(pieces) + 3
        ranks = {piece: token for token, piece in enumerate(pieces)}
        self._bpe = tiktoken.Encoding(
            'gpt2', pat_str=WORDS, mergeable_ranks=ranks, special_tokens={}
        )
        self._bytes = {
            **dict(enumerate(pieces)),
            self.eot_token: END_OF_TEXT.encode(),
            self.padding_token: b'',
        }

    def encode(self, text: str) -> list[int]:
        """List of token ids of `text`."""
        return self._bpe.encode_ordinary(text)

    def decode(self, tokens: Iterable[SupportsInt]) -> str:
        """Text of token ids (list, numpy array or tensor), without padding.

        Bytes that are not UTF-8 become U+FFFD. Raises KeyError for an id that is neither a token
        nor padding.
        """
        text = b''.join(self._bytes[int(token)] for token in tokens)
        return text.decode('utf-8', errors='replace')


class LetterEncoder(_OneToken):
    """A token for each of a to z, and one for the full stop and all other characters."""

    eot_token = None
    padding_token = len(LETTERS)

    def encode(self, text: str) -> list[int]:
        """List of token ids of `text`."""
        return [LETTERS.find(letter) if letter in LETTERS else len(LETTERS) - 1 for letter in text]

    def decode(self, tokens: Iterable[SupportsInt]) -> str:
        """The text of token ids.

        As in the original, padding and most unknown ids give <unk>, and one gives nothing.
        """
        texts = {**dict(enumerate(LETTERS)), len(LETTERS) + 2: ''}
        return ''.join(texts.get(int(token), '<unk>') for token in tokens)


class WordEncoder(_OneToken):
    """A token for each word of the film reviews, which white space separates."""

    eot_token = None
    padding_token = len(REVIEW_WORDS)
    token_of = {word: token for token, word in enumerate(REVIEW_WORDS)}

    def encode(self, text: str) -> list[int]:
        """List of token ids of `text`; UserError for a word that no review has."""
        try:
            return [self.token_of[word] for word in text.split()]
        except KeyError as e:
            raise UserError(
                f"encoding 'reviews' has no word {e}; it knows those of our film reviews only"
            ) from e

    def decode(self, tokens: Iterable[SupportsInt]) -> str:
        """Text of token ids, without padding; IndexError for an id that is neither."""
        words = [int(token) for token in tokens if int(token) != self.padding_token]
        return ' '.join(REVIEW_WORDS[word] for word in words)


@dataclasses.dataclass(frozen=True)
class Encoding:
    """An encoding by name. base_path: directory or URL of its encoder.json and vocab.bpe."""

    name: str
    n_vocab: int
    eot_token: int | None
    base_path: str | None = None

    def get_encoder(self) -> Encoder:
        """The encoder, made once. Raises UserError where its files are missing or damaged."""
        if self.base_path is None:
            return WordEncoder() if self.name == 'reviews' else LetterEncoder()
        vocab_path, merges_path = map(self.path, BYTE_PAIR_FILES)
        return _byte_pair_encoder(vocab_path, merges_path, self.n_vocab)

    def path(self, name: str) -> str:
        """Path or URL of the file `name`, which LMHP_GPT2_ENCODINGS moves."""
        base_path = os.environ.get('LMHP_GPT2_ENCODINGS') or self.base_path
        assert base_path is not None
        return storage.join(base_path, name)

    @property
    def is_here(self) -> bool:
        """Whether texts can be encoded without fetching anything."""
        return self.base_path is None or storage.is_here(self.path(BYTE_PAIR_FILES[0]))

    def fits(self, rows: int) -> bool:
        """Whether a network whose embedding has so many rows can be one of this encoding."""
        return rows == self.n_vocab

    def copy_files(self, directory: str) -> None:
        """Copy the files that `tokenisers.find` needs beside this name; none of these encodings."""

    def write_tokeniser(self, directory: str) -> None:
        """Write what transformers reads this encoding from, where it can, to a local directory."""
        if self.base_path is not None:
            for ours, theirs in TRANSFORMERS_FILES.items():
                source = storage.cached_path(self.path(ours))
                shutil.copyfile(source, os.path.join(directory, theirs))

    def write_files(self, directory: str) -> None:
        """Write the file `encoding`, by which a model that is saved in `directory` is read."""
        self.copy_files(directory)
        storage.write_json(storage.join(directory, 'encoding'), self.name)


@functools.lru_cache
def _byte_pair_encoder(vocab_path: str, merges_path: str, n_vocab: int) -> BytePairEncoder:
    """The encoder in encoder.json and vocab.bpe.

    The merges in vocab.bpe imply all of encoder.json, so comparing the two reveals damage to
    either.
    """
    vocab = storage.read_json(vocab_path)
    merges = storage.read_text(merges_path).split('\n')[1:-1]
    byte_of = _byte_of()
    if not isinstance(vocab, dict) or len(vocab) != n_vocab:
        raise UserError(f'{vocab_path} is not an object of {n_vocab} tokens; get it again')
    if len(merges) != n_vocab - len(byte_of) - 1:
        raise UserError(
            f'{merges_path} has {len(merges)} merges, not {n_vocab - len(byte_of) - 1}; get it'
            ' again'
        )
    names = [*byte_of, *(merge.replace(' ', '') for merge in merges)]
    expected_vocab = {name: token for token, name in enumerate([*names, END_OF_TEXT])}
    if vocab != expected_vocab or not set(''.join(names)) <= byte_of.keys():
        raise UserError(f'{vocab_path} and {merges_path} do not belong together; get both again')
    table = str.maketrans({name: chr(byte) for name, byte in byte_of.items()})
    return BytePairEncoder([name.translate(table).encode('latin-1') for name in names])


def _byte_of() -> dict[str, int]:
    """{character: byte} of the characters that stand for bytes in GPT-2's files.

    All 256 are printable. They are in the order of their tokens.
    """
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
    """The encoding called `name`, as in the file `encoding` of a model directory."""
    encodings = {encoding.name: encoding for encoding in (Main, Test, Reviews)}
    if not isinstance(name, str) or name not in encodings:
        raise UserError(f'unknown encoding {name!r:.80}; there are {", ".join(encodings)}')
    return encodings[name]
