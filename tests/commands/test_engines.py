"""Real ranks, started by mpiexec on each engine and without MPI: the tests that use ranks.on_ranks.

Each engine does what depends on the engine: communication, and a training whose gradients it
averages. The rest, recordings included, is the same for all of them, and is done by one.
faults/test_two_hosts.py has three ranks.
"""

import os
import re

import pytest
from engines import (
    COMMUNICATION,
    OF_EACH_ENGINE,
    OF_ONE_ENGINE,
    available_engines,
    on_mpi_command,
    on_mpi_words,
    skip_reason,
)
from launched import output_of, run_without_launcher

from lm_human_preferences.distributed import launcher

TIMEOUT_SECONDS = 900  # an idle machine needs a tenth of it


def run_by_mpiexec(size, directory, command):
    mpiexec, is_open_mpi = launcher.find_mpiexec()
    environment = launcher.rank_environment(str(directory), size, is_open_mpi)
    options = launcher.mpiexec_options(is_open_mpi, size, processors=1)
    return output_of([mpiexec, *options, *command], environment, TIMEOUT_SECONDS)


def lines_by_engine(size, output):
    lines = {}
    for line in output.splitlines():
        announced = re.fullmatch(rf'{size} ranks, averaging by (\w+).*', line)
        if announced:
            current = lines[announced[1]] = []
        else:
            current.append(line)
    return lines


@pytest.mark.slow
def test_two_ranks(tmp_path):
    for_all = on_mpi_command(OF_ONE_ENGINE, 'torch')
    output = run_by_mpiexec(2, tmp_path, [*for_all, '--', *on_mpi_words(OF_EACH_ENGINE)])
    passed = lines_by_engine(2, output)
    # A recording that is not in the set is skipped.
    assert_passed(passed['torch'][:2], 2, OF_ONE_ENGINE[:1])
    passed['torch'] = passed['torch'][2:]
    assert list(passed) == available_engines(), output
    for lines in passed.values():
        assert_passed(lines, 2, OF_EACH_ENGINE)
    if skip_reason():
        pytest.skip(skip_reason())


def assert_passed(lines, size, tests):
    assert len(lines) == size and len(set(lines)) == 1, lines
    for test in tests:
        name = re.split('[:/]', test)[-1].removesuffix('.py').partition('[')[0]
        assert name in lines[0]


@pytest.mark.slow
def test_ranks_without_mpi():
    """They have their own way to send each other objects."""
    # Below those that connections take, so that none of another test has it meanwhile.
    port = 20_000 + os.getpid() % 9_000
    command = on_mpi_command(COMMUNICATION, 'torch')
    output, _ = run_without_launcher([command] * 2, '127.0.0.1', port, TIMEOUT_SECONDS)
    assert_passed(lines_by_engine(2, output)['torch'], 2, COMMUNICATION)
