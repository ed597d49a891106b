"""The launchers of MPI that people have: how each starts two ranks here, or why it cannot."""

import functools
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field

import pytest
from launched import MPIEXEC, ROOT_MAY

# Each with the engines that fit it: Horovod is compiled against MPICH here.
ENGINES = {
    'mpiexec of MPICH': ('horovod', 'torch', 'mpi'),
    'mpiexec of Open MPI': ('torch', 'mpi'),
    'srun by PMI2': ('horovod', 'torch', 'mpi'),
    'srun by PMIx': ('torch', 'mpi'),
}
OTHERS = [name for name in ENGINES if name != 'mpiexec of MPICH']  # than the one that pip brings


@dataclass(frozen=True)
class Launcher:
    """command: what comes before that of the ranks. variables: of its environment."""

    name: str
    command: tuple[str, ...]
    variables: dict[str, str] = field(default_factory=dict)
    cluster: object = None


@functools.cache
def open_mpi():
    """The path of Open MPI's mpiexec; None if there is none."""
    for name in ('mpiexec.openmpi', 'mpiexec', 'mpirun'):
        path = shutil.which(name)
        if path is not None:
            version = subprocess.run([path, '--version'], capture_output=True, text=True).stdout
            if 'Open MPI' in version or 'OpenRTE' in version:
                return path
    return None


def find(name, request):
    """The Launcher of that name; where this machine has none, the test skips with the reason.

    request: pytest's, by which a cluster of Slurm is had.
    """
    if name == 'mpiexec of MPICH':
        if not MPIEXEC.exists():
            pytest.skip('this environment has no mpiexec of its own')
        return Launcher(name, (str(MPIEXEC), '-n', '2'))
    if name == 'mpiexec of Open MPI':
        path = open_mpi()
        if path is None:
            pytest.skip('there is no mpiexec of Open MPI: apt install openmpi-bin')
        return Launcher(name, (path, '--oversubscribe', '-n', '2'), ROOT_MAY)
    cluster = request.getfixturevalue('slurm')
    mpi = 'pmi2' if name == 'srun by PMI2' else 'pmix'
    if mpi == 'pmix':
        if not cluster.speaks_pmix:
            pytest.skip('Slurm does not find its library of PMIx: apt install libpmix-dev')
        if open_mpi() is None:
            pytest.skip('srun by PMIx starts Open MPI: apt install openmpi-bin')
    command = ('srun', '--quiet', '--kill-on-bad-exit', f'--mpi={mpi}', '--ntasks=2')
    return Launcher(name, command, cluster.variables, cluster)


def run(launcher, command, **settings):
    """A Python command on two ranks of a launcher, which has ended."""
    return subprocess.run(
        [*launcher.command, sys.executable, *command],
        env={**os.environ, 'OMP_NUM_THREADS': '1', **launcher.variables},
        capture_output=True,
        text=True,
        **settings,
    )
