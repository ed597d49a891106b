"""Formatting of numbers and texts; an untrusted text is shown as it is and cannot alter a page."""

import functools
import math
import os
import re
import unicodedata
from collections.abc import Callable
from decimal import Decimal

import jinja2
from markupsafe import Markup, escape

from lm_human_preferences.utils.streams import INVISIBLE, printable

NOT_RECORDED, NOT_MEASURED = 'not recorded', 'not measured'
LONGEST = 2000  # most characters of a text to show
_LETTER = '[^\x00-\xa0\xad\u061c\u2000-\u206f\ud800-\uf8ff]'  # beyond ASCII, or a part of an emoji
# Matches of the group are shown unmarked, as languages and emoji need them: joiners and direction
# marks between letters, variants of an emoji or a keycap, and flags such as England's.
_UNUSUAL = re.compile(
    f'((?<={_LETTER})[\xad\u061c\u200c-\u200f](?={_LETTER})'
    '|(?<=[©®\u203c-\u3299\U0001f000-\U0001faff])[\ufe0e\ufe0f]|[\ufe0e\ufe0f](?=\u20e3)'
    '|\U0001f3f4[\U000e0061-\U000e007a]{5}\U000e007f)'
    '|[^ -~\n\t]'
)
_CODE = re.compile(r'(^```.*?(?:^```[^\n]*$|\Z))', re.DOTALL | re.MULTILINE)  # fenced code
_INDENTED = re.compile(r'^(?:\t| {2,})\S', re.MULTILINE)
_MARK = Markup('<span class="mark">{}</span>')
_CODE_BLOCK = Markup(
    '<span class="mono" dir="ltr" translate="no" tabindex="0" role="group" aria-label="code">'
    '{}</span>'
)


class Text(str):
    """Text of a query or a response, which is shown as a block."""


def number(value: object, digits: int = 2) -> str:
    """Format a number with thousands, decimals and a minus sign; show other values as they are."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return NOT_RECORDED if value is None else str(value)
    if value != value or value in (math.inf, -math.inf):
        text = str(value).replace('inf', '∞').replace('nan', 'NaN')
    elif abs(value) >= 1_000_000_000:
        text = f'{Decimal(value):.2e}'
    else:
        text = f'{value:,}' if isinstance(value, int) else f'{value:z,.{digits}f}'
    return text.replace('-', '−')


def percent(fraction: float) -> str:
    """Format a fraction as a percentage without decimals."""
    return f'{number(100 * fraction, 0)} %'


def of_all(count: int, total: int) -> str:
    """Format a fraction: '7 of 14' for few, a percentage for many."""
    return f'{count} of {total}' if total < 100 else percent(count / total)


def ends(low: float, high: float) -> str:
    """Format the 95 % interval of a fraction; (0, 1) means that there is too little data."""
    if (low, high) == (0, 1):
        return 'too few: none'
    return f'{number(100 * low, 0)} to {percent(high)}'


def moment(text: object) -> str:
    """Return a recorded time without its seconds; '' without a time."""
    return f'{str(text)[:16].replace("T", " ")} UTC' if text else ''


def short(path: str) -> str:
    """Return the last part of a path or URL, without folders and keys."""
    return os.path.basename(path.partition('?')[0].rstrip('/')) or path


def shortened(text: str) -> str:
    """Return a text, without its middle if it is longer than LONGEST."""
    if len(text) <= LONGEST:
        return text
    half = LONGEST // 2
    return f'{text[:half]} … {len(text) - LONGEST:,} characters … {text[-half:]}'


@functools.cache
def environment(shown: Callable[[object], Markup]) -> jinja2.Environment:
    """Return the jinja2 environment of this folder's templates. shown: function that escapes."""
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(os.path.dirname(__file__)),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else shown(value),
    )
    found.filters['plain'] = printable  # for attributes
    found.tests['text'] = lambda value: isinstance(value, Text)
    return found


def inline(text: object) -> Markup:
    """Return a value as HTML, a Text as a block; characters that hide or turn text become codes.

    In a block, code is set apart: a fenced part, or a whole text with two or more indented lines.
    Blanks at the end of the text are replaced by a count of them.
    """
    if not isinstance(text, Text):
        return _marked(shortened(str(text)))
    body = text.rstrip(' \n')
    shorter = shortened(body)
    parts = ['', shorter] if len(_INDENTED.findall(body)) > 1 else _CODE.split(shorter)
    shown = Markup()
    for place, part in enumerate(parts):
        shown += _CODE_BLOCK.format(_marked(part)) if place % 2 else _marked(part)
    if text != body or not text:
        shown += _MARK.format(_end(text[len(body) :]))
    scrolls = Markup(' tabindex="0"') if len(text) > LONGEST // 4 else ''
    return Markup('<bdi class="text"{}>{}</bdi>').format(scrolls, shown)


def _end(blanks: str) -> str:
    """Return words for the blanks and line ends at the end of a text; 'empty' without any."""
    if not blanks:
        return 'empty'
    lines = blanks.count('\n')
    count, noun = (lines, 'line end') if lines else (len(blanks), 'blank')
    return f'{count:,} {noun}' if count == 1 else f'{count:,} {noun}s'


def _marked(text: str) -> Markup:
    """Return a text as HTML, with invisible characters as their marked codes."""
    return Markup(_UNUSUAL.sub(_shown, escape(text.replace('\r\n', '\n'))))


def _shown(match: re.Match[str]) -> str:
    character = match[0]
    is_visible = character.isprintable() and not INVISIBLE.match(character)
    if match[1] or is_visible or unicodedata.category(character) == 'Zs':  # a blank
        return character
    return _MARK.format(f'U+{ord(character):04X}')
