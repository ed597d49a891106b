"""Data sets by name, and the stream of token sequences that a task takes its queries from."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from lm_human_preferences import storage
from lm_human_preferences.datasets import registry
from lm_human_preferences.errors import UserError
from lm_human_preferences.language.encodings import Encoder

if TYPE_CHECKING:
    from lm_human_preferences.distributed.comm import Comm


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
        start_token: int | None = None,
        end_token: int | None = None,
        allow_empty: bool = True,
        skip: tuple[int, int] = (0, 0),
    ) -> Iterator[list[int]]:
        """Iterator of lists of `sequence_length` token ids, padded on the right.

        It is the original's tf_dataset.

        A text is cut after its first start token, at `sequence_length`, and after its last end
        token. A text that lacks one of these tokens is left out, and so is one of which nothing
        remains, unless `allow_empty`. Each of `repeat_count` epochs (None: no end, unless an epoch
        is empty) has the same order. Rank r of n takes every n-th sequence, starting at the r-th.

        skip: (texts of the first epoch, sequences after them) to leave out before that, so that an
        interrupted run can go on where it was.
        """

        def epoch(first: int) -> Iterator[list[int]]:
            """Yield the sequences of one epoch, from text number `first` on."""
            texts = self.generator(mode, seed=seed, shuffle=shuffle)
            texts = itertools.islice(texts, first, None)
            for self.texts_read, text in enumerate(texts, start=first + 1):
                if isinstance(text, str):
                    tokens = _cut(encoder.encode(text), sequence_length, start_token, end_token)
                else:
                    # A query of a label file was already cut after its start token.
                    query = _label_query(text, encoder)
                    tokens = _cut(query, sequence_length, None, end_token)
                if tokens or (allow_empty and tokens is not None):
                    yield tokens + [encoder.padding_token] * (sequence_length - len(tokens))

        texts_to_skip, sequences_to_skip = skip
        rank = comm.rank if comm else 0
        size = comm.size if comm else 1
        everything = _repeated(epoch, repeat_count, texts_to_skip)
        return itertools.islice(everything, sequences_to_skip + rank, None, size)


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
    tokens: list[int], length: int, start_token: int | None, end_token: int | None
) -> list[int] | None:
    """The part of a text's tokens that makes a sequence.

    None if the start or end token is missing.
    """
    if start_token is not None:
        if start_token not in tokens:
            return None
        # As in the original, a text that ends with its first start token is kept whole.
        tokens = tokens[tokens.index(start_token) + 1 :] or tokens
    tokens = tokens[:length]
    if end_token is not None:
        if end_token not in tokens:
            return None
        tokens = tokens[: len(tokens) - tokens[::-1].index(end_token)]
    return tokens


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
    if not str(name).endswith('.jsonl'):
        raise UserError(
            f'--task.query_dataset {name}: choose {registry.choices()} or a .jsonl file of texts'
        )
    try:
        storage.cached_path(name)
    except storage.NotFound as e:
        raise UserError(f'--task.query_dataset {e}') from e
    return Dataset(name, functools.partial(generator, name))
