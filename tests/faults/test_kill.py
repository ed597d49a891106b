"""Killed and stopped ranks and launchers: no hang and no leftover. Resumed: test_resume_kill.py.

First under our launcher, then under Open MPI's mpiexec, srun and torchrun.
"""

import os
import re
import signal
import time
from pathlib import Path

import pytest
import real_launchers
from launched import (
    FOREVER,
    MPIEXEC,
    SMALL,
    TORCHRUN,
    WITHOUT_TORCH,
    Launch,
    eventually,
    start_by_slurm,
    start_job,
)

from lm_human_preferences.checkpointing import checkpoints

pytestmark = pytest.mark.slow
END, LONGER = 10, 20  # seconds in which everything has to end
QUICK_START = ('--rewards.train_new_model=off', '--rewards.trained_model=test')
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
    told = rf'^error: rank 1, process {process} on \S+, has given no .* 10 s: .*--run.rank_timeout$'
    assert re.search(told, launch.errors(), re.MULTILINE)


def test_rank_that_never_starts_under_the_users_own_mpiexec(tmp_path):
    launch = start_job(tmp_path, 'meet', started_by=(MPIEXEC, '-n', '2'))
    stop_rank_1_before_mpi(launch)
    assert launch.end_within(3 + END) in NOTICED_OR_KILLED
    lines = launch.errors().splitlines()
    assert lines[0] == 'Timeout (0:00:03)!'
    assert lines.count('Timeout (0:00:03)!') == 1
    assert any(line.endswith(' in load_mpi') for line in lines)


@pytest.fixture
def training(name, request, tmp_path):
    launcher = real_launchers.find(name, request)
    launch = Launch(
        tmp_path,
        *launcher.words,
        *QUICK_START,
        *FOREVER,
        started_by=launcher.command,
        **launcher.variables,
    )
    launch.reach(3)
    return launcher, launch


@pytest.mark.parametrize('name', ['mpiexec of Open MPI', 'srun by PMI2'])
def test_killed_rank(training):
    _, launch = training
    os.kill(launch.ranks()[1], signal.SIGKILL)
    assert launch.end_within(LONGER) != 0
    launch.assert_checkpoint_is_intact()
    assert 'Traceback' not in launch.errors()


def assert_saved(launch):
    saved = re.search(r'Step (\d+) of the policy is saved; to go on', launch.errors())
    assert saved, launch.errors()
    latest = checkpoints.latest(launch.run / 'policy' / 'checkpoints')
    assert latest.endswith(f'model.ckpt-{saved[1]}')
    assert not (launch.run / 'lock').exists()


@pytest.mark.parametrize('name', ['mpiexec of Open MPI', 'srun by PMIx'])
def test_sigterm(training):
    launcher, launch = training
    real_launchers.send_sigterm(launcher, launch)
    assert launch.end_within(LONGER) != 0
    launch.assert_checkpoint_is_intact()
    if launcher.passes_sigterm:
        assert_saved(launch)


@pytest.mark.parametrize('name', ['mpiexec of MPICH'])
def test_sigterm_to_a_rank(training):
    """The file `lock` names it: its step is saved, where the launcher would end all at once."""
    _, launch = training
    rank = re.match(r'process (\d+) on ', (launch.run / 'lock').read_text())
    os.kill(int(rank[1]), signal.SIGTERM)
    assert launch.end_within(LONGER) == 130
    assert_saved(launch)
    assert 'Traceback' not in launch.errors()


def train(directory, *words, torchrun_options=()):
    started_by = (*TORCHRUN, *torchrun_options)
    return Launch(directory, *QUICK_START, *FOREVER, *words, started_by=started_by)


def test_killed_rank_under_torchrun(tmp_path):
    launch = train(tmp_path)
    launch.reach(3)
    process = launch.ranks()[1]
    os.kill(process, signal.SIGKILL)
    assert launch.end_within(LONGER) != 0
    assert f'traceback : Signal 9 (SIGKILL) received by PID {process}' in launch.errors()
    assert 'lm_human_preferences' not in launch.errors(), 'the traceback of a lost connection'
    launch.assert_checkpoint_is_intact()


def test_killed_torchrun(tmp_path):
    launch = start_job(tmp_path, 'wait', started_by=TORCHRUN)
    launch.reach_line('2 ranks wait for ever')
    launch.process.kill()
    assert launch.end_within(LONGER) != 0


def test_a_stopped_rank_0_under_srun(tmp_path):
    """With the store that the others ask for signs of life."""
    first, second = start_by_slurm(tmp_path, 'wait_for_life')
    first.reach_line('2 ranks wait for ever')
    first.process.send_signal(signal.SIGSTOP)
    assert second.wait(10 + LONGER) == 1
    told = 'error: rank 1 has had no answer for 10 s from the host of rank 0, .* see --run.rank'
    assert re.match(told, second.errors())
    first.process.kill()


def test_restart_goes_on(tmp_path):
    """By --max-restarts, where the lock of the killed run is still there; then SIGTERM ends it."""
    launch = train(tmp_path, '--run.resume=on', torchrun_options=['--max-restarts=1'])
    launch.reach(3)
    before = launch.ranks()
    os.kill(before[0], signal.SIGKILL)
    eventually(lambda: 'Going on from' in launch.output() or launch.process.poll() is not None)
    assert launch.process.poll() is None, launch.errors()
    assert not {*before} & {*launch.ranks()}
    launch.process.terminate()
    assert launch.end_within(LONGER) != 0
    assert re.search(launch.saved_step(), launch.errors())
    assert not (launch.run / 'lock').exists()
    launch.assert_checkpoint_is_intact()
