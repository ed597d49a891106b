"""Passages of books: the queries of `sentiment` and `descriptiveness`."""

import functools
import json
import random
from collections.abc import Iterator

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError
from lm_human_preferences.utils.logging import log_line

PUBLIC = 'https://openaipublic.blob.core.windows.net/lm-human-preferences'
URL = f'{PUBLIC}/datasets/book_passages/{{mode}}.jsonl'
LABELS = f'{PUBLIC}/labels/descriptiveness/offline_5k.json'


def books_generator(
    mode: str, seed: int = 0, shuffle: bool = False, labels: str | None = None
) -> Iterator[str | list[int]]:
    """Yield the passages of the part `mode`: train, valid or test.

    The file was lost when the storage moved. Where it cannot be had, the queries in the label file
    `labels` (None: the published ones) stand in, as lists of token ids, whatever the part. Raises
    StorageError where there is neither.
    """
    passages = list(_passages(URL.format(mode=mode), labels or LABELS))
    if shuffle:
        random.Random(seed).shuffle(passages)
    yield from passages


@functools.cache
def _passages(url: str, labels: str) -> list[str] | list[list[int]]:
    try:
        return read_jsonl(url)
    except storage.StorageError as e:
        try:
            queries = _queries(labels)
        except storage.StorageError as second:
            raise storage.StorageError(
                f'{second}; or name a .jsonl file of texts as --task.query_dataset'
            ) from second
        log_line(
            f'The data set books is not to be had ({e}). Using the {len(queries)} queries of'
            f' {labels} instead.'
        )
        return queries


def _queries(labels: str) -> list[list[int]]:
    """The distinct queries of a label file, each a list of token ids."""
    try:
        queries = dict.fromkeys(tuple(label['query']) for label in storage.read_json(labels))
    except (KeyError, TypeError) as e:
        raise UserError(f'{labels} is not a list of labels that each have a query') from e
    if any(type(token) is not int for query in queries for token in query):
        raise UserError(f'{labels} has a query that is not a list of token ids')
    return [list(query) for query in queries]


def read_jsonl(path: str) -> list[str]:
    """The strings in a file, local or remote, that has one JSON string a line. Raises UserError
    naming a bad line."""
    texts = []
    for number, line in enumerate(storage.read_text(path).rstrip().split('\n'), start=1):
        try:
            texts.append(json.loads(line))
        except (ValueError, RecursionError) as e:
            raise UserError(f'{path}, line {number} is not JSON: {e}') from e
        if not isinstance(texts[-1], str):
            raise UserError(f'{path}, line {number} is not a JSON string, as every line must be')
    return texts
