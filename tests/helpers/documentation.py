"""The documentation, as tests read it."""

import re

from launched import REPOSITORY


def page(path):
    return (REPOSITORY / path).read_text(encoding='utf-8')


def fenced(path, language):
    (block,) = re.findall(rf'^```{language}\n(.*?)^```$', page(path), re.MULTILINE | re.DOTALL)
    return block


def changed(text, changes):
    """`text` with {old: new} replaced, each of which it has exactly once."""
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text
