"""Launchers of docs/clusters.md, a class each: rank, number of ranks and where they meet."""

import contextlib
import json
import os
import re
import signal
import time
from typing import NamedTuple

from lm_human_preferences.errors import UserError

# Ports for jobs of Slurm: above those of services, below those that hosts give to outgoing
# connections.
_FIRST_PORT = 10240
_PORT_COUNT = 20480
# What torch.distributed calls env://. torchrun sets them, and so do Azure ML and Kubernetes'
# operators without torchrun.
_TORCH_VARIABLES = ('RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT')
# Variables by which a user decides how OpenMP's threads wait, and how often they look before they
# sleep. With libgomp's default, 3 ms, waiting threads take the processor from those that they wait
# for, if another program computes here, too (benchmarks/README.md).
_WAITING_VARIABLES = ('OMP_WAIT_POLICY', 'GOMP_SPINCOUNT')
SPIN_COUNT = '10000'
_LOCAL_RANK_VARIABLES = ('OMPI_COMM_WORLD_LOCAL_RANK', 'MPI_LOCALRANKID', 'SLURM_LOCALID')


class Family(NamedTuple):
    """MPI libraries that can stand in for each other: programs are linked against `soname`."""

    name: str
    soname: str


MPICH = Family('MPICH', 'libmpi.so.12')
OPEN_MPI = Family('Open MPI', 'libmpi.so.40')


class Endpoint(NamedTuple):
    """Address of the store. job: prefix of the keys of this attempt at the job."""

    address: str
    port: int
    job: str


class LaunchMethod:
    """Base of the launch methods, and that of a process that was started alone."""

    words = 'nothing'  # in messages
    has_mpi = True  # MPI connects the ranks, or those that this process would start
    family: Family | None = None  # of the launcher's MPI; None if unknown
    watches_ranks = False  # the launcher itself notices that a rank is stopped
    # The first that is set counts.
    size_variables: tuple[str, ...] = ()
    rank_variables: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Number of ranks that the launcher has started; 1 without a launcher."""
        size = _first_number(*self.size_variables)
        return 1 if size is None else size

    @property
    def decides_size(self) -> bool:
        """Return whether the launcher has decided how many ranks there are."""
        return self.size > 1

    @property
    def rank(self) -> int:
        """Number of this rank, from 0."""
        if self.size <= 1:
            return 0
        return _first_number(*self.rank_variables) or 0

    @property
    def is_first_on_host(self) -> bool:
        """Return whether this is the first rank that MPI's launcher or srun started on its host."""
        return not _first_number(*_LOCAL_RANK_VARIABLES)

    @property
    def was_restarted(self) -> bool:
        """Return whether torchrun or Slurm started this job again, which had failed or waited."""
        return _restarts_by_torchrun() > 0 or (_first_number('SLURM_RESTART_COUNT') or 0) > 0

    @property
    def keeps_store(self) -> bool:
        """Return whether this process keeps the store of ranks without MPI."""
        return self.rank == 0 and not self.finds_store

    @property
    def finds_store(self) -> bool:
        """Return whether the launcher has made that store before the ranks."""
        return False

    def endpoint(self) -> Endpoint:
        """Return the endpoint of ranks without MPI; UserError if the environment is wrong."""
        raise NotImplementedError(f'ranks of {self.words} meet through MPI')

    def prepare(self) -> None:
        """Set the environment variables of OpenMP, before torch loads that."""
        if not any(map(os.environ.get, _WAITING_VARIABLES)):
            os.environ['GOMP_SPINCOUNT'] = SPIN_COUNT

    def keep_status(self) -> None:
        """Make this rank end with its own exit status."""

    def write_summary(self, summary: str) -> None:
        """Leave the line that sums up an error for the launcher's report."""


class _Mpi(LaunchMethod):
    """Ranks that MPI connects."""

    rank_variables = ('OMPI_COMM_WORLD_RANK', 'PMI_RANK', 'PMIX_RANK', 'SLURM_PROCID')


class OwnLauncher(_Mpi):
    """Our `launcher`, by the mpiexec that it finds."""

    words = 'mpiexec'
    watches_ranks = True
    size_variables = ('LMHP_RANKS',)

    @property
    def family(self) -> Family | None:
        if 'OMPI_COMM_WORLD_SIZE' in os.environ:
            return OPEN_MPI
        return MPICH if 'PMI_RANK' in os.environ else None


class MpichMpiexec(_Mpi):
    """Launch by the user's own mpiexec, of MPICH."""

    words = "MPICH's mpiexec"
    family = MPICH
    size_variables = ('PMI_SIZE',)


class OpenMpiMpiexec(_Mpi):
    """Launch by the user's own mpiexec, of Open MPI."""

    words = "Open MPI's mpiexec"
    family = OPEN_MPI
    size_variables = ('OMPI_COMM_WORLD_SIZE',)


