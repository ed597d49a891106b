"""Data sets of texts, and the stream of token sequences that a task takes its queries from."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from lm_human_preferences import storage
from lm_human_preferences.datasets.books import books_generator, read_jsonl
from lm_human_preferences.datasets.cnndm import cnndm_generator
from lm_human_preferences.datasets.reviews import reviews_generator
from lm_human_preferences.datasets.tldr import tldr_generator
from lm_human_preferences.errors import UserError
from lm_human_preferences.language.encodings import LETTERS, Encoder

if TYPE_CHECKING:
    from lm_human_preferences.distributed.comm import Comm


class Dataset:
    """Texts by name. generator(mode, seed=0, shuffle=False) yields those of the part `mode`: train,
    valid or test.

    texts_read: how many of the present epoch the last of `sequences` has read.
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
        """Iterator of lists of `sequence_length` token ids (the original's tf_dataset), padded on
        the right.

        A text is cut after its first start token, at `sequence_length`, and after its last end
        token; without one of them it is left out, unless `allow_empty` also where nothing remains.
        Each of `repeat_count` epochs (None: no end, unless an epoch is empty) has the same order.
        Rank r of n takes every n-th sequence from the r-th on. skip: how many texts of the first
        epoch, and of the sequences after them, are left out before that.
        """
        known = encoder.padding_token if encoder.eot_token is None else encoder.eot_token + 1

        def epoch(begin: int) -> Iterator[list[int]]:
            """Yield the sequences of all texts from number `begin` on."""
            texts = itertools.islice(self.generator(mode, seed=seed, shuffle=shuffle), begin, None)
            for self.texts_read, text in enumerate(texts, start=begin + 1):
                if isinstance(text, str):
                    tokens = _cut(encoder.encode(text), sequence_length, start_token, end_token)
                else:  # a query of a label file, which has its start behind it
                    query = [token for token in text if token != encoder.padding_token]
                    if not all(0 <= token < known for token in query):
                        raise UserError(
                            'a query of the label file holds token ids that are not in 0 to'
                            f' {known - 1}'
                        )
                    tokens = _cut(query, sequence_length, None, end_token)
                if tokens or (allow_empty and tokens is not None):
                    yield tokens + [encoder.padding_token] * (sequence_length - len(tokens))

        rank, size = (comm.rank, comm.size) if comm else (0, 1)
        return itertools.islice(_repeated(epoch, repeat_count, skip[0]), skip[1] + rank, None, size)


def _cut(
    tokens: list[int], length: int, start_token: int | None, end_token: int | None
) -> list[int] | None:
    """What of a text's tokens makes a sequence, None if one of the two tokens is missing."""
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
    epoch: Callable[[int], Iterable[list[int]]], count: int | None, begin: int
) -> Iterator[list[int]]:
    """The elements of `count` epochs, or any number (None) until one is empty; the first begins at
    text `begin`."""
    for _ in itertools.count() if count is None else range(count):
        empty = not begin
        for element in epoch(begin):
            empty = False
            yield element
        if empty:
            return
        begin = 0


def _letters_generator(mode: str, seed: int = 0, shuffle: bool = False) -> Iterator[str]:
    """Yield texts of 40 random letters without end, always the same for a seed and part."""
    rng = random.Random(f'{mode} {seed}')
    while True:
        yield ''.join(rng.choices(LETTERS, k=40))


def _file_generator(path: str, mode: str, seed: int = 0, shuffle: bool = False) -> Iterator[str]:
    """Yield the texts of a .jsonl file, the same for each part."""
    texts = read_jsonl(path)
    if shuffle:
        random.Random(seed).shuffle(texts)
    yield from texts


def get_dataset(name: str, labels: str | None = None) -> Dataset:
    """The data set `name`: books, cnndm, tldr, test, reviews, or the path or URL of a .jsonl file
    of strings.

    labels: label file whose queries stand in for `books` where that cannot be had. Raises UserError
    for another name.
    """
    generators = {
        'books': functools.partial(books_generator, labels=labels),
        'cnndm': cnndm_generator,
        'tldr': tldr_generator,
        'test': _letters_generator,
        'reviews': reviews_generator,
    }
    if name in generators:
        return Dataset(name, generators[name])
    if not str(name).endswith('.jsonl'):
        raise UserError(
            f'--task.query_dataset {name}: choose {", ".join(generators)} or a .jsonl file of texts'
        )
    try:
        storage.cached_path(name)
    except storage.NotFound as e:
        raise UserError(f'--task.query_dataset {e}') from e
    return Dataset(name, functools.partial(_file_generator, name))
