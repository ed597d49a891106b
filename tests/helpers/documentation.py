"""The documentation, as tests read it, and the tools that write it."""

import importlib.util
import re

from launched import REPOSITORY


def page(path):
    return (REPOSITORY / path).read_text(encoding='utf-8')


def fenced(path, language):
    (block,) = re.findall(rf'^```{language}\n(.*?)^```$', page(path), re.MULTILINE | re.DOTALL)
    return block


def tool(name):
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / f'tools/{name}.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def changed(text, changes):
    """`text` with {old: new} replaced, each of which it has exactly once."""
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text