class _Srun(LaunchMethod):
    """Slurm's srun."""

    def keep_status(self) -> None:
        """Ignore SIGTERM of srun --kill-on-bad-exit: srun returns the highest of the statuses."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


class SrunPmi2(_Srun, _Mpi):
    """srun --mpi=pmi2: MPICH, by PMI2."""

    words = 'srun --mpi=pmi2'
    family = MPICH
    size_variables = ('PMI_SIZE', 'SLURM_STEP_NUM_TASKS')


class SrunPmix(_Srun, _Mpi):
    """srun --mpi=pmix: Open MPI, by PMIx."""

    words = 'srun --mpi=pmix'
    family = OPEN_MPI
    size_variables = ('SLURM_STEP_NUM_TASKS',)


class SrunWithoutMpi(_Srun):
    """srun --mpi=none: the ranks meet on the first host, by the variables of Slurm."""

    words = 'srun'
    has_mpi = False
    size_variables = ('SLURM_STEP_NUM_TASKS',)
    rank_variables = ('SLURM_PROCID',)

    def endpoint(self) -> Endpoint:
        """Return MASTER_ADDR and MASTER_PORT, else the step's first host and a port of its own."""
        job = os.environ.get('SLURM_JOB_ID', '0')
        step = os.environ.get('SLURM_STEP_ID', '0')
        attempt = os.environ.get('SLURM_RESTART_COUNT', '0')
        port = str(_FIRST_PORT + (int(job) * 31 + int(step)) % _PORT_COUNT)
        address = os.environ.get('MASTER_ADDR')
        if os.environ.get('SLURM_STEP_NUM_NODES') == '1':
            address = '127.0.0.1'  # the name of a host need not resolve on itself
        return Endpoint(
            address or first_host(os.environ.get('SLURM_STEP_NODELIST', '')),
            _checked_port(os.environ.get('MASTER_PORT') or port),
            f'slurm-{job}.{step}.{attempt}',
        )


class Torchrun(LaunchMethod):
    """torchrun, or what sets the same variables: the ranks meet where MASTER_ADDR says."""

    words = 'torchrun'
    has_mpi = False
    size_variables = ('WORLD_SIZE',)
    rank_variables = ('RANK',)

    @property
    def decides_size(self) -> bool:
        return True  # also for a single rank

    @property
    def finds_store(self) -> bool:
        return os.environ.get('TORCHELASTIC_USE_AGENT_STORE') == 'True'

    def endpoint(self) -> Endpoint:
        """Return MASTER_ADDR and MASTER_PORT."""
        job = os.environ.get('TORCHELASTIC_RUN_ID', 'job')
        is_alone = os.environ.get('LOCAL_WORLD_SIZE') == os.environ['WORLD_SIZE']
        return Endpoint(
            '127.0.0.1' if is_alone and not self.finds_store else os.environ['MASTER_ADDR'],
            _checked_port(os.environ['MASTER_PORT']),
            f'{job}/{_restarts_by_torchrun()}',
        )

    def prepare(self) -> None:
        """Drop OMP_NUM_THREADS=1 besides, which torchrun sets, and which looks like a user's."""
        super().prepare()
        if 'TORCHELASTIC_RUN_ID' in os.environ and os.environ.get('OMP_NUM_THREADS') == '1':
            del os.environ['OMP_NUM_THREADS']

    def write_summary(self, summary: str) -> None:
        """Write it for torchrun's report, which says how to get a traceback otherwise."""
        path = os.environ.get('TORCHELASTIC_ERROR_FILE')
        if not path:
            return
        details = {'py_callstack': summary, 'timestamp': str(int(time.time()))}
        content = {'message': {'message': summary, 'extraInfo': details}}
        with contextlib.suppress(OSError), open(path, 'w', encoding='utf-8') as file:
            json.dump(content, file)


def current() -> LaunchMethod:
    """Return the launch method by the environment; several launchers may have had a part in it."""
    if _first_number('LMHP_RANKS') is not None:
        return OwnLauncher()
    is_torch = all(os.environ.get(name) for name in _TORCH_VARIABLES)
    # torchrun may itself be started by mpiexec or srun, once on each host.
    if is_torch and 'TORCHELASTIC_RUN_ID' in os.environ:
        return Torchrun()
    if _first_number('OMPI_COMM_WORLD_SIZE') is not None:
        return OpenMpiMpiexec()
    if _first_number('PMI_SIZE') is not None:
        # In a step of `srun --mpi=pmix` the variables of PMI are those of MPICH's own mpiexec.
        protocol = os.environ.get('SLURM_MPI_TYPE', '')
        is_of_srun = protocol and not protocol.startswith('pmix')
        return SrunPmi2() if is_of_srun else MpichMpiexec()
    if is_torch:
        return Torchrun()
    if (_first_number('SLURM_STEP_NUM_TASKS') or 1) <= 1:
        return LaunchMethod()
    if any(name.startswith('PMIX_') for name in os.environ):
        return SrunPmix()
    if any(name.startswith('PMI_') for name in os.environ):
        return SrunPmi2()
    return SrunWithoutMpi()


def _restarts_by_torchrun() -> int:
    return _first_number('TORCHELASTIC_RESTART_COUNT') or 0


def first_host(hosts: str) -> str:
    """Return the first name of Slurm's list: 'node07' of 'node[07-12,30],login'; or UserError."""
    first = re.match(r'(?:\[[^\]]*\]|[^,\[])+', hosts)
    if first is None:
        raise UserError('SLURM_STEP_NODELIST names no host: set MASTER_ADDR to that of rank 0')
    return re.sub(r'\[([^,\]-]*)[^\]]*\]', r'\1', first[0])


def _checked_port(port: str) -> int:
    if not (port.isdecimal() and 0 < int(port) < 1 << 16):
        raise UserError(f'MASTER_PORT {port!r} is not a TCP port: set it to a number below 65536')
    return int(port)


def _first_number(*variables: str) -> int | None:
    """Return the first of these environment variables that is a number; None if none is."""
    for name in variables:
        value = os.environ.get(name, '')
        if value.isdecimal():
            return int(value)
    return None
