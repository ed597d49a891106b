"""Text of others in Markdown: shown as it is, whatever it spells."""

from __future__ import annotations

import re
from collections.abc import Iterable

from lm_human_preferences.utils.terminal import printable

_MARKS = re.compile(r'([\\`*_\[\]<>&|#~$])')


def escaped(text: str) -> str:
    """A sentence, or a part of one, in one line: no mark in it means anything."""
    return _MARKS.sub(r'\\\1', printable(' '.join(text.split())))


def code_block(lines: Iterable[str], language: str = '') -> str:
    """Lines as they are, between fences that none of them closes."""
    text = '\n'.join(printable(line) for line in '\n'.join(lines).split('\n'))
    longest = max((len(run) for run in re.findall('`+', text)), default=0)
    fence = '`' * max(3, longest + 1)
    return f'{fence}{language}\n{text}\n{fence}'


def bullets(sentences: Iterable[str]) -> str:
    """A list of sentences, each made safe."""
    return '\n'.join(f'- {escaped(sentence)}' for sentence in sentences)


def paragraph(sentences: Iterable[str]) -> str:
    """Sentences one after another, each made safe."""
    return ' '.join(map(escaped, sentences))
