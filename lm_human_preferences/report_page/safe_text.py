"""Untrusted text: escapes for invisible characters, and a limit of length."""

import difflib
import re
from collections.abc import Iterator
from typing import NamedTuple

from lm_human_preferences.utils.terminal import printable

LONGEST = 1500  # characters of a text that are shown


class Part(NamedTuple):
    """Part of a text. is_new: absent from the text that it is compared with."""

    text: str
    is_new: bool


def plain(text: object, longest: int = LONGEST) -> str:
    """Escape control characters and marks of the direction of writing; shorten long texts."""
    whole = str(text)
    if len(whole) > longest:
        half = longest // 2
        left_out = len(whole) - 2 * half
        whole = f'{whole[:half]} … {left_out:,} more characters … {whole[-half:]}'
    return '\n'.join(map(printable, whole.splitlines()))


def changes(before: str, after: str) -> Iterator[Part]:
    """Yield `after` in plain parts, with the words marked that `before` lacks at that place."""
    old, new = (re.findall(r'\S+\s*|\s+', plain(text)) for text in (before, after))
    bare = [[word.strip() for word in words] for words in (old, new)]
    matcher = difflib.SequenceMatcher(a=bare[0], b=bare[1], autojunk=False)
    for kind, _, _, begin, end in matcher.get_opcodes():
        text = ''.join(new[begin:end])
        if text:
            yield Part(text, is_new=kind != 'equal')
