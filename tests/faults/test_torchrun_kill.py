"""Ranks of torchrun that are killed or stopped, and torchrun itself: nothing hangs or stays behind.

benchmarks/launchers.py does the same many times, under every launcher.
"""

import os
import re
import signal
import time

import pytest
from launched import FOREVER, SMALL, TORCHRUN, Launch, eventually, start_by_slurm, start_job

pytestmark = pytest.mark.slow
END = 20  # seconds in which everything has to end


def train(directory, *words, torchrun_options=()):
    return Launch(
        directory,
        *SMALL,
        *FOREVER,
        *words,
        started_by=(*TORCHRUN, *torchrun_options),
    )


def assert_ended(launch, seconds=END):
    since = time.monotonic()
    assert launch.wait(seconds) != 0
    launch.assert_nothing_left(since + seconds - time.monotonic())


def test_killed_rank(tmp_path):
    launch = train(tmp_path)
    launch.reach(3)
    process = launch.ranks()[1]
    os.kill(process, signal.SIGKILL)
    assert_ended(launch)
    assert f'traceback : Signal 9 (SIGKILL) received by PID {process}' in launch.errors()
    assert 'lm_human_preferences' not in launch.errors(), 'the traceback of a lost connection'
    launch.assert_checkpoint_is_intact()


def test_killed_torchrun(tmp_path):
    launch = start_job(tmp_path, 'wait', started_by=TORCHRUN)
    launch.reach_line('2 ranks wait for ever')
    launch.process.kill()
    assert_ended(launch)


def test_stopped_ranks_under_srun(tmp_path):
    """Rank 1 of a job for less time than is allowed, and for more; rank 0 of another, which keeps
    the store, for more. Both at the same time, as this is mostly waiting."""
    first, second = (
        start_by_slurm(tmp_path / name, 'wait_for_life') for name in ('first', 'second')
    )
    for ranks in first, second:
        ranks[0].reach_line('2 ranks wait for ever')
    stopped = first[1].process
    stopped.send_signal(signal.SIGSTOP)
    time.sleep(5)
    stopped.send_signal(signal.SIGCONT)
    time.sleep(6)
    assert first[0].process.poll() is None, first[0].errors()
    stopped.send_signal(signal.SIGSTOP)
    second[0].process.send_signal(signal.SIGSTOP)
    assert_noticed(
        first[0],
        f'rank 1, process {stopped.pid} on \\S+, has given no sign of life for 10 s: it is stopped,'
        ' or its host is gone',
    )
    assert_noticed(
        second[1],
        'rank 1 has had no answer for 10 s from the host of rank 0, or of torchrun: it is gone'
        ' or stopped',
    )
    for launch in first[1], second[0]:
        # Killed by the other, which is on the same host.
        assert launch.wait(END) == -signal.SIGKILL


def assert_noticed(launch, error):
    """The rank ends by itself, with this error, a regular expression."""
    assert launch.wait(10 + END) == 1
    assert re.fullmatch(f'error: {error}; see --run.rank_timeout', launch.errors())


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
    assert_ended(launch)
    assert re.search(launch.saved_step(), launch.errors())
    assert not (launch.run / 'lock').exists()
    launch.assert_checkpoint_is_intact()
