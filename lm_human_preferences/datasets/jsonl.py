"""Files of texts, one JSON string a line."""

import json
import random
from collections.abc import Iterator

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError


def read_jsonl(path: str) -> list[str]:
    """The strings in a local or remote file with one JSON string a line.

    Raises UserError naming the file and the first bad line.
    """
    texts = []
    lines = storage.read_text(path).rstrip().split('\n')
    for number, line in enumerate(lines, start=1):
        try:
            text = json.loads(line)
        except (ValueError, RecursionError) as e:
            raise UserError(f'{path}, line {number} is not JSON: {e}') from e
        if not isinstance(text, str):
            raise UserError(f'{path}, line {number} is not a JSON string, as every line must be')
        texts.append(text)
    return texts


def jsonl_generator(path: str, mode: str, seed: int = 0, shuffle: bool = False) -> Iterator[str]:
    """Yield the texts of the file at `path`, the same ones for each part."""
    texts = read_jsonl(path)
    if shuffle:
        random.Random(seed).shuffle(texts)
    yield from texts
