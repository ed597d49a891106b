"""Docstrings of the product are whole: a tool that re-wraps text tears indented blocks apart."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = [
    *ROOT.glob('*.py'),
    *(ROOT / 'benchmarks').glob('*.py'),
    *(ROOT / 'tools').glob('*.py'),
    *(ROOT / 'lm_human_preferences').rglob('*.py'),
]
COMMAND = 'pipenv run'


def docstrings(source):
    """Yield (name, docstring without its indentation) of a module and all that it defines."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, 'name', 'the module'), text


def indentation(line):
    return len(line) - len(line.lstrip())


def torn_blocks(text):
    """Return the lines that the next is indented under, though they do not introduce it."""
    introduction = re.compile(rf'.*:$|\s*([\w, ]+: |- |\S+ {{2,}}|{COMMAND} |\./)')
    return [
        line
        for line, following in zip(text.split('\n'), text.split('\n')[1:])
        if line.strip()
        and indentation(following) > indentation(line)
        and not introduction.match(line)
    ]


def torn_usage(text):
    """Lines of commands in `text` that hold two, or half of an option in brackets."""
    torn = []
    block = re.findall(rf'^ +{COMMAND} .*(?:\n +.*)*', text, re.MULTILINE)
    for line in '\n'.join(block).split('\n'):
        is_half = line.count('[') != line.count(']')
        if line.count(COMMAND) > 1 or line.endswith(COMMAND) or is_half:
            torn.append(line)
    return torn


@pytest.mark.parametrize('path', FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_are_whole(path):
    source = path.read_text(encoding='utf-8')
    for name, text in docstrings(source):
        assert torn_blocks(text) == [], name
        assert torn_usage(text) == [], name
    if '__doc__' in source:  # it is the help of a program
        summary = ast.get_docstring(ast.parse(source)).split('\n')[0]
        assert summary.endswith('.'), summary
