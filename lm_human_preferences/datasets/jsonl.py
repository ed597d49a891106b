"""Files of texts, one JSON string or list of messages a line, and their test part."""

import hashlib
import random
from collections.abc import Iterator

from lm_human_preferences import storage
from lm_human_preferences.datasets import messages
from lm_human_preferences.errors import UserError

TEST_SHARE = 10  # one text in so many is of the test part


def read_jsonl(path: str) -> list[str]:
    """Return the texts in a local or remote file; see numbered_texts."""
    return [text for _, text in numbered_texts(path)]


def numbered_texts(path: str) -> list[tuple[str, str]]:
    """Return (place, text) of each line that is not empty; UserError names the first bad line."""
    refuse_parquet(path)
    found = []
    for where, value in storage.read_json_lines(path):
        if messages.are_messages(value):
            value = messages.query_text(value, where)
        if not isinstance(value, str):
            raise UserError(f'{where} is not a JSON string, as every line must be')
        found.append((where, value))
    return found


def refuse_parquet(path: str) -> None:
    """Raise UserError, which says how to convert it, for a file named as Parquet."""
    if path.lower().endswith('.parquet'):
        raise UserError(
            f'{path} is Parquet, which is not read: write its texts to a .jsonl, one JSON string a'
            " line: for text in pandas.read_parquet(FILE)['text']: print(json.dumps(text))"
        )


def generator(path: str, mode: str, seed: int = 0, shuffle: bool = False) -> Iterator[str]:
    """Yield texts of the part `mode` of a file: train or test (also `valid`); UserError if none."""
    is_test = mode != 'train'
    own_file = file_of_test_part(path)
    if own_file is not None:
        texts = read_jsonl(own_file if is_test else path)
    else:
        texts = [text for text in read_jsonl(path) if is_test_text(text) == is_test]
    if not texts:
        raise UserError(
            f'--task.query_dataset {path}: {part_of(path, mode)}, has no text; add texts, or put'
            f' those of the test part into {_test_path(path)}'
        )
    if shuffle:
        random.Random(seed).shuffle(texts)
    yield from texts


def part_of(path: str, mode: str) -> str:
    """Return the name of the part `mode` of the file at `path`."""
    is_test = mode != 'train'
    own_file = file_of_test_part(path)
    if own_file is not None:
        return f'{own_file}, the test part' if is_test else f'all of {path}, the training part'
    if is_test:
        return f'the test part of {path}, one text in {TEST_SHARE}'
    return f'the training part of {path}, all but one text in {TEST_SHARE}'


def file_of_test_part(path: str) -> str | None:
    """Return the file of the test part if it exists: my.test.jsonl for my.jsonl."""
    found = _test_path(path)
    return found if storage.exists(found) else None


def _test_path(path: str) -> str:
    return f'{path.removesuffix(".jsonl")}.test.jsonl'


def is_test_text(text: str) -> bool:
    """Return whether a text is of the test part of a file without file_of_test_part."""
    # By the text alone, so that it stays in its part when others are added.
    digest = hashlib.sha256(text.encode(errors='surrogatepass')).digest()
    return int.from_bytes(digest[:8]) % TEST_SHARE == 0
