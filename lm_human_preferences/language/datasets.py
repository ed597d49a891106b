"""Data sets by name, and their texts as token sequences for queries."""

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
from lm_human_preferences.language.chat import ChatTemplate
from lm_human_preferences.language.encodings import Encoder
from lm_human_preferences.language.tokenisers import spells_special, unnamed_ids_are_of_gpt2

if TYPE_CHECKING:
    from lm_human_preferences.distributed.comm import Comm

# A token, or all tokens that do the same; None for none.
Tokens = int | Collection[int] | None

QueryOf = Callable[[str | list[int]], tuple[list[int], list[str]]]  # see _query_of

COUNTED_CHARACTERS = 4_000_000  # take GPT-2's encoding about a second


@dataclasses.dataclass
class Usage:
    """Counts of texts that make queries, and of others by reason; special: spell special tokens."""

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
    special: int = 0


class Dataset:
    """Texts of one data set; `generator(mode, seed=0, shuffle=False)` yields those of a part.

    is_file: whether it is one of the user's, whose generator also takes `seen`, see jsonl.
    """

    def __init__(
        self,
        name: str,
        generator: Callable[..., Iterator[str] | Iterator[str | list[int]]],
        *,
        is_file: bool = False,
    ) -> None:
        self.name = name
        self.generator = generator
        self.is_file = is_file
        self.texts_read = 0  # in the current epoch

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
        """Iterate over lists of `sequence_length` token ids, padded on the right: tf_dataset.

        A text is cut after its first start token, at `sequence_length`, and after its last end
        token. It is left out if one of these tokens is missing, or if nothing remains and not
        `allow_empty`. Each of `repeat_count` epochs (None: no end, unless one is empty) has the
        same order. Rank r of n takes every n-th sequence from the r-th. skip: (texts of the first
        epoch, sequences after them) to leave out, for resuming. chat: template of contexts; a text
        without one is left out, and a dialogue is taken whole.
        """

        def query_of(text: str | list[int]) -> tuple[list[int], list[str]]:
            return _query_of(
                text, encoder, sequence_length, start_token, end_token, allow_empty, chat
            )

        def epoch(first: int) -> Iterator[list[int]]:
            """Yield the sequences of one epoch, from text number `first` on."""
            texts = self._texts(mode, seed, shuffle, encoder, query_of)
            texts = itertools.islice(texts, first, None)
            for self.texts_read, text in enumerate(texts, start=first + 1):
                tokens, counts = query_of(text)
                if 'used' in counts:
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
        """Count the use that `sequences` makes of the first COUNTED_CHARACTERS of a part."""
        usage = Usage()
        characters = 0

        def query_of(text: str | list[int]) -> tuple[list[int], list[str]]:
            return _query_of(
                text, encoder, sequence_length, start_token, end_token, allow_empty, chat
            )

        for text in self._texts(mode, seed, True, encoder, query_of):
            if characters > COUNTED_CHARACTERS:
                usage.is_all = False
                break
            characters += len(text)
            _, counts = query_of(text)
            if isinstance(text, str) and spells_special(encoder, text):
                counts.append('special')
            for name in ('texts', *counts):
                setattr(usage, name, getattr(usage, name) + 1)
        return usage

    def _texts(
        self, mode: str, seed: int, shuffle: bool, encoder: Encoder, query_of: QueryOf
    ) -> Iterator[str] | Iterator[str | list[int]]:
        """Return the texts of a part; those of a file are divided by their queries.

        A text that is not cut is its own query, whatever the encoding makes of it.
        """

        def seen(text: str) -> str:
            tokens, counts = query_of(text)
            return encoder.decode(tokens) if counts[1:] else text

        more = {'seen': seen} if self.is_file else {}
        return self.generator(mode, seed=seed, shuffle=shuffle, **more)


def _query_of(
    text: str | list[int],
    encoder: Encoder,
    length: int,
    start: Tokens,
    end: Tokens,
    allow_empty: bool,
    chat: ChatTemplate | None,
) -> tuple[list[int], list[str]]:
    """Return (part of a text's tokens that makes a sequence, fields of Usage that count it)."""
    if isinstance(text, str):
        tokens = encoder.encode(text)
        if chat is not None and messages.is_dialogue(text):
            start = end = None
    else:
        tokens = _label_query(text, encoder)
        start = None  # it was already cut after its start token
    begun = tokens
    if start is not None:
        starts = {start} if isinstance(start, int) else start
        first = next((i for i, token in enumerate(tokens) if token in starts), None)
        if first is None:
            return [], ['no_start']
        # As in the original, a text that ends with its first start token is kept whole.
        begun = tokens[first + 1 :] or tokens
    ended = begun[:length]
    if end is not None:
        ends = {end} if isinstance(end, int) else end
        while ended and ended[-1] not in ends:
            ended.pop()
        if not ended:
            return [], ['no_end']
    if not ended and not allow_empty:
        return [], ['empty']
    problem = chat.problem(tokens, ended) if chat is not None else None
    if problem:
        return [], [problem]
    counts = ['used']
    if len(begun) < len(tokens):
        counts.append('cut_at_start')
    if len(begun) > length:
        counts.append('cut_at_length')
    if len(ended) < min(len(begun), length):
        counts.append('cut_at_end')
    return ended, counts


def _label_query(tokens: list[int], encoder: Encoder) -> list[int]:
    """Return the query of a label without its padding; UserError for an id that is not a token."""
    own = encodings.Main.get_encoder() if unnamed_ids_are_of_gpt2(encoder) else encoder
    n_tokens = own.padding_token if own.eot_token is None else own.eot_token + 1
    query = [token for token in tokens if token != own.padding_token]
    if not all(0 <= token < n_tokens for token in query):
        raise UserError(
            f'a query of the label file holds token ids that are not in 0 to {n_tokens - 1}'
        )
    return query if own is encoder else encoder.encode(own.decode(query))


def _repeated(
    epoch: Callable[[int], Iterable[list[int]]], count: int | None, first: int
) -> Iterator[list[int]]:
    """Yield the elements of `count` epochs (None: until one is empty), from text `first` on."""
    for _ in itertools.count() if count is None else range(count):
        is_empty = first == 0  # a first epoch that is resumed may have nothing left
        for element in epoch(first):
            is_empty = False
            yield element
        if is_empty:
            return
        first = 0


def get_dataset(name: str, labels: str | None = None) -> Dataset:
    """Return a data set by name, or of a .jsonl file. labels: a stand-in if it is lost."""
    info = registry.info(name)
    generator = info.load_generator()
    if name in registry.DATASETS:
        if info.labels_stand_in:
            generator = functools.partial(generator, labels=labels)
        return Dataset(name, generator)
    jsonl.refuse_parquet(str(name))
    if not str(name).endswith('.jsonl') and not storage.is_table(str(name)):
        raise UserError(
            f'--task.query_dataset {name}: choose {registry.choices()} or a .jsonl or .csv file'
            ' of texts'
        )
    try:
        storage.cached_path(name)
    except storage.NotFound as e:
        raise OptionError('--task.query_dataset', str(e)) from e
    return Dataset(name, functools.partial(generator, name), is_file=True)
