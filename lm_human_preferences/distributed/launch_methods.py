"""What started this process as a rank, and what follows from that: a class for each launcher.

These are the launchers that docs/clusters.md lists. Each tells a process by environment variables
how many ranks there are, and which of them it is. Imports nothing heavy: every command asks,
`--help` included.
"""

from __future__ import annotations

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
_LOCAL_RANK_VARIABLES = ('OMPI_COMM_WORLD_LOCAL_RANK', 'MPI_LOCALRANKID', 'SLURM_LOCALID')


class Family(NamedTuple):
    """MPI libraries that can stand in for each other: programs are linked against `soname`."""

    name: str
    soname: str


MPICH = Family('MPICH', 'libmpi.so.12')
OPEN_MPI = Family('Open MPI', 'libmpi.so.40')


class Endpoint(NamedTuple):
    """Where the store is. job: what the keys of this job, and of this attempt at it, begin with."""

    address: str
    port: int
    job: str


class LaunchMethod:
    """How this process was started. This class is for one that is alone.

    words: what error messages call the launcher. has_mpi: whether MPI connects the ranks, or those
    that this process would start. family: the one of the launcher's MPI, None where that is
    unknown. watches_ranks: whether the launcher notices by itself that a rank is stopped.
    """

    words = 'nothing'
    has_mpi = True
    family: Family | None = None
    watches_ranks = False
    # The first that is set counts.
    size_variables: tuple[str, ...] = ()
    rank_variables: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """How many ranks the launcher says it started; 1 without a launcher."""
        size = _first_number(*self.size_variables)
        return 1 if size is None else size

    @property
    def decides_size(self) -> bool:
        """Whether the launcher has decided how many ranks there are."""
        return self.size > 1

    @property
    def rank(self) -> int:
        """Which of these ranks this process is, counted from 0."""
        if self.size <= 1:
            return 0
        return _first_number(*self.rank_variables) or 0

    @property
    def is_first_on_host(self) -> bool:
        """Whether this is the first rank that MPI's launcher or srun started on its host."""
        return not _first_number(*_LOCAL_RANK_VARIABLES)

    @property
    def was_restarted(self) -> bool:
        """Whether torchrun or Slurm started this job again: it had failed, or was requeued."""
        return _restarts_by_torchrun() > 0 or (_first_number('SLURM_RESTART_COUNT') or 0) > 0

    @property
    def keeps_store(self) -> bool:
        """Without MPI: whether this process is to keep the store at which the ranks meet."""
        return self.rank == 0 and not self.finds_store

    @property
    def finds_store(self) -> bool:
        """Without MPI: whether the launcher has made that store before the ranks start."""
        return False

    def endpoint(self) -> Endpoint:
        """Without MPI: where the ranks of this job meet.

        UserError if the environment is wrong about it.
        """
        raise NotImplementedError(f'ranks of {self.words} meet through MPI')

    def prepare(self) -> None:
        """Correct what the launcher has set in the environment; before OpenMP is loaded."""

    def keep_status(self) -> None:
        """From now on let this rank, which is about to end, do so with its own status."""

    def tell(self, summary: str) -> None:
        """Leave the line that sums up an error for a report of the launcher's own."""


class _Mpi(LaunchMethod):
    """Ranks that MPI connects."""

    rank_variables = ('OMPI_COMM_WORLD_RANK', 'PMI_RANK', 'PMIX_RANK', 'SLURM_PROCID')


class OwnLauncher(_Mpi):
    """`launcher`, by the mpiexec that it finds."""

    words = 'mpiexec'
    watches_ranks = True
    size_variables = ('LMHP_RANKS',)

    @property
    def family(self) -> Family | None:
        if 'OMPI_COMM_WORLD_SIZE' in os.environ:
            return OPEN_MPI
        return MPICH if 'PMI_RANK' in os.environ else None


class MpichMpiexec(_Mpi):
    """The user's own mpiexec, of MPICH."""

    words = "MPICH's mpiexec"
    family = MPICH
    size_variables = ('PMI_SIZE',)


class OpenMpiMpiexec(_Mpi):
    """The user's own mpiexec, of Open MPI."""

    words = "Open MPI's mpiexec"
    family = OPEN_MPI
    size_variables = ('OMPI_COMM_WORLD_SIZE',)


