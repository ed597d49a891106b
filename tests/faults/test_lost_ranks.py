"""Ranks that fail, are killed or stopped, and their launchers: no hang, no leftover, one error.

Each fault is tried under one launcher. Runs that go on after it: test_resume_kill.py.
"""

import os
import re
import signal
import time
from pathlib import Path

import pytest
import real_launchers
from launched import FOREVER, MPIEXEC, Launch, eventually, start_by_slurm, start_job

from lm_human_preferences.checkpointing import checkpoints

pytestmark = pytest.mark.slow
END = 20  # seconds in which everything has to end
TIMEOUT = 4  # seconds that ranks wait for each other
WITH_HOROVOD = 'our launcher, horovod'


def launcher_of(name, request):
    """Return (launcher, engine), or skip the test."""
    name, _, engine = name.partition(', ')
    launcher = real_launchers.find(name, request)
    if engine and engine not in launcher.engines():
        pytest.skip(f'{engine} is not built for these ranks')
    return launcher, engine or 'torch'


@pytest.fixture
def start(name, request, tmp_path):
    """Return a function that starts a job of rank_jobs on two ranks."""
    launcher, engine = launcher_of(name, request)
    settings = {**launcher.variables, 'ENGINE': engine, 'TIMEOUT': str(TIMEOUT)}
    return lambda job: start_job(tmp_path, job, started_by=launcher.command, **settings)


@pytest.fixture
def working(start):
    launch = start('work')
    launch.reach_line('2 ranks work')
    return launch


@pytest.fixture
def training(name, request, tmp_path):
    launcher, engine = launcher_of(name, request)
    words = [*launcher.words, f'--run.allreduce={engine}', *FOREVER]
    words += ['--rewards.train_new_model=off', '--rewards.trained_model=test']
    launch = Launch(tmp_path, *words, started_by=launcher.command, **launcher.variables)
    launch.reach(3)
    return launch


@pytest.mark.parametrize('name', ['our launcher'])
def test_an_exception_of_one_rank_ends_all(start):
    launch = start('fail')
    assert launch.end_within(60) == 1
    lines = launch.errors().splitlines()
    assert lines[0] == 'Traceback (most recent call last):'
    assert lines[-1] == 'ArithmeticError: rank 1 cannot count'
    assert launch.errors().count('cannot count') == 2  # once in the line of code


@pytest.mark.parametrize('name', ['mpiexec of Open MPI', 'srun by PMI2', 'srun without MPI'])
def test_a_killed_rank_ends_all(training):
    """By `--mpi 2`: test_resume_kill.py."""
    os.kill(training.ranks()[1], signal.SIGKILL)
    assert training.end_within(END) != 0
    training.assert_checkpoint_is_intact()
    assert 'lm_human_preferences' not in training.errors(), 'the traceback of a lost connection'


def test_a_killed_rank_that_nobody_watches_ends_the_other(tmp_path):
    """Though nothing but the connection tells."""
    first, second = start_by_slurm(tmp_path, 'work')
    first.reach_line('2 ranks work')
    second.process.send_signal(signal.SIGKILL)
    assert first.wait(END) == 1
    assert re.fullmatch('error: rank 0 has lost another: .*', first.errors())


@pytest.mark.parametrize('name', ['torchrun'])
def test_a_killed_launcher_leaves_no_rank_behind(working):
    working.process.kill()
    assert working.end_within(2) == -signal.SIGKILL


@pytest.mark.parametrize('name', ['our launcher'])
def test_a_killed_parent_of_the_ranks_leaves_none_behind(working):
    """mpiexec and its ranks do not notice by themselves."""
    working.assert_shared_memory_is_nameless()
    status = Path(f'/proc/{working.ranks()[0]}/stat').read_text()
    os.kill(int(status.rpartition(')')[2].split()[1]), signal.SIGKILL)
    assert working.end_within(END) != 0


@pytest.mark.parametrize('name, rank', [('our launcher', 0), (WITH_HOROVOD, 1)])
def test_a_stopped_rank_ends_all(working, rank):
    process = working.ranks()[rank]
    os.kill(process, signal.SIGSTOP)
    time.sleep(TIMEOUT / 2)
    os.kill(process, signal.SIGCONT)
    time.sleep(TIMEOUT / 4)
    assert working.process.poll() is None  # it was stopped for less than they wait
    os.kill(process, signal.SIGSTOP)
    assert working.end_within(TIMEOUT + END) == 1
    told = f'error: rank {1 - rank} has lost another: .*; see --run.allreduce_timeout'
    assert re.fullmatch(told, working.errors())


@pytest.mark.parametrize('name', ['our launcher'])
def test_rank_0_may_work_alone_for_longer(start):
    launch = start('alone')
    assert launch.end_within(60) == 0, launch.errors()
    assert "['found', 'found'] in the end" in launch.output()


def assert_saved(launch):
    saved = re.search(r'Step (\d+) of the policy is saved; to go on', launch.errors())
    assert saved, launch.errors()
    latest = checkpoints.latest(launch.run / 'policy' / 'checkpoints')
    assert latest.endswith(f'model.ckpt-{saved[1]}')
    assert not (launch.run / 'lock').exists()
    assert launch.errors().count('Stopping: the current step is saved if') == 1


@pytest.mark.parametrize('name', ['torchrun'])
def test_sigterm_to_the_launcher_saves_the_step(training):
    training.process.terminate()
    assert training.end_within(END) == 1
    assert_saved(training)


@pytest.mark.parametrize('name', [WITH_HOROVOD])
def test_ctrl_c_saves_the_step(training):
    """The terminal sends it to all of its process group."""
    os.killpg(training.process.pid, signal.SIGINT)
    assert training.end_within(END) == 130
    assert_saved(training)


@pytest.mark.parametrize('name', ['mpiexec of MPICH'])
def test_a_signal_to_a_rank_saves_the_step(training):
    """The file `lock` names the first one."""
    rank = re.match(r'process (\d+) on ', (training.run / 'lock').read_text())
    os.kill(int(rank[1]), signal.SIGTERM)
    assert training.end_within(END) == 130
    assert_saved(training)


@pytest.mark.parametrize('name', ['srun by PMIx'])
def test_a_signal_leaves_a_whole_checkpoint(training, name, request):
    """Though Open MPI does not wait for another one."""
    launcher, _ = launcher_of(name, request)
    real_launchers.send_sigterm(launcher, training)
    assert training.end_within(END) != 0
    training.assert_checkpoint_is_intact()


def test_a_rank_that_never_starts(tmp_path):
    """The other is inside MPI_Init, which ends at nothing else."""
    launch = start_job(tmp_path, 'work', started_by=(MPIEXEC, '-n', '2'), TIMEOUT='1')
    late = eventually(lambda: len(ranks := launch.ranks()) == 2 and ranks[1])
    os.kill(late, signal.SIGSTOP)
    assert launch.end_within(60) != 0
    lines = launch.errors().splitlines()
    assert lines[0] == 'Timeout (0:00:06)!'
    assert lines.count(lines[0]) == 1
    assert any(line.endswith(' in load_mpi') for line in lines)
