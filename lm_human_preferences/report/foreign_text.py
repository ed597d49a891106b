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
_FLAG = re.compile('\U0001f3f4[\U000e0061-\U000e007a]{5}\U000e007f')  # such as the flag of England
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
    if isinstance(text, Text):
        return block(text)
    return _marked(shortened(str(text)))


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
    """Return words for the blanks and line ends at the end of a text; '' without any."""
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
    parts = (_MARK.format(part) if is_code else escape(part) for part, is_code in _coded(text))
    return Markup().join(parts)


def _coded(text: str) -> list[tuple[str, bool]]:
    """Return visible parts of a text as (part, False), other characters as (code, True)."""
    text = text.replace('\r\n', '\n')
    if text.isascii() and text.replace('\n', '').replace('\t', '').isprintable():
        return [(text, False)]
    in_flags = {place for flag in _FLAG.finditer(text) for place in range(*flag.span())}
    found = []
    for place, character in enumerate(text):
        is_shown = place in in_flags or _is_shown(text, place)
        found.append((character if is_shown else f'U+{ord(character):04X}', not is_shown))
    return found


def _is_shown(text: str, place: int) -> bool:
    """Return whether a character of a text is visible, or is part of its neighbours."""
    character, before, after = text[place], text[place - 1 : place], text[place + 1 : place + 2]
    if character in _BETWEEN_LETTERS:
        return _joins(before) and _joins(after)
    if character in _VARIATIONS:
        return unicodedata.category(before or ' ') == 'So' or after == '\u20e3'
    is_blank = character in '\n\t' or unicodedata.category(character) == 'Zs'
    return is_blank or (character.isprintable() and not INVISIBLE.match(character))


def _joins(character: str) -> bool:
    """Return whether a character is a letter or a mark beyond ASCII, or a part of an emoji."""
    if not character or character.isascii() or character in _BETWEEN_LETTERS:
        return False
    return unicodedata.category(character)[0] in 'LM' or unicodedata.category(character) in (
        'So',
        'Sk',
    )
