"""Printed commands work in their shell; a Python without the packages ends in one line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import error_of, invoke

from lm_human_preferences import shell
from lm_human_preferences.cli import launch as jobs

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = './sample.py sample'


@pytest.fixture
def environment(tmp_path, monkeypatch):
    folder = tmp_path / '.venv' / 'bin'
    folder.mkdir(parents=True)
    for name in ('python3', 'pipenv'):
        (folder / name).touch(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'executable', str(folder / 'python3'))
    monkeypatch.setattr(sys, 'prefix', str(folder.parent))
    monkeypatch.delenv('PIPENV_IGNORE_VIRTUALENVS', raising=False)
    return folder


@pytest.mark.parametrize(
    'variables, is_on_path, sampling, tensorboard',
    [
        ({}, True, SAMPLE, 'tensorboard'),
        ({}, False, f'.venv/bin/python3 {SAMPLE}', '.venv/bin/tensorboard'),
        ({'PIPENV_ACTIVE': '1'}, True, f'pipenv run {SAMPLE}', 'pipenv run tensorboard'),
        (
            {'PIPENV_ACTIVE': '1', 'PIPENV_IGNORE_VIRTUALENVS': '1'},
            True,
            f'.venv/bin/pipenv run {SAMPLE}',
            '.venv/bin/pipenv run tensorboard',
        ),
    ],
)
def test_a_command_is_printed_as_this_one_was_started(
    environment, monkeypatch, variables, is_on_path, sampling, tensorboard
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv('PATH', str(environment) if is_on_path else os.defpath)
    assert shell.typed(SAMPLE) == sampling
    assert shell.typed('tensorboard') == tensorboard
    assert shell.typed('tensorboard', '--logdir', 'my runs') == f"{tensorboard} --logdir 'my runs'"


def test_a_script_is_named_where_the_user_has_named_it(environment, monkeypatch):
    monkeypatch.setenv('PATH', str(environment))
    named = os.path.join(os.path.relpath(ROOT), 'launch.py')
    monkeypatch.setattr(sys, 'argv', [named, 'ask'])
    assert shell.typed(SAMPLE) == f'{os.path.relpath(ROOT)}/sample.py sample'


def test_commands_at_the_end_of_a_training_and_in_errors_are_so_printed(environment, monkeypatch):
    monkeypatch.setenv('PIPENV_ACTIVE', '1')
    assert error_of(invoke('evaluate')) == (
        'SAVE_DIR missing; example: pipenv run ./launch.py evaluate /tmp/save/train_policy/first'
    )


@pytest.mark.parametrize('script', ['launch.py', 'sample.py'])
def test_a_python_without_click_ends_in_one_line(script):
    result = subprocess.run(
        [sys.executable, '-S', script, '--help'], cwd=ROOT, capture_output=True, text=True
    )
    assert (result.returncode, result.stdout) == (2, '')
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: {sys.executable} has no module 'click'")


def test_the_environment_that_is_named_is_in_the_folder_of_the_program(monkeypatch):
    monkeypatch.chdir(ROOT.parent)
    monkeypatch.setattr(sys, 'prefix', '/usr')
    monkeypatch.setattr(os.path, 'exists', lambda path: True)
    assert f'`. {ROOT.name}/.venv/bin/activate`' in shell.missing('torch')


def test_a_python_without_torch_ends_in_one_line(environment, monkeypatch):
    def start(*arguments, **settings):
        raise ModuleNotFoundError("No module named 'torch'", name='torch')

    monkeypatch.setattr(jobs, 'start_job', start)
    monkeypatch.setattr(shell, '_ROOT', environment.parents[1])
    monkeypatch.setattr(sys, 'argv', ['./launch.py', 'evaluate', 'a run'])
    told = f"{sys.executable} has no module 'torch': "
    installs = f'{told}`sh tools/setup.sh` installs what this program needs into .venv'
    assert error_of(invoke('train_reward mock_sentiment a')) == installs
    (environment / 'python').touch(0o755)
    assert error_of(invoke('train_reward mock_sentiment a')) == installs  # this is that Python
    monkeypatch.setattr(sys, 'prefix', '/usr')
    (environment / 'python').unlink()
    assert error_of(invoke('train_reward mock_sentiment a')) == installs
    (environment / 'python').touch(0o755)
    assert error_of(invoke('train_reward mock_sentiment a')) == (
        f"{told}type `.venv/bin/python ./launch.py evaluate 'a run'`, or `. .venv/bin/activate`"
        ' once in this shell'
    )
