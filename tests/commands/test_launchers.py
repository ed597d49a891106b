"""Real launchers: Open MPI's mpiexec, and srun of a cluster of Slurm that is this machine, with
MPI and without.

Our own launcher and MPICH's mpiexec: test_ranks.py, test_engines.py. torchrun: test_torchrun.py.
What happens when ranks die: tests/faults/test_launcher_kill.py.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import real_launchers
from engines import COMMUNICATION, on_mpi_command
from launched import CONSOLE, REPOSITORY

from lm_human_preferences.checkpointing.tf_bundle import Bundle
from lm_human_preferences.distributed.libraries import horovod_build, mpi_library

pytestmark = pytest.mark.slow
TIMEOUT_SECONDS = 600  # an idle machine needs a tenth of it
SHORT = (
    '--ppo.total_episodes=128',
    '--rewards.train_new_model=off',
    '--rewards.trained_model=test',
)
OF_OPEN_MPI = ['mpiexec of Open MPI', 'srun by PMIx']
OF_MPICH = ['mpiexec of MPICH', 'srun by PMI2']
by_launcher = pytest.mark.parametrize('name', real_launchers.INSTALLED)


@by_launcher
def test_engines(name, request):
    """Each engine that these ranks can average by."""
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
    """A training of two steps."""
    command = [REPOSITORY / 'launch.py', 'train_policy', 'test', 'run', f'--save_dir={directory}']
    run = real_launchers.run(
        launcher, [*command, *CONSOLE, *SHORT, *words], cwd=directory, timeout=TIMEOUT_SECONDS
    )
    print(run.stdout, run.stderr)
    return run


def parameters_of(directory):
    """{name: bytes} of the policy at the end of `train`."""
    bundle = Bundle(str(directory / 'run/policy/checkpoints/model.ckpt-2'))
    return {name: bundle[name].tobytes() for name in bundle if name.startswith('policy/')}


@pytest.fixture(scope='module')
def parameters(request, tmp_path_factory):
    """What two ranks of MPICH's mpiexec learn with the engine `torch`."""
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


def errors_of(run):
    return [line for line in run.stderr.splitlines() if line.startswith('error: ')]


@by_launcher
def test_a_wrong_option_is_told_once(name, request, tmp_path):
    """Though srun, when the first rank has ended, ends the others by a signal: its status is that
    of such a signal if another rank had not come as far as the options."""
    run = train(real_launchers.find(name, request), tmp_path, '--ppo.batch=8')
    by_signal = {128 + signal.SIGTERM} if name.startswith('srun') else set()
    assert run.returncode in {2} | by_signal
    assert errors_of(run) == ['error: no such option: --ppo.batch (did you mean --ppo.batch_size?)']


def test_horovod_for_another_mpi_is_refused(request, tmp_path):
    """Before it is loaded, which would crash."""
    built = horovod_build.mpi_of_build()
    if built is None:
        pytest.skip('Horovod is not installed')
    of_another_mpi = OF_MPICH if built == mpi_library.OPEN_MPI.soname else OF_OPEN_MPI
    name = of_another_mpi[0]
    launcher = real_launchers.find(name, request)
    run = train(launcher, tmp_path, '--run.allreduce=horovod')
    assert run.returncode == 2
    build = 'MPI=openmpi sh tools/horovod.sh' if name in OF_OPEN_MPI else 'sh tools/horovod.sh'
    assert (
        'error: --run.allreduce horovod: Horovod was built against'
        f' {mpi_library.family_of(built).name} ({built}), and the ranks speak {launcher.mpi.name}:'
        f' compile it by `{build}`, or take auto'
    ) in run.stderr.splitlines()
    assert 'Traceback' not in run.stderr


def hidden(path):
    """A command in front of another, which then finds an empty file at `path`.

    It has a namespace of mounts of its own, where an empty file lies over the library.
    """
    script = f'mount --bind /dev/null {path} && exec "$@"'
    return ['unshare', '--mount', '--propagation=private', 'sh', '-c', script, 'sh']


def can_hide():
    run = subprocess.run([*hidden(__file__), 'true'], capture_output=True)
    return run.returncode == 0


@pytest.mark.parametrize('name', OF_MPICH + OF_OPEN_MPI)
def test_no_library_for_the_launcher(name, request, tmp_path):
    """One line with the fix, status 2, within 10 seconds, and nothing of what MPI would say."""
    if not can_hide():
        pytest.skip('this process cannot hide a file from ranks: no mount namespaces')
    launcher = real_launchers.find(name, request)
    if name in OF_OPEN_MPI:
        library = loaded_by(launcher)
    else:
        library = Path(sys.prefix, 'lib', mpi_library.MPICH.soname).resolve()
    python = [*hidden(library), sys.executable]
    command = [REPOSITORY / 'launch.py', 'train_policy', 'test', 'run', f'--save_dir={tmp_path}']
    # Else srun ends the second rank where the first has ended a moment before.
    started_by = [word for word in launcher.command if word != '--kill-on-bad-exit']
    run = subprocess.run(
        [*started_by, *python, *command],
        env={**os.environ, **launcher.variables},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 2, run.stderr
    (error,) = errors_of(run)
    sruns = {'srun by PMI2': 'srun --mpi=pmi2', 'srun by PMIx': 'srun --mpi=pmix'}
    default = f"{launcher.mpi.name}'s mpiexec"
    assert error.startswith(f'error: {sruns.get(name, default)} started these ranks, but ')
    assert 'unsupported PMI' not in run.stderr
    assert not (tmp_path / 'run').exists()


def loaded_by(launcher):
    """The library of MPI that ranks of a launcher load."""
    code = (
        'from lm_human_preferences.distributed.libraries import mpi_library as library;'
        'library.load_mpi(); print(library.announcement())'
    )
    run = real_launchers.run(launcher, ['-c', code], timeout=60, cwd=REPOSITORY)
    # Both ranks print it, maybe into one line.
    return re.search(r'/\S*libmpi\.so[.\d]*', run.stdout)[0]
