"""Launch of ranks: find the launcher of this process, or start an mpiexec for `--mpi N`."""

import os
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import NamedTuple, NoReturn

from lm_human_preferences.errors import UserError

# Ports for Slurm jobs lie above the ports of services, below those of outgoing connections.
_FIRST_PORT, _PORT_COUNT = 10240, 20480
# Environment variables of torch.distributed, set by torchrun, Azure ML and Kubernetes operators
_TORCH_VARIABLES = ('RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT')
TERMINAL = 'LMHP_TERMINAL'  # environment variable: whether the ranks' output goes to a terminal
# Ranks of our own mpiexec must not inherit other launchers' variables with these prefixes.
_OF_OTHER_LAUNCHERS = ('OMPI_COMM_WORLD_', 'PMI_', 'PMIX_')
# Options of mpiexec that start all ranks on this host, whatever hosts a batch system offers
_HERE = ('-rmk', 'user', '-launcher', 'fork')


class Family(NamedTuple):
    """Family of compatible MPI libraries. soname: the library name that programs link to."""

    name: str
    soname: str


MPICH = Family('MPICH', 'libmpi.so.12')
OPEN_MPI = Family('Open MPI', 'libmpi.so.40')


class Launch(NamedTuple):
    """Launch of this process, as one of `size` ranks or alone."""

    launcher: str = 'none'
    size: int = 1
    rank: int = 0  # number of this process among the ranks, from 0
    family: Family | None = MPICH  # MPI library that connects the ranks; None: no MPI

    @property
    def decides_size(self) -> bool:
        """Return whether the launcher has set the number of ranks, even if it is 1."""
        return self.size > 1 or self.launcher == 'torchrun'

    @property
    def was_restarted(self) -> bool:
        """Return whether torchrun or Slurm restarted this job after it failed or was requeued."""
        return _number('TORCHELASTIC_RESTART_COUNT') > 0 or _number('SLURM_RESTART_COUNT') > 0


class Endpoint(NamedTuple):
    """Address of the ranks' key-value store. All keys begin with `job`, which a restart changes."""

    address: str
    port: int
    job: str


def current() -> Launch:
    """Return how this process was launched, according to its environment variables."""
    is_torch = all(os.environ.get(name) for name in _TORCH_VARIABLES)
    # torchrun may itself be started by mpiexec or srun, once on each host.
    if is_torch and 'TORCHELASTIC_RUN_ID' in os.environ:
        return _by_torch()
    for family, prefix in ((OPEN_MPI, 'OMPI_COMM_WORLD'), (MPICH, 'PMI')):
        size = _number(f'{prefix}_SIZE')
        if size:  # set by mpiexec, or by `srun --mpi=pmi2` with MPICH
            return Launch(f'mpiexec of {family.name}', size, _number(f'{prefix}_RANK'), family)
    if is_torch:
        return _by_torch()
    size = _number('SLURM_STEP_NUM_TASKS')
    if size <= 1:
        return Launch()
    family = OPEN_MPI if 'PMIX_RANK' in os.environ else None
    return Launch('srun', size, _number('SLURM_PROCID'), family)


def _by_torch() -> Launch:
    """Return the launch that torch.distributed's variables describe; UserError if invalid."""
    size, rank = _number('WORLD_SIZE'), _number('RANK')
    if rank >= size:
        raise UserError(f'RANK is {rank}, but must be below WORLD_SIZE, {size}')
    return Launch('torchrun', size, rank, family=None)


def endpoint() -> Endpoint:
    """Return the address where ranks meet without MPI; under srun, the port depends on the job."""
    address, port = os.environ.get('MASTER_ADDR', ''), _number('MASTER_PORT')
    if current().launcher == 'srun':
        step, restarts = _number('SLURM_STEP_ID'), _number('SLURM_RESTART_COUNT')
        number = _number('SLURM_JOB_ID')
        port = port or _FIRST_PORT + (number * 31 + step) % _PORT_COUNT
        if os.environ.get('SLURM_STEP_NUM_NODES') == '1':
            address = '127.0.0.1'  # a host may be unable to resolve its own name
        address = address or first_host(os.environ['SLURM_STEP_NODELIST'])
        job = f'slurm-{number}.{step}.{restarts}'
    else:
        run = os.environ.get('TORCHELASTIC_RUN_ID', 'job')
        job = f'{run}/{_number("TORCHELASTIC_RESTART_COUNT")}'
    if not 0 < port < 1 << 16:
        raise UserError(f'MASTER_PORT must be from 1 to 65535, not {port}')
    return Endpoint(address, port, job)


def local_rank() -> int:
    """Return this rank's number on its host; 0 if the launcher does not say."""
    return _number('OMPI_COMM_WORLD_LOCAL_RANK', 'MPI_LOCALRANKID', 'SLURM_LOCALID', 'LOCAL_RANK')


def first_host(hosts: str) -> str:
    """Return the first host of Slurm's list, such as 'node07' of 'node[07-12,30],login'."""
    first = re.findall(r'(?:\[[^\]]*\]|[^,\[])+', hosts)[0]
    return re.sub(r'\[([^,\]-]*)[^\]]*\]', r'\1', first)


def _number(*variables: str) -> int:
    """Return the whole number in the first of `variables` that is set; 0 if none is."""
    for name in variables:
        value = os.environ.get(name)
        if value and not value.isdecimal():
            raise UserError(f'{name} must be a whole number, not {value!r}')
        if value:
            return int(value)
    return 0


def become_mpiexec(size: int) -> NoReturn:
    """Replace this process by mpiexec, which runs the same command on `size` ranks of this host."""
    is_terminal = sys.stdout.isatty() and sys.stderr.isatty()
    variables = rank_environment()
    variables[TERMINAL] = str(is_terminal)
    if is_terminal:  # ranks write into pipes, and cannot find out the terminal's width
        columns = shutil.get_terminal_size().columns
        variables.update(COLUMNS=str(columns), TQDM_NCOLS=str(columns - 1))
    words = [*mpiexec_words(size), sys.executable, *sys.orig_argv[1:]]
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # mpiexec warns if it inherits an ignored SIGPIPE
    # mpiexec reads /dev/null, because a terminal stops background programs that read from it.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.execve(words[0], words, variables)


def mpiexec_words(size: int) -> list[str]:
    """Return the words of an mpiexec command for `size` ranks, without the ranks' own command."""
    mpiexec = Path(sys.executable).with_name('mpiexec')
    if not mpiexec.exists():
        raise UserError(
            'no mpiexec to start ranks with: `sh tools/setup.sh` installs one, or use --mpi 1'
        )
    return [str(mpiexec), *_HERE, '-n', str(size)]


def rank_environment() -> dict[str, str]:
    """Return the environment variables for mpiexec and its ranks."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith(_OF_OTHER_LAUNCHERS)}
    # UCX would listen on other networks by default, but all ranks are on this host.
    variables.setdefault('UCX_NET_DEVICES', 'lo')
    return variables
