"""Foreign texts, shown as they are, without any effect on a page."""

import functools
import os
import re
import unicodedata
from collections.abc import Callable

import jinja2
from markupsafe import Markup, escape

from lm_human_preferences.report.words import Text
from lm_human_preferences.utils.terminal import INVISIBLE, printable

LONGEST = 2000  # most characters of a text to show
# Soft hyphen, joiners and marks of the direction of writing, which many languages need
_BETWEEN_LETTERS = frozenset('\u00ad\u061c\u200c\u200d\u200e\u200f')
_VARIATIONS = frozenset('\ufe0e\ufe0f')  # follow a sign, an emoji or the digit of a keycap
# Flags, such as that of England, and each character that may be invisible
_UNUSUAL = re.compile('\U0001f3f4[\U000e0061-\U000e007a]{5}\U000e007f|[^ -~\n\t]')
_CODE = re.compile(r'(^```.*?(?:^```[^\n]*$|\Z))', re.DOTALL | re.MULTILINE)  # between fences
_MARK = Markup('<span class="mark">{}</span>')
_CODE_BLOCK = Markup(
    '<span class="mono" dir="ltr" translate="no" tabindex="0" role="group" aria-label="code">'
    '{}</span>'
)
_INDENTED = re.compile(r'^(?:\t| {2,})\S', re.MULTILINE)


@functools.cache
def environment(shown: Callable[[object], Markup]) -> jinja2.Environment:
    """Return the environment of the templates here, which show each value as `shown` has it."""
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
    """Return a value as HTML, with codes in place of characters that hide or turn text.

    A Text, of a query or a response, becomes a block.
    """
    return block(text) if isinstance(text, Text) else _marked(shortened(str(text)))


def block(text: str) -> Markup:
    """Return the text of a query or a response as HTML, with code set apart and the end marked.

    Code is a fenced part, or a whole text with two indented lines.
    """
    body = text.rstrip(' \n')
    shorter = shortened(body)
    parts = ['', shorter] if len(_INDENTED.findall(body)) > 1 else _CODE.split(shorter)
    shown = Markup()
    for number, part in enumerate(parts):
        shown += _CODE_BLOCK.format(_marked(part)) if number % 2 else _marked(part)
    if text != body or not text:
        shown += _MARK.format(_end(text[len(body) :]))
    scrolls = Markup(' tabindex="0"') if len(text) > LONGEST // 4 else ''
    return Markup('<bdi class="text"{}>{}</bdi>').format(scrolls, shown)


def _end(blanks: str) -> str:
    """Return words for the blanks and line ends at the end of a text; 'empty' without any."""
    lines = blanks.count('\n')
    if not blanks:
        return 'empty'
    count, noun = (lines, 'line end') if lines else (len(blanks), 'blank')
    return f'{count:,} {noun}' if count == 1 else f'{count:,} {noun}s'


def shortened(text: str) -> str:
    """Return a text, without its middle if it is longer than LONGEST."""
    if len(text) <= LONGEST:
        return text
    half = LONGEST // 2
    return f'{text[:half]} … {len(text) - LONGEST:,} characters … {text[-half:]}'


def _marked(text: str) -> Markup:
    """Return a text as HTML, with invisible characters as their marked codes."""
    return Markup(_UNUSUAL.sub(_shown, escape(text.replace('\r\n', '\n'))))


def _shown(match: re.Match[str]) -> str:
    """Return what is visible, or is part of its neighbours, as it is; otherwise its code."""
    text, character, (place, end) = match.string, match[0], match.span()
    before, after = text[max(place - 1, 0) : place], text[end : end + 1]
    if character in _BETWEEN_LETTERS:
        is_shown = _joins(before) and _joins(after)
    elif character in _VARIATIONS:
        is_shown = unicodedata.category(before or ' ') == 'So' or after == '\u20e3'
    else:
        is_flag_or_blank = len(character) > 1 or unicodedata.category(character) == 'Zs'
        is_visible = character.isprintable() and not INVISIBLE.match(character)
        is_shown = is_flag_or_blank or is_visible
    return character if is_shown else _MARK.format(f'U+{ord(character):04X}')


def _joins(character: str) -> bool:
    """Return whether a character is a letter or a mark beyond ASCII, or a part of an emoji."""
    if not character or character.isascii() or character in _BETWEEN_LETTERS:
        return False
    category = unicodedata.category(character)
    return category[0] in 'LM' or category in ('So', 'Sk')
