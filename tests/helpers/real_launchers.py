"""The launchers that people have: how each starts two ranks here, or why it cannot."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field

import engines
import pytest
import slurm_cluster
from launched import MPIEXEC, ROOT_MAY, TORCHRUN

from lm_human_preferences.distributed import launcher
from lm_human_preferences.distributed.mpi_library import MPICH, OPEN_MPI, Family


class Missing(Exception):
    """This machine has not what a launcher needs."""


@dataclass(frozen=True)
class Launcher:
    """command: what comes before that of the ranks. words: what their training is told besides.
    mpi: what the ranks speak, if they speak MPI. variables: of its environment."""

    command: tuple[str, ...]
    mpi: Family | None = None
    words: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    cluster: slurm_cluster.Cluster | None = None

    def engines(self) -> list[str]:
        """Those that its ranks can average by in this environment."""
        return engines.available_engines(self.mpi)


def our_launcher(cluster):
    require_own_mpiexec()
    return Launcher((), MPICH, words=('--mpi=2',))


def mpich(cluster):
    require_own_mpiexec()
    return Launcher((str(MPIEXEC), '-n', '2'), MPICH)


def open_mpi(cluster):
    command = (open_mpi_mpiexec(), '--oversubscribe', '-n', '2')
    return Launcher(command, OPEN_MPI, variables=ROOT_MAY)


def srun_by_pmi2(cluster):
    return srun('pmi2', MPICH, cluster)


def srun_by_pmix(cluster):
    open_mpi_mpiexec()
    started_by = srun('pmix', OPEN_MPI, cluster)
    if not started_by.cluster.speaks_pmix:
        raise Missing('Slurm does not find its library of PMIx: apt install libpmix-dev')
    return started_by


def srun_without_mpi(cluster):
    return srun('none', None, cluster)


def torchrun(cluster):
    return Launcher(TORCHRUN)


# Of each launcher the function that makes it from a function that returns a running Slurm, or
# raises Missing. A further launcher is one entry here.
LAUNCHERS = {
    'our launcher': our_launcher,
    'mpiexec of MPICH': mpich,
    'mpiexec of Open MPI': open_mpi,
    'srun by PMI2': srun_by_pmi2,
    'srun by PMIx': srun_by_pmix,
    'srun without MPI': srun_without_mpi,
    'torchrun': torchrun,
}
# pip brings the others.
INSTALLED = ['mpiexec of Open MPI', 'srun by PMI2', 'srun by PMIx', 'srun without MPI']


def find(name: str, request) -> Launcher:
    """The launcher for a test, which skips with the reason if there is none. request: pytest's."""
    try:
        return LAUNCHERS[name](lambda: request.getfixturevalue('slurm'))
    except Missing as missing:
        pytest.skip(str(missing))


def require_own_mpiexec():
    if not MPIEXEC.exists():
        raise Missing('this environment has no mpiexec of its own')


def open_mpi_mpiexec() -> str:
    """The path of the first mpiexec of Open MPI on the PATH; MPICH's may come before it."""
    for folder in os.get_exec_path():
        for name in ('mpiexec', 'mpirun', 'mpiexec.openmpi'):
            path = shutil.which(name, path=folder)
            if path is not None and launcher.is_of_open_mpi(path):
                return path
    raise Missing('there is no mpiexec of Open MPI: apt install openmpi-bin')


def srun(mpi: str, family: Family | None, cluster) -> Launcher:
    reason = slurm_cluster.why_not()
    if reason:
        raise Missing(reason)
    command = ('srun', '--quiet', '--kill-on-bad-exit', f'--mpi={mpi}', '--ntasks=2')
    running = cluster()
    return Launcher(command, family, variables=running.variables, cluster=running)


def run(started_by: Launcher, command, **settings) -> subprocess.CompletedProcess[str]:
    """A Python command on two ranks of a launcher, which has ended."""
    return subprocess.run(
        [*started_by.command, sys.executable, *map(str, command)],
        env={**os.environ, 'OMP_NUM_THREADS': '1', **started_by.variables},
        capture_output=True,
        text=True,
        **settings,
    )
