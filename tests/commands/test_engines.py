"""Real ranks, started by mpiexec on each engine and by torchrun: the tests that use ranks.on_ranks.

With two ranks all of them, recordings included; with three, which most machines that test this have
too few cores for, communication and a training. faults/test_two_hosts.py has four ranks.
"""

import os
import re
import subprocess
import sys

import pytest
from engines import (
    RECORDED,
    WHAT_RANKS_COMPUTE,
    available_engines,
    on_mpi_command,
    skip_reason,
)
from launched import TORCHRUN

from lm_human_preferences.distributed import launcher

TIMEOUT_SECONDS = 900  # an idle machine needs a tenth of it


TESTS_OF_SIZE = {
    2: WHAT_RANKS_COMPUTE + RECORDED,
    3: WHAT_RANKS_COMPUTE[:2],
}


def run_by_mpiexec(size, directory):
    """Run the tests on `size` ranks on all available engines; returns what rank 0 printed."""
    mpiexec, is_open_mpi = launcher.find_mpiexec()
    environment = launcher.rank_environment(str(directory), size, is_open_mpi)
    options = launcher.mpiexec_options(is_open_mpi, size, processors=1)
    return run([mpiexec, *options, *on_mpi_command(TESTS_OF_SIZE[size])], environment)


def run(command, environment):
    """What the command and its ranks, each with one thread, print; it has to succeed."""
    run = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_SECONDS,
        env={**environment, 'OMP_NUM_THREADS': '1'},
    )
    assert run.returncode == 0, run.stdout
    return run.stdout


def lines_by_engine(size, output):
    """{engine: the lines printed after the one that says that ranks average by it}."""
    lines = {}
    for line in output.splitlines():
        announced = re.fullmatch(rf'{size} ranks, averaging by (\w+).*', line)
        if announced:
            current = lines[announced[1]] = []
        else:
            current.append(line)
    return lines


@pytest.mark.slow
@pytest.mark.parametrize('size', TESTS_OF_SIZE)
def test_engines(size, tmp_path):
    output = run_by_mpiexec(size, tmp_path)
    passed = lines_by_engine(size, output)
    assert list(passed) == available_engines(), output
    for engine, lines in passed.items():
        assert_passed(lines, size, engine)
    if skip_reason():
        pytest.skip(skip_reason())


def assert_passed(lines, size, engine):
    """A line for each rank, and no warnings."""
    assert len(lines) == size and len(set(lines)) == 1, (engine, lines)
    for test in set(WHAT_RANKS_COMPUTE) & set(TESTS_OF_SIZE[size]):
        name = re.split('[:/]', test)[-1].removesuffix('.py')
        assert name in lines[0], engine


@pytest.mark.slow
def test_torchrun():
    """The recordings, too, with two ranks and the one engine that there is without MPI."""
    output = run([*TORCHRUN, *on_mpi_command(TESTS_OF_SIZE[2], 'torch')], os.environ)
    assert_passed(lines_by_engine(2, output)['torch'], 2, 'torch')


def test_launched_by_another_mpi(tmp_path):
    """The mpiexec of an MPI that this process does not load starts N worlds of one rank each."""
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
