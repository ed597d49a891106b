"""Files of texts, one JSON string or list of messages a line, and which are the test part."""

import hashlib
import random
from collections.abc import Iterator

from lm_human_preferences import storage
from lm_human_preferences.datasets import messages
from lm_human_preferences.errors import UserError

TEST_SHARE = 10  # one text in so many is of the test part


def read_jsonl(path: str) -> list[str]:
    """The texts in a local or remote file with one in each line; see numbered_texts."""
    return [text for _, text in numbered_texts(path)]


def numbered_texts(path: str) -> list[tuple[str, str]]:
    """(where it is, text) of each line of such a file, but for empty ones.

    A line is a JSON string, or a list of chat messages, whose text is that of messages.query_text.
    Raises UserError naming the file and the first bad line.
    """
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
    """UserError, which says how to convert it, for a file of texts that is Parquet by its name."""
    if path.lower().endswith('.parquet'):
        raise UserError(
            f'{path} is Parquet, which is not read: write its texts to a .jsonl, one JSON string a'
            " line: for text in pandas.read_parquet(FILE)['text']: print(json.dumps(text))"
        )


def jsonl_generator(path: str, mode: str, seed: int = 0, shuffle: bool = False) -> Iterator[str]:
    """Yield the texts of the part `mode` of the file at `path`: train or test.

    `valid` is the same as test, as in tldr. file_of_test_part and is_test_text say what is in which
    part. UserError for a part without texts.
    """
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
    """What to call the part `mode` of the file at `path`, which jsonl_generator yields."""
    is_test = mode != 'train'
    own_file = file_of_test_part(path)
    if own_file is not None:
        return f'{own_file}, the test part' if is_test else f'all of {path}, the training part'
    if is_test:
        return f'the test part of {path}, one text in {TEST_SHARE}'
    return f'the training part of {path}, all but one text in {TEST_SHARE}'


def file_of_test_part(path: str) -> str | None:
    """The file of the test part, if there is one beside `path`: my.test.jsonl for my.jsonl."""
    found = _test_path(path)
    return found if storage.exists(found) else None


def _test_path(path: str) -> str:
    return f'{path.removesuffix(".jsonl")}.test.jsonl'


def is_test_text(text: str) -> bool:
    """Whether a text is of the test part of a file that has no file_of_test_part.

    The text alone decides, so a text stays where it is when others are added.
    """
    digest = hashlib.sha256(text.encode(errors='surrogatepass')).digest()
    return int.from_bytes(digest[:8]) % TEST_SHARE == 0
