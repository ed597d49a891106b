"""Query files (JSON lines or tables) and their splits into training and test texts."""

import hashlib
import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from lm_human_preferences import storage
from lm_human_preferences.datasets import messages
from lm_human_preferences.errors import UserError

TEST_SHARE = 10  # one text in every TEST_SHARE texts belongs to the test split


class Query(NamedTuple):
    """Query in a file: its place (for error messages), its text, and its record's other fields."""

    where: str
    text: str
    columns: Mapping[str, Any]


def read_jsonl(path: str) -> list[str]:
    """Return the texts of the queries in a local or remote file."""
    return [query.text for query in read_queries(path)]


def read_queries(path: str) -> list[Query]:
    """Return the queries in JSON lines or a table; a UserError names the first bad line."""
    read = storage.read_table if storage.is_table(path) else storage.read_json_lines
    return list(itertools.starmap(_query, read(path)))


def _query(where: str, value: Any) -> Query:
    columns: Mapping[str, Any] = {}
    name = messages.query_field(value, where) if isinstance(value, dict) else None
    if name is not None:
        record, value = value, value[name]
        columns = messages.columns(record)
        if isinstance(value, str):
            value = messages.after_system(record, messages.text_field(record, name, where), where)
        elif isinstance(value, list) and value:
            value = [*messages.system_message(record, where), *value]
    plain = messages.as_plain(value, where) if isinstance(value, list) else None
    if plain is not None:
        value = messages.query_text(plain, where)
    if not isinstance(value, str):
        fields = f'field {" or ".join(messages.QUERIES)}, in lower case'
        if isinstance(value, dict):
            raise UserError(f'{where} has no {fields}: its fields are {", ".join(value):.80}')
        raise UserError(
            f'{where} must be a JSON string, a list of messages, or an object with a {fields}'
        )
    return Query(where, value, columns)


def generator(
    path: str,
    mode: str,
    seed: int = 0,
    shuffle: bool = False,
    seen: Callable[[str], str] = str,
) -> Iterator[str]:
    """Yield the texts of one split of a file. mode: 'train' or 'test' (also called 'valid').

    UserError if the split is empty. seen: maps a text to what a policy reads of it; texts that look
    the same to the policy are in the same split.
    """
    is_test = mode != 'train'
    own_file = file_of_test_part(path)
    if own_file is not None:
        texts = read_jsonl(own_file if is_test else path)
    else:
        texts = [text for text in read_jsonl(path) if is_test_text(seen(text)) == is_test]
    if not texts:
        raise UserError(
            f'--task.query_dataset {path}: there is no text in {part_of(path, mode)}; add texts, or'
            f' put texts for tests into {_test_path(path)}'
        )
    if shuffle:
        random.Random(seed).shuffle(texts)
    yield from texts


def part_of(path: str, mode: str) -> str:
    """Return a phrase that describes the split `mode` of the file at `path`."""
    is_test = mode != 'train'
    own_file = file_of_test_part(path)
    if own_file is not None:
        return f'{own_file}, the test split' if is_test else f'all of {path}, the training split'
    if is_test:
        return f'the test split of {path}, one text in {TEST_SHARE}'
    return f'the training split of {path}, all but one text in {TEST_SHARE}'


def file_of_test_part(path: str) -> str | None:
    """Return the path of the test texts for a file (my.test.csv for my.csv); None if missing."""
    found = _test_path(path)
    return found if storage.exists(found) else None


def _test_path(path: str) -> str:
    name, _, suffix = path.rpartition('.')
    return f'{name}.test.{suffix}'


def is_test_text(text: str) -> bool:
    """Return whether a text of a data set without a separate test file is in the test split."""
    # The split depends on the text alone, so a text stays in its split if other texts are added.
    digest = hashlib.sha256(text.encode(errors='surrogatepass')).digest()
    return int.from_bytes(digest[:8]) % TEST_SHARE == 0
