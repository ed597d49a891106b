"""Killed and stopped ranks, and SIGTERM, under Open MPI's mpiexec, srun and torchrun."""

import os
import re
import signal

import pytest
import real_launchers
from launched import FOREVER, TORCHRUN, Launch, eventually, start_by_slurm, start_job

from lm_human_preferences.checkpointing import checkpoints

pytestmark = pytest.mark.slow
END = 20  # seconds in which everything has to end
QUICK_START = ('--rewards.train_new_model=off', '--rewards.trained_model=test')


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
    assert launch.end_within(END) != 0
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
    assert launch.end_within(END) != 0
    launch.assert_checkpoint_is_intact()
    if launcher.passes_sigterm:
        assert_saved(launch)


@pytest.mark.parametrize('name', ['mpiexec of MPICH'])
def test_sigterm_to_a_rank(training):
    """The file `lock` names it: its step is saved, where the launcher would end all at once."""
    _, launch = training
    rank = re.match(r'process (\d+) on ', (launch.run / 'lock').read_text())
    os.kill(int(rank[1]), signal.SIGTERM)
    assert launch.end_within(END) == 130
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
    assert launch.end_within(END) != 0
    assert f'traceback : Signal 9 (SIGKILL) received by PID {process}' in launch.errors()
    assert 'lm_human_preferences' not in launch.errors(), 'the traceback of a lost connection'
    launch.assert_checkpoint_is_intact()


def test_killed_torchrun(tmp_path):
    launch = start_job(tmp_path, 'wait', started_by=TORCHRUN)
    launch.reach_line('2 ranks wait for ever')
    launch.process.kill()
    assert launch.end_within(END) != 0


def test_a_stopped_rank_0_under_srun(tmp_path):
    """With the store that the others ask for signs of life. Rank 1: test_kill.py."""
    first, second = start_by_slurm(tmp_path, 'wait_for_life')
    first.reach_line('2 ranks wait for ever')
    first.process.send_signal(signal.SIGSTOP)
    assert second.wait(10 + END) == 1
    told = 'error: rank 1 has had no answer for 10 s from the host of rank 0, .* see --run.rank'
    assert re.match(told, second.errors())
    assert first.wait(END) == -signal.SIGKILL  # by the other, which is on the same host


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
    assert launch.end_within(END) != 0
    assert re.search(launch.saved_step(), launch.errors())
    assert not (launch.run / 'lock').exists()
    launch.assert_checkpoint_is_intact()
