"""Real launchers: Open MPI's mpiexec, and srun of a Slurm cluster of this machine."""

import signal

import pytest
import real_launchers
from engines import COMMUNICATION, on_mpi_command
from launched import CONSOLE, REPOSITORY

from lm_human_preferences.checkpointing.tf_bundle import Bundle

pytestmark = pytest.mark.slow
TIMEOUT_SECONDS = 600  # an idle machine needs a tenth of it
SHORT = (
    '--ppo.total_episodes=128',
    '--rewards.train_new_model=off',
    '--rewards.trained_model=test',
)
OF_OPEN_MPI = ['mpiexec of Open MPI', 'srun by PMIx']
by_launcher = pytest.mark.parametrize('name', real_launchers.INSTALLED)


@by_launcher
def test_engines(name, request):
    launcher = real_launchers.find(name, request)
    engines = launcher.engines()
    _, *command = on_mpi_command(COMMUNICATION, *engines)
    run = real_launchers.run(launcher, command, timeout=TIMEOUT_SECONDS)
    assert run.returncode == 0, run.stdout + run.stderr
    lines = run.stdout.splitlines()
    announced = [line for line in lines if line.startswith('2 ranks, averaging by ')]
    assert [line.split()[4].rstrip(';') for line in announced] == engines
    for line in announced:
        assert ('; MPI: Open MPI ' in line) == (name in OF_OPEN_MPI), line
    passed = [line for line in lines if line.startswith('{')]
    assert len(passed) == 2 * len(engines)


def train(launcher, directory, *words):
    command = [REPOSITORY / 'launch.py', 'train_policy', 'test', 'run', f'--save_dir={directory}']
    run = real_launchers.run(
        launcher, [*command, *CONSOLE, *SHORT, *words], cwd=directory, timeout=TIMEOUT_SECONDS
    )
    print(run.stdout, run.stderr)
    return run


def parameters_of(directory):
    bundle = Bundle(str(directory / 'run/policy/checkpoints/model.ckpt-2'))
    return {name: bundle[name].tobytes() for name in bundle if name.startswith('policy/')}


@pytest.fixture(scope='module')
def parameters(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp('mpich')
    run = train(
        real_launchers.find('mpiexec of MPICH', request), directory, '--run.allreduce=torch'
    )
    assert run.returncode == 0
    return parameters_of(directory)


@pytest.mark.parametrize('name', ['mpiexec of Open MPI', 'srun without MPI'])
def test_the_same_seed_gives_the_same_parameters(name, request, tmp_path, parameters):
    """To the bit, by another MPI and by none, with the same engine."""
    run = train(real_launchers.find(name, request), tmp_path, '--run.allreduce=torch')
    assert run.returncode == 0
    assert parameters and parameters_of(tmp_path) == parameters


@by_launcher
def test_a_wrong_option_is_told_once(name, request, tmp_path):
    """Though srun, when the first rank has ended, ends the others by a signal: its status is that
    of such a signal if another rank had not come as far as the options."""
    run = train(real_launchers.find(name, request), tmp_path, '--ppo.batch=8')
    by_signal = {128 + signal.SIGTERM} if name.startswith('srun') else set()
    assert run.returncode in {2} | by_signal
    errors = [line for line in run.stderr.splitlines() if line.startswith('error: ')]
    assert errors == ['error: no such option: --ppo.batch (did you mean --ppo.batch_size?)']
