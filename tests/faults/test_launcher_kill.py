"""A killed rank and SIGTERM under the launchers that a machine has installed: Open MPI's mpiexec,
and srun.

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


@pytest.fixture
def training(name, request, tmp_path):
    """Two ranks that have done some steps, and their launcher."""
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


def assert_ended(launch):
    """With an error status, nothing left running, and the last checkpoint whole."""
    since = time.monotonic()
    assert launch.wait(END) != 0
    launch.assert_nothing_left(since + END - time.monotonic())
    bundle = Bundle(checkpoints.latest(launch.run / 'policy' / 'checkpoints'))
    assert {name: bundle[name].shape for name in bundle}['policy/model/wte'] == (27, 7)


@pytest.mark.parametrize('name', ['mpiexec of Open MPI', 'srun by PMI2'])
def test_killed_rank(training):
    _, launch = training
    os.kill(launch.ranks()[1], signal.SIGKILL)
    assert_ended(launch)
    assert 'Traceback' not in launch.errors()


def assert_saved(launch):
    """The step that was being done, by a run that has ended in good order."""
    saved = re.search(r'Step (\d+) of the policy is saved; to go on', launch.errors())
    assert saved, launch.errors()
    latest = checkpoints.latest(launch.run / 'policy' / 'checkpoints')
    assert latest.endswith(f'model.ckpt-{saved[1]}')
    assert not (launch.run / 'lock').exists()


@pytest.mark.parametrize('name', ['mpiexec of Open MPI', 'srun by PMIx'])
def test_sigterm(training):
    """The step is finished and saved."""
    launcher, launch = training
    real_launchers.send_sigterm(launcher, launch)
    assert_ended(launch)
    if launcher.passes_sigterm:
        assert_saved(launch)


@pytest.mark.parametrize('name', ['mpiexec of MPICH'])
def test_sigterm_to_a_rank(training):
    """The file `lock` names it. So the step is saved where SIGTERM to the launcher ends all at
    once."""
    _, launch = training
    rank = re.match(r'process (\d+) on ', (launch.run / 'lock').read_text())
    os.kill(int(rank[1]), signal.SIGTERM)
    assert launch.wait(END) == 130
    launch.assert_nothing_left(END)
    assert_saved(launch)
    assert 'Traceback' not in launch.errors()
