"""Recommendation for training on few labels, and the command that prints it."""

import shlex
from types import SimpleNamespace

import pytest
from command_line import hparams_of, succeed
from experiments import binds

import launch
from lm_human_preferences import errors
from lm_human_preferences.commands import advice
from lm_human_preferences.hparams.reward_options import HParams
from lm_human_preferences.labels import task_file


@pytest.mark.parametrize('labels, epochs', [(1, 16), (512, 16), (513, 4), (4096, 4), (4097, 1)])
def test_few_labels_are_learned_more_often(labels, epochs):
    options = ['--rewards.train_new_model.epochs', str(epochs), '--rewards.ensemble', '4']
    assert advice.training_options(labels, is_large=False) == options


def test_a_large_model_needs_only_a_head():
    words = ['--rewards.train_new_model.features', 'frozen']
    assert advice.training_options(512, is_large=True) == words
    assert words[0] not in advice.training_options(513, is_large=True)
    assert words[0] not in advice.training_options(30, is_large=False)


def task_of(experiment, options):
    hparams = HParams()
    hparams.override_from_dict(binds('train_reward', experiment))
    hparams.override_from_dict(options)
    return hparams.task


@pytest.fixture
def command_of(tmp_path, monkeypatch):
    """A function that returns the command of a folder whose `ask` had an experiment and options."""
    monkeypatch.chdir(tmp_path)
    settings = launch.settings_of_experiments()

    def command(experiment, options, *, recorded=True, labels=200, **more):
        task = task_of(experiment, options)
        content = task_file.new_task('best_of_2', task.to_nested_dict(), None, False, experiment)
        if not recorded:
            del content['experiment']
            content['task']['policy']['gone'] = 1  # an option of an earlier version
        folder = SimpleNamespace(path="anna's", task=content)
        return advice.training_command(folder, settings, labels, **more)

    return command


def test_the_command_has_what_is_recommended(command_of, tmp_path):
    path = f"'{tmp_path}/anna'\"'\"'s'"
    assert command_of('test', {}, without='bob,carl') == (
        "./launch.py train_policy test 'anna'\"'\"'s' --rewards.train_new_model.labels.source"
        f' {path} --rewards.train_new_model.labels.type best_of_2'
        ' --rewards.train_new_model.labels.num_train None'
        ' --rewards.train_new_model.labels.without bob,carl --rewards.train_new_model.epochs 16'
        ' --rewards.ensemble 4'
    )
    assert 'without' not in command_of('test', {})


CHAT = {'task.policy.initial_model': 'org/model', 'task.query_dataset': 'hf://datasets/a/b/c'}


@pytest.mark.parametrize(
    'experiment, options, recorded, named',
    [
        ('descriptiveness', {}, True, 'descriptiveness'),
        ('descriptiveness', {}, False, 'chat'),
        ('chat', {**CHAT, 'task.query_length': 32, 'task.policy.lora': 'off'}, True, 'chat'),
    ],
)
def test_the_command_has_the_task_of_the_questions(
    command_of, started, experiment, options, recorded, named
):
    words = shlex.split(command_of(experiment, options, recorded=recorded))
    assert words[2] == named
    succeed([*words[1:], '--save_dir', 'None'])
    wanted = task_of(experiment, options)
    hparams = hparams_of(started)
    assert hparams.task == hparams.rewards.train_new_model.task == wanted


def test_the_command_has_a_name_that_no_run_has(command_of, tmp_path, monkeypatch):
    monkeypatch.setattr(advice, 'usual_directory', lambda command, name: str(tmp_path / name))
    for name in ("anna's", "anna's-2"):
        assert shlex.split(command_of('test', {}))[3] == name
        (tmp_path / name).mkdir()


def test_a_missing_package_ends_the_program(capsys):
    with pytest.raises(SystemExit) as end:
        errors.require('no_such_package')
    assert end.value.code == 2
    assert (
        "has no module 'no_such_package': `sh tools/setup.sh` installs" in capsys.readouterr().err
    )
