"""Killed and stopped ranks and launchers: no hang and no leftover. Resumed: test_resume_kill.py."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
from launched import FOREVER, MPIEXEC, SMALL, WITHOUT_TORCH, Launch, eventually, start_job

pytestmark = pytest.mark.slow
END = 10  # seconds in which everything has to end
# Of the rank that notices a stopped one, and of that one, which is killed: mpiexec mixes them.
NOTICED_OR_KILLED = (1, 9)


@pytest.fixture
def waiting(tmp_path):
    launch = start_job(tmp_path, 'wait', PYTHONPATH=WITHOUT_TORCH)
    launch.reach_line('2 ranks wait for ever')
    launch.assert_shared_memory_is_nameless()
    return launch


def test_signals_in_a_row(waiting):
    """An impatient user does not disturb the launcher's tidying up."""
    for _ in range(20):
        waiting.process.send_signal(signal.SIGINT)
        time.sleep(0.05)
    assert waiting.end_within(END) == 130


def test_killed_launcher(waiting):
    waiting.process.kill()
    assert waiting.end_within(END) == -signal.SIGKILL


def stop_rank_1_before_mpi(launch):
    """Return its process when rank 0 is inside MPI_Init, where it notices nothing."""
    late = eventually(lambda: len(ranks := launch.ranks()) == 2 and ranks[1])
    os.kill(late, signal.SIGSTOP)
    early = launch.ranks()[0]
    eventually(lambda: '/mpi4py/MPI.' in Path(f'/proc/{early}/maps').read_text())
    time.sleep(1)
    return late


def test_killed_launcher_of_ranks_that_start(tmp_path):
    launch = start_job(tmp_path, 'wait')
    late = stop_rank_1_before_mpi(launch)
    launch.process.kill()
    os.kill(late, signal.SIGCONT)
    assert launch.end_within(END) == -signal.SIGKILL


def test_killed_mpiexec(waiting):
    (mpiexec,) = (
        Path(f'/proc/{waiting.process.pid}/task/{waiting.process.pid}/children').read_text().split()
    )
    os.kill(int(mpiexec), signal.SIGKILL)
    assert waiting.end_within(END) == 1
    assert waiting.errors() == 'error: mpiexec was killed by SIGKILL, probably out of memory'


def test_killed_parent_of_the_ranks(waiting):
    """mpiexec and its ranks do not notice by themselves."""
    status = Path(f'/proc/{waiting.ranks()[0]}/stat').read_text()
    os.kill(int(status.rpartition(')')[2].split()[1]), signal.SIGKILL)
    assert waiting.end_within(END) == 1
    assert re.search(
        '^error: (mpiexec was killed by SIGKILL|rank . failed)', waiting.errors(), re.MULTILINE
    )


def test_crashed_rank(waiting):
    """Its signal is told, and where it was, though mpiexec's status mixes it with others."""
    process = waiting.ranks()[1]
    os.kill(process, signal.SIGABRT)
    assert waiting.end_within(END) == 1
    errors = waiting.errors()
    assert re.search(
        r'^Fatal Python error: Aborted$.* in run_job$', errors, re.MULTILINE | re.DOTALL
    )
    assert errors.splitlines()[-1] == (f'error: rank 1, process {process}, was killed by SIGABRT')


def test_hangup(waiting):
    os.kill(waiting.ranks()[1], signal.SIGSTOP)
    waiting.process.send_signal(signal.SIGHUP)
    assert waiting.end_within(END) == 128 + signal.SIGHUP


def test_rank_that_is_stopped_for_too_long(tmp_path):
    launch = Launch(tmp_path, '--mpi=2', '--run.rank_timeout=10', *SMALL, *FOREVER)
    launch.reach(1)
    process = launch.ranks()[1]
    os.kill(process, signal.SIGSTOP)
    time.sleep(5)
    os.kill(process, signal.SIGCONT)
    launch.reach(20)
    os.kill(process, signal.SIGSTOP)
    assert launch.end_within(10 + END) == 1
    told = f'error: rank 1, process {process}, has given no sign of life for 10 s (--run.rank_time'
    assert launch.errors().splitlines()[-1].startswith(told)


def test_stopped_rank_under_the_users_own_mpiexec(tmp_path):
    launch = start_job(tmp_path, 'wait_for_life', started_by=(MPIEXEC, '-n', '2'))
    launch.reach_line('2 ranks wait for ever')
    process = launch.ranks()[1]
    os.kill(process, signal.SIGSTOP)
    assert launch.end_within(10 + END) in NOTICED_OR_KILLED
    assert re.search(
        rf'^error: rank 1, process {process} on \S+, has given no sign of life for 10 s: it is'
        r' stopped, or its host is gone; see --run.rank_timeout$',
        launch.errors(),
        re.MULTILINE,
    )


def test_rank_that_never_starts_under_the_users_own_mpiexec(tmp_path):
    launch = start_job(tmp_path, 'meet', started_by=(MPIEXEC, '-n', '2'))
    stop_rank_1_before_mpi(launch)
    assert launch.end_within(3 + END) in NOTICED_OR_KILLED
    lines = launch.errors().splitlines()
    assert lines[0] == 'Timeout (0:00:03)!'
    assert lines.count('Timeout (0:00:03)!') == 1
    assert any(line.endswith(' in load_mpi') for line in lines)
