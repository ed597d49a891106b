"""The label type that CONTRIBUTING.md has as an example: a ranking of several responses."""

import __future__

import documentation

from lm_human_preferences import label_types


def register(monkeypatch):
    """Make it known for one test. It is written for the end of label_types/__init__.py."""
    text = documentation.fenced('CONTRIBUTING.md', 'python')
    as_there = __future__.annotations.compiler_flag
    code = compile(text, 'CONTRIBUTING.md', 'exec', as_there, dont_inherit=True)
    monkeypatch.setattr(label_types, 'TYPES', dict(label_types.TYPES))
    exec(code, dict(vars(label_types)))


def places(answer):
    """The places on the screen, from 1, of the samples in the order of an answer."""
    return [answer.order.index(sample) + 1 for sample in answer.value]
