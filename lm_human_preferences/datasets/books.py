"""Data set `books`: passages of books; the queries in a file of labels replace lost passages."""

import contextlib
import functools
import random
from collections.abc import Iterator, Sequence
from typing import Any

from lm_human_preferences import storage
from lm_human_preferences.datasets.jsonl import read_jsonl
from lm_human_preferences.errors import UserError
from lm_human_preferences.utils.logging import announce

PUBLIC = 'https://openaipublic.blob.core.windows.net/lm-human-preferences'
URL = f'{PUBLIC}/datasets/book_passages/{{mode}}.jsonl'
LABELS = f'{PUBLIC}/labels/descriptiveness/offline_5k.json'
ENCODING = 'main'  # encoding of the token ids in a file of labels if the file names no encoding
MIRROR = f'{storage.HUB}datasets/vwxyzjn/lm-human-preferences'
MIRRORED = ('sentiment/offline_5k.json', 'descriptiveness/offline_5k.json')


def generator(
    mode: str, seed: int = 0, shuffle: bool = False, labels: str | None = None
) -> Iterator[str | list[int]]:
    """Yield the passages of the split `mode`: train, valid or test.

    The original's storage lost the files. Without them, the queries of the label file `labels`
    (None: the published one) stand in, the same for every split: lists of token ids, or texts if
    the labels are texts. StorageError if neither can be read.
    """
    passages = list(_passages(URL.format(mode=mode), labels or LABELS))
    if shuffle:
        random.Random(seed).shuffle(passages)
    yield from passages


@functools.cache
def _passages(url: str, labels: str) -> Sequence[str | list[int]]:
    try:
        return read_jsonl(url)
    except storage.StorageError as e:
        unavailable = e
    try:
        with mirror_named_on_failure(labels):
            queries = _queries(labels)
    except storage.StorageError as e:
        raise storage.StorageError(
            f'{e}; alternatively, set --task.query_dataset to a .jsonl file of texts'
        ) from e
    announce(
        f'The data set books is not available ({unavailable}). Using the {len(queries)} queries of'
        f' {labels} instead, for training and for tests alike.'
    )
    return queries


@contextlib.contextmanager
def mirror_named_on_failure(path: str) -> Iterator[None]:
    """Name a mirror in the error message if the label file `path` cannot be read in the block."""
    try:
        yield
    except storage.StorageError as e:
        for name in MIRRORED:
            if storage.is_remote(path) and path.endswith(f'/lm-human-preferences/labels/{name}'):
                raise storage.StorageError(
                    f'{e}; or give the mirror {MIRROR}/{name} as the source of the labels'
                ) from e
        raise


def _queries(labels: str) -> list[str | list[int]]:
    """Return the distinct queries of a label file, each a list of token ids or a text."""
    if labels.endswith('.jsonl'):
        records: Any = [label for _, label in storage.read_json_lines(labels)]
    else:
        records = storage.read_json(labels)
    queries: dict[str | tuple[int, ...], str | list[int]] = {}
    try:
        for label in records:
            query = label['query'] if 'query' in label else label['prompt']
            if isinstance(query, str):
                queries[query] = query
                continue
            encoding = label.get('encoding', ENCODING)
            if encoding != ENCODING:
                raise UserError(
                    'the labels cannot replace the lost data set `books`: their queries are token'
                    f' ids of encoding {encoding!r:.80}: name a .jsonl file of texts as'
                    ' --task.query_dataset'
                )
            if any(type(token) is not int for token in query):
                raise TypeError('a query is neither a text nor a list of token ids')
            queries[tuple(query)] = query
    except (KeyError, TypeError) as e:
        raise UserError(f'{labels} must be a list of labels, each with a query') from e
    return list(queries.values())
