"""Printed commands work in their shell; a Python without the packages ends in one line."""

import os
import subprocess
import sys

import pytest
from command_line import error_of, invoke
from launched import REPOSITORY

from lm_human_preferences import errors
from lm_human_preferences.cli import launch as jobs

SAMPLE = './sample.py sample'


@pytest.fixture
def environment(tmp_path, monkeypatch):
    folder = tmp_path / '.venv' / 'bin'
    folder.mkdir(parents=True)
    (folder / 'python3').touch(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'executable', str(folder / 'python3'))
    return folder


@pytest.mark.parametrize(
    'variables, is_on_path, is_named',
    [({}, True, False), ({}, False, True), ({'PIPENV_ACTIVE': '1'}, True, True)],
)
def test_a_command_is_printed_so_that_it_runs_in_any_folder(
    environment, monkeypatch, variables, is_on_path, is_named
):
    """pipenv changes PATH for the program that it runs, not for the shell that it was typed in."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv('PATH', str(environment) if is_on_path else os.defpath)
    sampling, tensorboard = SAMPLE, 'tensorboard'
    if is_named:
        sampling, tensorboard = f'{environment}/python3 {SAMPLE}', f'{environment}/tensorboard'
    assert errors.typed(SAMPLE) == sampling
    assert errors.typed('tensorboard') == tensorboard
    assert errors.typed('tensorboard', '--logdir', 'my runs') == f"{tensorboard} --logdir 'my runs'"


@pytest.mark.parametrize('script', ['launch.py', 'sample.py'])
def test_a_python_without_click_ends_in_one_line(script):
    result = subprocess.run(
        [sys.executable, '-S', script, '--help'], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert (result.returncode, result.stdout) == (2, '')
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: {sys.executable} has no module 'click'")


def test_a_python_without_torch_ends_in_one_line(environment, monkeypatch):
    def start(*arguments, **settings):
        raise ModuleNotFoundError("No module named 'torch'", name='torch')

    monkeypatch.setattr(jobs, 'start_job', start)
    monkeypatch.setattr(errors, '_ROOT', environment.parents[1])
    told = f"{sys.executable} has no module 'torch': "
    installs = f'{told}`sh tools/setup.sh` installs what this program needs into .venv, and'
    uses = '`. .venv/bin/activate` makes this shell use it'
    assert error_of(invoke('train_reward mock_sentiment a')) == f'{installs} {uses}'
