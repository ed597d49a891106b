"""Launch of this process, found from variables that launchers set (docs/clusters.md)."""

import os
import re
from typing import NamedTuple

# Ports for Slurm jobs: above those of services, below those of outgoing connections.
_FIRST_PORT, _PORT_COUNT = 10240, 20480
# Variables that torch.distributed reads by env://. torchrun sets them, and so do Azure ML and
# operators of Kubernetes without torchrun.
_TORCH_VARIABLES = ('RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT')


class Family(NamedTuple):
    """MPI libraries that are compatible with each other, and the name that programs link to."""

    name: str
    soname: str


MPICH = Family('MPICH', 'libmpi.so.12')
OPEN_MPI = Family('Open MPI', 'libmpi.so.40')


class Launch(NamedTuple):
    """Launch of this process, as one of `size` ranks or alone."""

    launcher: str = 'none'
    size: int = 1
    rank: int = 0  # from 0
    family: Family | None = MPICH  # MPI by which ranks meet; None: they meet without MPI

    @property
    def decides_size(self) -> bool:
        """Return whether the launcher has set the number of ranks, even if it is 1."""
        return self.size > 1 or self.launcher == 'torchrun'

    @property
    def was_restarted(self) -> bool:
        """Return whether torchrun or Slurm restarted this job after it failed or was requeued."""
        return _number('TORCHELASTIC_RESTART_COUNT') > 0 or _number('SLURM_RESTART_COUNT') > 0

    @property
    def is_first_on_host(self) -> bool:
        """Return whether this is the first rank of its host, as far as the launcher says."""
        own = ('OMPI_COMM_WORLD_LOCAL_RANK', 'MPI_LOCALRANKID', 'SLURM_LOCALID', 'LOCAL_RANK')
        return _number(*own) == 0


class Endpoint(NamedTuple):
    """Address of the store where ranks meet. job: prefix of its keys, new at each restart."""

    address: str
    port: int
    job: str


def current() -> Launch:
    """Return how this process was launched; a launcher may have been started by another."""
    is_torch = all(os.environ.get(name) for name in _TORCH_VARIABLES)
    by_torch = Launch('torchrun', _number('WORLD_SIZE'), _number('RANK'), family=None)
    # torchrun may itself be started by mpiexec or srun, once on each host.
    if is_torch and 'TORCHELASTIC_RUN_ID' in os.environ:
        return by_torch
    for family, prefix in ((OPEN_MPI, 'OMPI_COMM_WORLD'), (MPICH, 'PMI')):
        size = _number(f'{prefix}_SIZE')
        if size:  # `srun --mpi=pmi2` sets the variables of MPICH, too
            return Launch(f'mpiexec of {family.name}', size, _number(f'{prefix}_RANK'), family)
    if is_torch:
        return by_torch
    size = _number('SLURM_STEP_NUM_TASKS')
    if size <= 1:
        return Launch()
    family = OPEN_MPI if 'PMIX_RANK' in os.environ else None
    return Launch('srun', size, _number('SLURM_PROCID'), family)


def endpoint() -> Endpoint:
    """Return where ranks without MPI meet; under srun the port depends on job and step."""
    address, port = os.environ.get('MASTER_ADDR', ''), _number('MASTER_PORT')
    if current().launcher != 'srun':
        run = os.environ.get('TORCHELASTIC_RUN_ID', 'job')
        return Endpoint(address, port, f'{run}/{_number("TORCHELASTIC_RESTART_COUNT")}')
    job, step = _number('SLURM_JOB_ID'), _number('SLURM_STEP_ID')
    port = port or _FIRST_PORT + (job * 31 + step) % _PORT_COUNT
    if os.environ.get('SLURM_STEP_NUM_NODES') == '1':
        address = '127.0.0.1'  # a host need not know its own name
    address = address or first_host(os.environ['SLURM_STEP_NODELIST'])
    return Endpoint(address, port, f'slurm-{job}.{step}.{_number("SLURM_RESTART_COUNT")}')


def first_host(hosts: str) -> str:
    """Return the first host of Slurm's list, such as 'node07' of 'node[07-12,30],login'."""
    first = re.findall(r'(?:\[[^\]]*\]|[^,\[])+', hosts)[0]
    return re.sub(r'\[([^,\]-]*)[^\]]*\]', r'\1', first)


def _number(*variables: str) -> int:
    """Return the value of the first environment variable that is a whole number, else 0."""
    for name in variables:
        value = os.environ.get(name, '')
        if value.isdecimal():
            return int(value)
    return 0
