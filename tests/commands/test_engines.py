"""Real ranks, started by mpiexec on each engine and without MPI: the tests that use ranks.on_ranks.

Each engine averages gradients, alone and in a training. The rest, recordings included, is the same
for all of them, and is done by one.
faults/test_two_hosts.py has three ranks.
"""

import os
import re

import pytest
from engines import (
    ENGINES,
    GRADIENTS,
    OF_EACH_ENGINE,
    OF_ONE_ENGINE,
    available_engines,
    on_mpi_command,
)
from launched import output_of, run_without_launcher

from lm_human_preferences.distributed import launcher

pytestmark = pytest.mark.slow
TIMEOUT_SECONDS = 900  # an idle machine needs a tenth of it


def assert_passed(output, engine, tests):
    """On both ranks, and as many on each."""
    announced, *counts = output.splitlines()[-3:]
    assert announced.startswith(f'averaged by {engine}')
    assert len(set(counts)) == 1, output
    for test in tests:
        name = re.split('[:/]', test)[-1].removesuffix('.py').partition('[')[0]
        assert name in counts[0]


@pytest.mark.parametrize('engine', ENGINES)
def test_two_ranks(engine):
    if engine not in available_engines():
        pytest.skip(f'{engine} is not built for the MPI of this environment')
    tests = OF_EACH_ENGINE + (OF_ONE_ENGINE if engine == 'torch' else [])
    command = [*launcher.mpiexec_words(2), *on_mpi_command(engine, tests)]
    output = output_of(command, launcher.rank_environment(), TIMEOUT_SECONDS)
    # A recording that is not in the set is skipped.
    assert_passed(output, engine, OF_EACH_ENGINE)


def test_ranks_without_mpi(tmp_path, monkeypatch):
    """They have their own way to meet, also where mpi4py and Horovod are not installed."""
    blocked = "import sys\nfor name in ('mpi4py', 'horovod'):\n    sys.modules[name] = None\n"
    (tmp_path / 'sitecustomize.py').write_text(blocked)
    monkeypatch.setenv('PYTHONPATH', str(tmp_path))
    # Below those that connections take, so that none of another test has it meanwhile.
    port = 20_000 + os.getpid() % 9_000
    command = on_mpi_command('torch', GRADIENTS)
    output, _ = run_without_launcher([command] * 2, '127.0.0.1', port, TIMEOUT_SECONDS)
    assert_passed(output, 'torch', GRADIENTS)
