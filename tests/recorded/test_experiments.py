"""Experiments of launch.py, and utils.combos that make them, against what was recorded."""

import json
import re

import pytest
from click.testing import CliRunner
from experiments import EXPERIMENTS, RECORDED, WHITEN, binds, recorded_hparams, resolved
from golden_data import json_if_there

import launch
from lm_human_preferences.utils import combos
from lm_human_preferences.utils.combos import bind, bind_nested


@pytest.mark.parametrize(
    'command, name, entry',
    [
        (command, name, entry)
        for command in RECORDED['experiments']
        for name, entry in RECORDED['experiments'][command].items()
    ],
)
def test_recorded(command, name, entry):
    renamed = {'rewards.whiten': WHITEN}
    expected = [(renamed.get(key, key), value) for key, value in entry['binds'].items()]
    assert list(binds(command, name).items()) == expected
    found = resolved(command, name).to_nested_dict()
    assert json.dumps(found) == json.dumps(recorded_hparams(entry))


@pytest.mark.parametrize('words', RECORDED['dry_run'])
def test_dry_run_prints_what_the_original_printed(words):
    """Original-defects 2: it then failed; ours prints the resolved hyperparameters, too."""
    recorded = RECORDED['dry_run'][words]['stdout']
    if not recorded:
        pytest.skip('original-defects 1: the experiment did not resolve')
    result = CliRunner().invoke(launch.cli, [*words.split(), 'myname', '--dry_run'])
    assert result.exit_code == 0
    assert result.stdout.startswith(recorded + 'hparams:\n  ')


@pytest.mark.parametrize('command', RECORDED['names'])
def test_names(command):
    """Original-defects 7: helpers were experiments, too."""
    names = RECORDED['names'][command]
    recorded = {name for name in names if name[0] != '_' and not name.endswith('_experiments')}
    assert set(EXPERIMENTS[command]) == recorded | {'test', 'mock_sentiment', 'chat'}


@pytest.mark.parametrize('name', sorted({*launch.policy_experiments} - {'chat'}))
def test_policy_and_reward_model_share_a_task(name):
    hparams = resolved('train_policy', name)
    assert hparams.task == hparams.rewards.train_new_model.task
    alone = resolved('train_reward', name).to_nested_dict()
    assert hparams.rewards.train_new_model.to_nested_dict() == alone


class Names(dict):
    """The functions of utils.combos; every other name stands for itself."""

    def __missing__(self, name):
        return name


def recorded_combos():
    """(expression, trials), without those of the original's functions that no experiment uses."""
    found = json_if_there('utils.json', default={}).get('combos', {}).items()
    return [
        (expression, trials)
        for expression, trials in found
        if set(re.findall(r'(\w+)\(', expression)) <= vars(combos).keys()
    ]


@pytest.mark.parametrize('expression, trials', recorded_combos())
def test_recorded_combos(expression, trials):
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
    values = [tuple(value for _, value, _ in trial) for trial in both]
    assert values == [('a', 1), ('a', 2), ('b', 1), ('b', 2)]
