"""Data sets by name, and the stream of token sequences that a task takes its queries from."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING

from lm_human_preferences import storage
from lm_human_preferences.datasets import jsonl, messages, registry
from lm_human_preferences.errors import OptionError, UserError
from lm_human_preferences.language import encodings
from lm_human_preferences.language.chat import REFUSED, TOO_LONG, ChatTemplate
from lm_human_preferences.language.encodings import Encoder
from lm_human_preferences.language.tokenisers import TokeniserEncoder

if TYPE_CHECKING:
    from lm_human_preferences.distributed.comm import Comm

# A token, or all tokens that do the same; None for none.
Tokens = int | Collection[int] | None

COUNTED_CHARACTERS = 4_000_000  # take GPT-2's encoding about a second


@dataclasses.dataclass
class Usage:
    """What becomes of the texts of a part.

    texts: how many were looked at. is_all: whether the part has no more. used: how many make a
    query, of which some are cut_at_start, up to their first start token, some cut_at_length, and
    some cut_at_end, after their last end token. The others lack the start token (no_start), or the
    end token in what is left (no_end), or nothing is left of them (empty), or they are too_long for
    the chat template or refused by it.
    """

    texts: int = 0
    is_all: bool = True
    used: int = 0
    cut_at_start: int = 0
    cut_at_length: int = 0
    cut_at_end: int = 0
    no_start: int = 0
    no_end: int = 0
    empty: int = 0
    too_long: int = 0
    refused: int = 0

    def add(
        self,
        tokens: list[int],
        length: int,
        start: Tokens,
        end: Tokens,
        allow_empty: bool,
        chat: ChatTemplate | None = None,
    ) -> None:
        """Count one more text; the other arguments: see Dataset.sequences."""
        self.texts += 1
        begun = _after_start(tokens, start)
        if begun is None:
            self.no_start += 1
            return
        ended = _until_end(begun[:length], end)
        if ended is None:
            self.no_end += 1
        elif not ended and not allow_empty:
            self.empty += 1
        elif chat is not None and (problem := chat.problem(tokens, ended)):
            self.too_long += problem == TOO_LONG
            self.refused += problem == REFUSED
        else:
            self.used += 1
            self.cut_at_start += len(begun) < len(tokens)
            self.cut_at_length += len(begun) > length
            self.cut_at_end += len(ended) < min(len(begun), length)


class Dataset:
    """The texts of one data set.

    generator(mode, seed=0, shuffle=False) yields those of the part `mode`: train, valid or test.
    texts_read: how many texts of the current epoch the last iterator of `sequences` has read.
    """

    def __init__(
        self, name: str, generator: Callable[..., Iterator[str] | Iterator[str | list[int]]]
    ) -> None:
        self.name = name
        self.generator = generator
        self.texts_read = 0

    def sequences(
        self,
        sequence_length: int,
        *,
        mode: str,
        encoder: Encoder,
        seed: int = 0,
        comm: Comm | None = None,
        shuffle: bool = True,
        repeat_count: int | None = None,
        start_token: Tokens = None,
        end_token: Tokens = None,
        allow_empty: bool = True,
        skip: tuple[int, int] = (0, 0),
        chat: ChatTemplate | None = None,
    ) -> Iterator[list[int]]:
        """Iterator of lists of `sequence_length` token ids, padded on the right.

        It is the original's tf_dataset.

        A text is cut after its first start token, at `sequence_length`, and after its last end
        token. A text that lacks one of these tokens is left out, and so is one of which nothing
        remains, unless `allow_empty`. Each of `repeat_count` epochs (None: no end, unless an epoch
        is empty) has the same order. Rank r of n takes every n-th sequence, starting at the r-th.

        skip: (texts of the first epoch, sequences after them) to leave out before that, so that an
        interrupted run can go on where it was. chat: whose contexts the sequences become; a text
        that has none is left out. A dialogue is taken whole.
        """

        def epoch(first: int) -> Iterator[list[int]]:
            """Yield the sequences of one epoch, from text number `first` on."""
            texts = self.generator(mode, seed=seed, shuffle=shuffle)
            texts = itertools.islice(texts, first, None)
            for self.texts_read, text in enumerate(texts, start=first + 1):
                encoded, start, end = _encoded(text, encoder, start_token, end_token, chat)
                tokens = _cut(encoded, sequence_length, start, end)
                if tokens is None or not (tokens or allow_empty):
                    continue
                if chat is None or not chat.problem(encoded, tokens):
                    yield tokens + [encoder.padding_token] * (sequence_length - len(tokens))

        texts_to_skip, sequences_to_skip = skip
        rank = comm.rank if comm else 0
        size = comm.size if comm else 1
        everything = _repeated(epoch, repeat_count, texts_to_skip)
        return itertools.islice(everything, sequences_to_skip + rank, None, size)

    def usage(
        self,
        sequence_length: int,
        *,
        mode: str,
        encoder: Encoder,
        seed: int = 0,
        start_token: Tokens = None,
        end_token: Tokens = None,
        allow_empty: bool = True,
        chat: ChatTemplate | None = None,
    ) -> Usage:
        """What `sequences` with these arguments makes of texts: see there.

        Of a part that is large, only the first texts are looked at, which hold COUNTED_CHARACTERS.
        """
        usage = Usage()
        characters = 0
        for text in self.generator(mode, seed=seed, shuffle=True):
            if characters > COUNTED_CHARACTERS:
                usage.is_all = False
                break
            characters += len(text)
            tokens, start, end = _encoded(text, encoder, start_token, end_token, chat)
            usage.add(tokens, sequence_length, start, end, allow_empty, chat)
        return usage


def _encoded(
    text: str | list[int],
    encoder: Encoder,
    start_token: Tokens,
    end_token: Tokens,
    chat: ChatTemplate | None,
) -> tuple[list[int], Tokens, Tokens]:
    """(tokens of a text, the start and the end token that they are to be cut at).

    Token ids are those of a label file: of GPT-2 for a model with a tokeniser of its own.
    """
    if isinstance(text, str):
        if chat is not None and messages.is_dialogue(text):
            return encoder.encode(text), None, None
        return encoder.encode(text), start_token, end_token
    # A query of a label file was already cut after its start token.
    if isinstance(encoder, TokeniserEncoder):
        gpt2 = encodings.Main.get_encoder()
        return encoder.encode(gpt2.decode(_label_query(text, gpt2))), None, end_token
    return _label_query(text, encoder), None, end_token


def _label_query(tokens: list[int], encoder: Encoder) -> list[int]:
    """The query of a label without its padding; UserError for an id that is no token."""
    n_tokens = encoder.padding_token if encoder.eot_token is None else encoder.eot_token + 1
    query = [token for token in tokens if token != encoder.padding_token]
    if not all(0 <= token < n_tokens for token in query):
        raise UserError(
            f'a query of the label file holds token ids that are not in 0 to {n_tokens - 1}'
        )
    return query


def _cut(
    tokens: list[int], length: int, start_token: Tokens, end_token: Tokens
) -> list[int] | None:
    """The part of a text's tokens that makes a sequence.

    None if the start or end token is missing.
    """
    begun = _after_start(tokens, start_token)
    return None if begun is None else _until_end(begun[:length], end_token)


def _after_start(tokens: list[int], start_token: Tokens) -> list[int] | None:
    """The tokens after the first start token; None where there is none."""
    if start_token is None:
        return tokens
    starts = _as_collection(start_token)
    for position, token in enumerate(tokens):
        if token in starts:
            # As in the original, a text that ends with its first start token is kept whole.
            return tokens[position + 1 :] or tokens
    return None


def _until_end(tokens: list[int], end_token: Tokens) -> list[int] | None:
    """The tokens up to the last end token, which is one of them; None where there is none."""
    if end_token is None:
        return tokens
    ends = _as_collection(end_token)
    for length in range(len(tokens), 0, -1):
        if tokens[length - 1] in ends:
            return tokens[:length]
    return None


def _as_collection(tokens: int | Collection[int]) -> Collection[int]:
    return (tokens,) if isinstance(tokens, int) else tokens


def _repeated(
    epoch: Callable[[int], Iterable[list[int]]], count: int | None, first: int
) -> Iterator[list[int]]:
    """The elements of `count` epochs, or of epochs until one is empty (None).

    The first epoch begins at text `first`, so it may have nothing left without being empty.
    """
    for _ in itertools.count() if count is None else range(count):
        is_empty = first == 0
        for element in epoch(first):
            is_empty = False
            yield element
        if is_empty:
            return
        first = 0


def get_dataset(name: str, labels: str | None = None) -> Dataset:
    """The data set `name`: one of datasets.registry, or a .jsonl file of strings (path or URL).

    labels: the label file whose queries stand in for a data set that cannot be had, where its entry
    allows that. Raises UserError for an unknown name or a missing file.
    """
    info = registry.info(name)
    generator = info.load_generator()
    if name in registry.DATASETS:
        if info.labels_stand_in:
            generator = functools.partial(generator, labels=labels)
        return Dataset(name, generator)
    jsonl.refuse_parquet(str(name))
    if not str(name).endswith('.jsonl'):
        raise UserError(
            f'--task.query_dataset {name}: choose {registry.choices()} or a .jsonl file of texts'
        )
    try:
        storage.cached_path(name)
    except storage.NotFound as e:
        raise OptionError('--task.query_dataset', str(e)) from e
    return Dataset(name, functools.partial(generator, name))
