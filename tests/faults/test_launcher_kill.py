"""A killed rank and SIGTERM under the launchers that are not ours: Open MPI's mpiexec, and srun.

Our own: test_kill.py; torchrun: test_torchrun_kill.py. benchmarks/launchers.py does the same many
times.
"""

import os
import re
import signal
import time

import pytest
import real_launchers
from launched import FOREVER, Launch

from lm_human_preferences.checkpointing import checkpoints
from lm_human_preferences.checkpointing.tf_bundle import Bundle

pytestmark = pytest.mark.slow
END = 20  # seconds in which everything has to end
QUICK_START = ('--rewards.train_new_model=off', '--rewards.trained_model=test')
by_launcher = pytest.mark.parametrize('name', real_launchers.INSTALLED)


@pytest.fixture
def training(name, request, tmp_path):
    """Two ranks that have done some steps, and their launcher."""
    launcher = real_launchers.find(name, request)
    launch = Launch(
        tmp_path, *QUICK_START, *FOREVER, started_by=launcher.command, **launcher.variables
    )
    launch.reach(3)
    return launcher, launch


def assert_ended(launch):
    """With an error status, nothing left running, and the last checkpoint whole."""
    since = time.monotonic()
    assert launch.wait(END) != 0
    launch.assert_nothing_left(since + END - time.monotonic())
    bundle = Bundle(checkpoints.latest(launch.run / 'policy' / 'checkpoints'))
    assert {name: bundle[name].shape for name in bundle}['policy/model/wte'] == (27, 7)


@by_launcher
def test_killed_rank(training):
    _, launch = training
    os.kill(launch.ranks()[1], signal.SIGKILL)
    assert_ended(launch)
    assert 'Traceback' not in launch.errors()


@by_launcher
def test_sigterm(training):
    """The step is finished and saved. Slurm sends the signal to the ranks, as at a time limit."""
    launcher, launch = training
    if launcher.cluster is None:
        launch.process.send_signal(signal.SIGTERM)
    else:
        (job,) = {
            env['SLURM_JOB_ID'] for env in launch.processes().values() if 'SLURM_JOB_ID' in env
        }
        done = launcher.cluster.run('scancel', '--signal=TERM', job)
        assert done.returncode == 0, done.stderr
    assert_ended(launch)
    saved = re.search(r'Step (\d+) of the policy is saved; to go on', launch.errors())
    assert saved, launch.errors()
    latest = checkpoints.latest(launch.run / 'policy' / 'checkpoints')
    assert latest.endswith(f'model.ckpt-{saved[1]}')
    assert not (launch.run / 'lock').exists()
