"""Recordings that a set lacks: the tests that need them are skipped, and say which they are."""

import os
import subprocess
import sys

import pytest
from launched import REPOSITORY

# Prints why tests are skipped that have no case: a line for each test.
LIST_REASONS = """
import pytest

class Reasons:
    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        for item in items:
            if item.name.endswith('NOTSET]'):
                print(item.nodeid, next(item.iter_markers('skip')).kwargs['reason'], sep=': ')

options = ['-n0', '-q', '-p', 'no:cacheprovider', '--collect-only']
pytest.main([*options, 'tests/recorded'], plugins=[Reasons()])
"""


@pytest.fixture(scope='module')
def reasons(tmp_path_factory):
    """What tests/recorded says where no recording is at hand."""
    folder = tmp_path_factory.mktemp('empty')
    done = subprocess.run(
        [sys.executable, '-c', LIST_REASONS],
        cwd=REPOSITORY,
        env={**os.environ, 'LMHP_GOLDEN': str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if 'NOTSET]: ' in line], folder


@pytest.mark.slow
def test_every_test_without_a_case_names_its_files(reasons):
    lines, folder = reasons
    assert lines
    assert [line for line in lines if not line.endswith(f': not in the golden set {folder}')] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    'test, files',
    [
        ('test_combos.py::test_recorded', 'utils.json'),
        (
            'test_ppo.py::test_loss_targets_and_gradients',
            'ppo/configs.json, ppo_2ranks/configs.json',
        ),
        ('test_model.py::test_outputs', 'model/*.npz'),
        ('test_names', 'experiments.json'),  # which a helper reads
    ],
)
def test_the_files_are_the_ones_that_it_reads(reasons, test, files):
    lines, folder = reasons
    (line,) = (line for line in lines if f'{test}[NOTSET]' in line)
    assert line.endswith(f'[NOTSET]: {files}: not in the golden set {folder}')