class _Srun(LaunchMethod):
    """Slurm's srun."""

    def keep_status(self) -> None:
        """Ignore SIGTERM, by which srun --kill-on-bad-exit ends all ranks after the first.

        srun returns the highest of the ranks' statuses, which is above 128 for one that was killed.
        """
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
        """The first host of the step, and a port that follows from the numbers of job and step.

        MASTER_ADDR and MASTER_PORT count where they are set.
        """
        job = os.environ.get('SLURM_JOB_ID', '0')
        step = os.environ.get('SLURM_STEP_ID', '0')
        attempt = os.environ.get('SLURM_RESTART_COUNT', '0')
        port = str(_FIRST_PORT + (int(job) * 31 + int(step)) % _PORT_COUNT)
        return Endpoint(
            os.environ.get('MASTER_ADDR') or _first_host_of_step(),
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
        """Always: the user may have asked for a single rank."""
        return True

    @property
    def finds_store(self) -> bool:
        return os.environ.get('TORCHELASTIC_USE_AGENT_STORE') == 'True'

    def endpoint(self) -> Endpoint:
        """What MASTER_ADDR and MASTER_PORT say."""
        job = os.environ.get('TORCHELASTIC_RUN_ID', 'job')
        return Endpoint(
            os.environ['MASTER_ADDR'],
            _checked_port(os.environ['MASTER_PORT']),
            f'{job}/{_restarts_by_torchrun()}',
        )

    def prepare(self) -> None:
        """Forget the one thread that torchrun gives each rank where the user has set no number.

        OMP_NUM_THREADS=1 that the user has set himself looks the same, and is forgotten, too.
        """
        if 'TORCHELASTIC_RUN_ID' in os.environ and os.environ.get('OMP_NUM_THREADS') == '1':
            del os.environ['OMP_NUM_THREADS']

    def tell(self, summary: str) -> None:
        """For torchrun's report, which would else say how to get a traceback."""
        path = os.environ.get('TORCHELASTIC_ERROR_FILE')
        if not path:
            return
        details = {'py_callstack': summary, 'timestamp': str(int(time.time()))}
        content = {'message': {'message': summary, 'extraInfo': details}}
        with contextlib.suppress(OSError), open(path, 'w', encoding='utf-8') as file:
            json.dump(content, file)


def current() -> LaunchMethod:
    """What the environment says: several launchers may have had a part in it."""
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
    if (_first_number('SLURM_STEP_NUM_TASKS') or 1) > 1:
        return _srun()
    return LaunchMethod()


def _srun() -> LaunchMethod:
    """By the protocol of MPI that its variables belong to."""
    if any(name.startswith('PMIX_') for name in os.environ):
        return SrunPmix()
    if any(name.startswith('PMI_') for name in os.environ):
        return SrunPmi2()
    return SrunWithoutMpi()


def _restarts_by_torchrun() -> int:
    return _first_number('TORCHELASTIC_RESTART_COUNT') or 0


def _first_host_of_step() -> str:
    if os.environ.get('SLURM_STEP_NUM_NODES') == '1':
        return '127.0.0.1'  # the name of a host need not resolve on itself
    return first_host(os.environ.get('SLURM_STEP_NODELIST', ''))


def first_host(hosts: str) -> str:
    """The first name in a list as Slurm writes it, such as 'node[07-12,30],login'.

    UserError where there is none.
    """
    match = re.match(r'([^\[,]+)(?:\[([^\]-]*)[^\]]*?\])?', hosts)
    if match is None:
        raise UserError('SLURM_STEP_NODELIST names no host: set MASTER_ADDR to that of rank 0')
    prefix, numbers = match.groups(default='')
    return prefix + numbers.partition(',')[0] + _suffix(hosts[match.end() :])


def _suffix(rest: str) -> str:
    """What follows the brackets in the name of a host: 'rack[1-2]-a' is 'rack1-a' first."""
    return first_host(rest) if rest and not rest.startswith(',') else ''


def _checked_port(port: str) -> int:
    if not (port.isdecimal() and 0 < int(port) < 1 << 16):
        raise UserError(f'MASTER_PORT {port!r} is no TCP port: set it to a number below 65536')
    return int(port)


def _first_number(*variables: str) -> int | None:
    """The value of the first of these environment variables that is a number; None if none is."""
    for name in variables:
        value = os.environ.get(name, '')
        if value.isdecimal():
            return int(value)
    return None
