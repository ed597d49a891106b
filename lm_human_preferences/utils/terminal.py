"""Escaping of untrusted text for a terminal."""

import re
import shutil

_LEAST_COLUMNS = 20  # smallest width, even if COLUMNS or the terminal is smaller
# Invisible characters (Default_Ignorable_Code_Point of Unicode 17.0) that str.isprintable accepts.
INVISIBLE = re.compile(
    '[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u3164\ufe00-\ufe0f\uffa0'
    '\U000e0100-\U000e01ef]'
)


def printable(text: str) -> str:
    """Escape characters that control the terminal or are invisible, as in \\x1b."""
    if text.isprintable() and not INVISIBLE.search(text):  # true of most texts, and fast
        return text
    shown = []
    for character in text:
        is_shown = character.isprintable() and not INVISIBLE.match(character)
        shown.append(character if is_shown else character.encode('unicode_escape').decode())
    return ''.join(shown)


def error_line(error: object) -> str:
    """Return the line that reports an error, or a message, to the user."""
    return f'error: {printable(" ".join(str(error).splitlines()))}'


def columns(most: int) -> int:
    """Return the width of the terminal, at most `most`; `most` itself without a terminal."""
    return max(_LEAST_COLUMNS, min(shutil.get_terminal_size((most, 24)).columns, most))
