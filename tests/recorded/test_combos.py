"""utils.combos against the recorded return values, and what the recordings lack."""

import json
import re

import pytest
from golden_data import json_if_there

from lm_human_preferences.utils import combos
from lm_human_preferences.utils.combos import bind, bind_nested


class Names(dict):
    """The functions of utils.combos; every other name stands for itself."""

    def __missing__(self, name):
        return name


def recorded():
    """(expression, trials), without those of the original's functions that no experiment uses."""
    found = json_if_there('utils.json', default={}).get('combos', {}).items()
    return [
        (expression, trials)
        for expression, trials in found
        if set(re.findall(r'(\w+)\(', expression)) <= vars(combos).keys()
    ]


@pytest.mark.parametrize('expression, trials', recorded())
def test_recorded(expression, trials):
    assert json.loads(json.dumps(eval(expression, {}, Names(vars(combos))))) == trials


def test_a_descriptor_may_be_0_but_not_nothing():
    assert bind('x', 1, 0) == [(('x', 1, {'descriptor': 0}),)]
    assert bind('x', 1, '') == bind('x', 1) == [(('x', 1, {}),)]


def test_what_sets_nothing_is_not_nested():
    trials = combos.combos(bind('a', 1), bind(None, None, 'x'))
    assert bind_nested('p', trials) == [(('p.a', 1, {}), (None, None, {'descriptor': 'x'}))]


def test_product_order():
    letters = [*bind('x', 'a'), *bind('x', 'b')]
    both = combos.combos(letters, [*bind('y', 1), *bind('y', 2)])
    assert [tuple(value for _, value, _ in trial) for trial in both] == [
        ('a', 1),
        ('a', 2),
        ('b', 1),
        ('b', 2),
    ]
