"""The experiments of launch.py against experiments.json."""

import json

import pytest
from click.testing import CliRunner
from experiments import EXPERIMENTS, RECORDED, WHITEN, binds, recorded_hparams, resolved

import launch


@pytest.mark.parametrize(
    'command, name, entry',
    [
        (command, name, entry)
        for command in RECORDED['experiments']
        for name, entry in RECORDED['experiments'][command].items()
    ],
)
def test_recorded(command, name, entry):
    expected = [
        (WHITEN if key == 'rewards.whiten' else key, value) for key, value in entry['binds'].items()
    ]
    assert list(binds(command, name).items()) == expected
    assert json.dumps(resolved(command, name).to_nested_dict()) == json.dumps(
        recorded_hparams(entry)
    )


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
    helpers = {
        name
        for name in RECORDED['names'][command]
        if name.startswith('_') or name.endswith('_experiments')
    }
    assert set(EXPERIMENTS[command]) == set(RECORDED['names'][command]) - helpers | {
        'test',
        'mock_sentiment',
        'chat',
    }


@pytest.mark.parametrize('name', sorted({*launch.policy_experiments} - {'chat'}))
def test_policy_and_reward_model_share_a_task(name):
    hparams = resolved('train_policy', name)
    assert hparams.task == hparams.rewards.train_new_model.task
    assert hparams.rewards.train_new_model == resolved('train_reward', name)
