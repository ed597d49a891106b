"""The launchers that people have: how each starts ranks here, or why it cannot."""

import functools
import os
import shutil
import sys
from dataclasses import dataclass, field, replace

import pytest
import slurm_cluster
from launched import MPIEXEC, ROOT_MAY, Launch, output_of, start_job

from lm_human_preferences.distributed import horovod
from lm_human_preferences.distributed.launch_methods import MPICH, OPEN_MPI, Family

ENGINES = ('torch', 'horovod')


class Missing(Exception):
    """This machine has not what a launcher needs."""


@dataclass(frozen=True)
class Launcher:
    """command: what comes before `python launch.py`. words: options of launch.py. mpi: what the
    ranks speak, if they speak MPI. variables: of its environment. engine: averages gradients."""

    command: tuple[str, ...]
    mpi: Family | None = None
    words: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    cluster: slurm_cluster.Cluster | None = None
    engine: str = 'torch'

    def start_job(self, directory, name, **settings):
        settings = {**self.variables, 'ENGINE': self.engine, **settings}
        return start_job(directory, name, started_by=self.command, **settings)

    def train(self, directory, *words):
        words = (*self.words, f'--run.allreduce={self.engine}', *words)
        return Launch(directory, *words, started_by=self.command, **self.variables)


def available_engines(mpi=MPICH) -> list[str]:
    """Return the engines of ranks that speak `mpi` (None: no MPI)."""
    return [engine for engine in ENGINES if engine == 'torch' or horovod.is_usable(mpi)]


def our_launcher(cluster, ranks=2):
    return replace(mpich(cluster, ranks), command=(), words=(f'--mpi={ranks}',))


def mpich(cluster, ranks=2):
    if not MPIEXEC.exists():
        raise Missing('this environment has no mpiexec of its own')
    return Launcher((str(MPIEXEC), '-n', str(ranks)), MPICH)


def open_mpi(cluster, ranks=2):
    mpiexec = open_mpi_mpiexec()
    return Launcher((mpiexec, '--oversubscribe', '-n', str(ranks)), OPEN_MPI, variables=ROOT_MAY)


@functools.cache
def open_mpi_mpiexec() -> str:
    """Return the first mpiexec of Open MPI on the PATH; MPICH's may come before it."""
    for folder in os.get_exec_path():
        for name in ('mpiexec', 'mpirun', 'mpiexec.openmpi'):
            path = shutil.which(name, path=folder)
            if path is not None and 'open-mpi' in output_of([path, '--version']).lower():
                return path
    raise Missing('there is no mpiexec of Open MPI: apt install openmpi-bin')


def srun(mpi, family, cluster, ranks=2):
    if reason := slurm_cluster.why_not():
        raise Missing(reason)
    command = ('srun', '--quiet', '--kill-on-bad-exit', f'--mpi={mpi}', f'--ntasks={ranks}')
    running = cluster()
    return Launcher(command, family, variables=running.variables, cluster=running)


def srun_by_pmix(cluster, ranks=2):
    open_mpi_mpiexec()
    started_by = srun('pmix', OPEN_MPI, cluster, ranks)
    if not started_by.cluster.speaks_pmix:
        raise Missing('Slurm does not find its library of PMIx: apt install libpmix-dev')
    return started_by


def torchrun(cluster, ranks=2):
    # As the script torchrun; nothing that is imported is garbage to look for.
    program = 'import gc; gc.disable(); from torch.distributed.run import main; main()'
    words = ('--standalone', '--no-python', f'--nproc-per-node={ranks}')
    return Launcher((sys.executable, '-c', program, *words))


# Functions that make a launcher, or raise Missing, from a function that returns a running Slurm,
# and from a number of ranks. A further launcher is one entry here.
LAUNCHERS = {
    'our launcher': our_launcher,
    'mpiexec of MPICH': mpich,
    'mpiexec of Open MPI': open_mpi,
    'srun by PMI2': functools.partial(srun, 'pmi2', MPICH),
    'srun by PMIx': srun_by_pmix,
    'srun without MPI': functools.partial(srun, 'none', None),
    'torchrun': torchrun,
}


def find(name: str, request) -> Launcher:
    """Return a launcher, as 'our launcher' or 'our launcher, horovod', or skip pytest's test."""
    name, _, engine = name.partition(', ')
    try:
        launcher = LAUNCHERS[name](lambda: request.getfixturevalue('slurm'))
        if engine and engine not in available_engines(launcher.mpi):
            raise Missing(f'{engine} is not built for the MPI of these ranks')
    except Missing as missing:
        pytest.skip(str(missing))
    return replace(launcher, engine=engine or 'torch')
