"""Ranks of torchrun that are killed or stopped, and torchrun itself: nothing hangs or stays behind.

benchmarks/launchers.py does the same many times, under every launcher.
"""

import os
import re
import signal
import time

import pytest
from launched import FOREVER, TORCHRUN, Launch, eventually, start_by_slurm, start_job

from lm_human_preferences.checkpointing import checkpoints
from lm_human_preferences.checkpointing.tf_bundle import Bundle

pytestmark = pytest.mark.slow
END = 20  # seconds in which everything has to end
SMALL = (
    '--rewards.train_new_model.labels.num_train=64',
    '--rewards.train_new_model.normalize_samples=16',
)


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


def assert_checkpoint_is_intact(launch):
    """The last one, and every checksum in it."""
    bundle = Bundle(checkpoints.latest(launch.run / 'policy' / 'checkpoints'))
    assert {name: bundle[name].shape for name in bundle}['policy/model/wte'] == (27, 7)


def test_killed_rank(tmp_path):
    launch = train(tmp_path)
    launch.reach(3)
    process = launch.ranks()[1]
    os.kill(process, signal.SIGKILL)
    assert_ended(launch)
    assert f'traceback : Signal 9 (SIGKILL) received by PID {process}' in launch.errors()
    assert 'lm_human_preferences' not in launch.errors(), 'the traceback of a lost connection'
    assert_checkpoint_is_intact(launch)


def test_killed_torchrun(tmp_path):
    launch = start_job(tmp_path, 'wait', started_by=TORCHRUN)
    launch.reach_line('2 ranks wait for ever')
    launch.process.kill()
    assert_ended(launch)


@pytest.mark.parametrize('stopped', [0, 1])
def test_stopped_rank_under_srun(tmp_path, stopped):
    """For less time than is allowed, and for more; rank 0, which keeps the store, for more."""
    ranks = start_by_slurm(tmp_path, 'wait_for_life')
    ranks[0].reach_line('2 ranks wait for ever')
    process = ranks[stopped].process
    if stopped == 1:
        process.send_signal(signal.SIGSTOP)
        time.sleep(5)
        process.send_signal(signal.SIGCONT)
        time.sleep(6)
    process.send_signal(signal.SIGSTOP)
    other = ranks[1 - stopped]
    assert other.wait(10 + END) == 1
    told = (
        f'rank 1, process {process.pid} on \\S+, has given no sign of life for 10 s: it is stopped,'
        ' or its host is gone'
        if stopped
        else 'rank 1 has had no answer for 10 s from the host of rank 0, or of torchrun: it is gone'
        ' or stopped'
    )
    assert re.fullmatch(f'error: {told}; see --run.rank_timeout', other.errors())
    # Killed by the other, which is on the same host.
    assert ranks[stopped].wait(END) == -signal.SIGKILL


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
    assert_checkpoint_is_intact(launch)
