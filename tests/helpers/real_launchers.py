"""The launchers that people have: how each starts ranks here, or why it cannot."""

import functools
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field

import engines
import launched
import pytest
import slurm_cluster
from launched import MPIEXEC, ROOT_MAY

from lm_human_preferences.distributed.launch_methods import MPICH, OPEN_MPI, Family


class Missing(Exception):
    """This machine has not what a launcher needs."""


@dataclass(frozen=True)
class Launcher:
    """command: what comes before `python launch.py`. words: options of launch.py. starter: what
    comes before other programs, if that differs. mpi: what the ranks speak, if they speak MPI.
    variables: of its environment."""

    command: tuple[str, ...]
    mpi: Family | None = None
    words: tuple[str, ...] = ()
    starter: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    cluster: slurm_cluster.Cluster | None = None

    def engines(self) -> list[str]:
        """Those that its ranks can average by in this environment."""
        return engines.available_engines(self.mpi)


def our_launcher(cluster, ranks=2):
    starter = mpich(cluster, ranks).command
    return Launcher((), MPICH, words=(f'--mpi={ranks}',), starter=starter)


def mpich(cluster, ranks=2):
    if not MPIEXEC.exists():
        raise Missing('this environment has no mpiexec of its own')
    return Launcher((str(MPIEXEC), '-n', str(ranks)), MPICH)


def open_mpi(cluster, ranks=2):
    mpiexec = open_mpi_mpiexec()
    return Launcher((mpiexec, '--oversubscribe', '-n', str(ranks)), OPEN_MPI, variables=ROOT_MAY)


def srun_by_pmi2(cluster, ranks=2):
    return srun('pmi2', MPICH, cluster, ranks)


def srun_by_pmix(cluster, ranks=2):
    open_mpi_mpiexec()
    started_by = srun('pmix', OPEN_MPI, cluster, ranks)
    if not started_by.cluster.speaks_pmix:
        raise Missing('Slurm does not find its library of PMIx: apt install libpmix-dev')
    return started_by


def srun_without_mpi(cluster, ranks=2):
    return srun('none', None, cluster, ranks)


def torchrun(cluster, ranks=2):
    return Launcher(launched.torchrun(ranks))


# Of each launcher the function that makes it, or raises Missing, from a function that returns a
# running Slurm and a number of ranks. A further launcher is one entry here.
LAUNCHERS = {
    'our launcher': our_launcher,
    'mpiexec of MPICH': mpich,
    'mpiexec of Open MPI': open_mpi,
    'srun by PMI2': srun_by_pmi2,
    'srun by PMIx': srun_by_pmix,
    'srun without MPI': srun_without_mpi,
    'torchrun': torchrun,
}


def find(name: str, request) -> Launcher:
    """The launcher for a test, which skips with the reason if there is none. request: pytest's."""
    try:
        return LAUNCHERS[name](lambda: request.getfixturevalue('slurm'))
    except Missing as missing:
        pytest.skip(str(missing))


@functools.cache
def open_mpi_mpiexec() -> str:
    """The path of the first mpiexec of Open MPI on the PATH; MPICH's may come before it."""
    for folder in os.get_exec_path():
        for name in ('mpiexec', 'mpirun', 'mpiexec.openmpi'):
            path = shutil.which(name, path=folder)
            if path is not None and 'open-mpi' in launched.output_of([path, '--version']).lower():
                return path
    raise Missing('there is no mpiexec of Open MPI: apt install openmpi-bin')


def srun(mpi: str, family: Family | None, cluster, ranks) -> Launcher:
    reason = slurm_cluster.why_not()
    if reason:
        raise Missing(reason)
    command = ('srun', '--quiet', '--kill-on-bad-exit', f'--mpi={mpi}', f'--ntasks={ranks}')
    running = cluster()
    return Launcher(command, family, variables=running.variables, cluster=running)


def send_sigterm(started_by: Launcher, launch) -> None:
    """To what `started_by` has started; Slurm sends it to the ranks, as at a time limit."""
    if started_by.cluster is None:
        launch.process.terminate()
        return
    (job,) = {env.get('SLURM_JOB_ID') for env in launch.processes().values()} - {None}
    started_by.cluster.run('scancel', '--signal=TERM', job).check_returncode()


def run(
    started_by: Launcher, command, variables=None, **settings
) -> subprocess.CompletedProcess[str]:
    """Run Python code on the ranks of a launcher, with one thread each and more `variables`."""
    return subprocess.run(
        [*(started_by.starter or started_by.command), sys.executable, *map(str, command)],
        env={**os.environ, 'OMP_NUM_THREADS': '1', **started_by.variables, **(variables or {})},
        capture_output=True,
        text=True,
        **settings,
    )
