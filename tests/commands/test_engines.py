"""Real ranks, started by mpiexec, on each engine: the tests that use ranks.on_ranks, recordings
among them.

With two ranks all of them, with three and four the fewer that say what several ranks compute.
"""

import re
import subprocess
import sys

import pytest
from engines import ENGINES, RECORDED, TESTS, WHAT_RANKS_COMPUTE, why_not

from lm_human_preferences.distributed import launcher

PATIENCE = 900  # seconds, of which a machine with nothing else to do needs a tenth


def passed_on_ranks(size, directory):
    """{engine: names of the tests that passed, on each of `size` ranks}, for all engines that this
    machine has."""
    engines = [engine for engine in ENGINES if not why_not(engine)]
    tests = WHAT_RANKS_COMPUTE + (RECORDED if size == 2 else [])
    mpiexec, is_open_mpi = launcher.find_mpiexec()
    variables = {
        **launcher.rank_environment(str(directory), size, is_open_mpi),
        'OMP_NUM_THREADS': '1',
    }
    run = subprocess.run(
        [
            mpiexec,
            *launcher.mpiexec_options(is_open_mpi, size, 1),
            sys.executable,
            str(TESTS / 'helpers/on_mpi.py'),
            ','.join(engines),
            *(str(TESTS / test) for test in tests),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
        env=variables,
    )
    assert run.returncode == 0, run.stdout
    passed = {}
    for line in run.stdout.splitlines():
        if said := re.fullmatch(rf'{size} ranks, averaging by (\w+).*', line):
            current = passed[said[1]] = []
        else:
            current.append(line)
    assert list(passed) == engines, run.stdout
    return passed


@pytest.mark.slow
@pytest.mark.parametrize('size', (2, 3, 4))
def test_engines(size, tmp_path):
    for engine, passed in passed_on_ranks(size, tmp_path).items():
        assert len(passed) == size and len(set(passed)) == 1, (
            engine,
            passed,
        )  # and not a line more: no warnings
        for test in WHAT_RANKS_COMPUTE:
            assert re.split('[:/]', test)[-1].removesuffix('.py') in passed[0], engine
    if missing := [f'{engine}: {why_not(engine)}' for engine in ENGINES if why_not(engine)]:
        pytest.skip(f'the others passed; {"; ".join(missing)}')


def test_launched_by_another_mpi(tmp_path):
    """N worlds of one rank, as an mpiexec makes them that is not of the MPI that this process
    loads."""
    code = 'from lm_human_preferences.distributed import comm; comm.init_comm()'
    run = subprocess.run(
        [sys.executable, '-c', code],
        capture_output=True,
        text=True,
        env=launcher.rank_environment(str(tmp_path), 3, False),
    )
    assert (
        '3 ranks were started, but each sees a world of 1: they were started by the mpiexec of'
        in run.stderr
    )
