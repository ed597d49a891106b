"""What this process's environment says about its ranks, and how long ranks wait for each other.

Imports nothing heavy: every command reads it, `--help` included.
"""

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

LauncherKind = Literal['ours', 'torchrun', 'mpi', 'slurm']
WITHOUT_MPI: tuple[LauncherKind, ...] = ('torchrun', 'slurm')

# How launchers tell a process how many ranks there are, and which of them it is. The first variable
# that is set counts.
_SIZE_VARIABLES: dict[LauncherKind, tuple[str, ...]] = {
    'ours': ('LMHP_RANKS',),
    'torchrun': ('WORLD_SIZE',),
    'mpi': ('OMPI_COMM_WORLD_SIZE', 'PMI_SIZE', 'SLURM_STEP_NUM_TASKS'),
    'slurm': ('SLURM_STEP_NUM_TASKS',),
}
_MPI_RANK_VARIABLES = ('OMPI_COMM_WORLD_RANK', 'PMI_RANK', 'PMIX_RANK', 'SLURM_PROCID')
_LOCAL_RANK_VARIABLES = ('OMPI_COMM_WORLD_LOCAL_RANK', 'MPI_LOCALRANKID', 'SLURM_LOCALID')
_RANK_VARIABLES: dict[LauncherKind, tuple[str, ...]] = {
    'ours': _MPI_RANK_VARIABLES,
    'torchrun': ('RANK',),
    'mpi': _MPI_RANK_VARIABLES,
    'slurm': ('SLURM_PROCID',),
}
# What torch.distributed calls env://. torchrun sets them, and so do Azure ML and Kubernetes'
# operators without torchrun.
_TORCH_VARIABLES = ('RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT')
# All that say which rank this process is and how it was launched.
VARIABLES = tuple(
    dict.fromkeys(
        [
            *itertools.chain(*_SIZE_VARIABLES.values(), *_RANK_VARIABLES.values()),
            *_TORCH_VARIABLES,
            'TORCHELASTIC_RUN_ID',
        ]
    )
)

# How long mpiexec may take to end its ranks, and to pass on what they printed before.
EXIT_GRACE_SECONDS = 2
# How long it takes until a rank's death, or its last output, has become known to the others. A rank
# that fails waits for it, as the death of another rank may be the reason.
REPORT_GRACE_SECONDS = 0.5
# How long rank 0 has to report an error that all ranks met before the others report it, too.
RANK_0_GRACE_SECONDS = 2
# How long a rank that has reported an error waits for the launcher to end it.
LAUNCHER_GRACE_SECONDS = 60


@dataclass(frozen=True)
class Timeouts:
    """How long, in seconds, ranks wait for each other where that is limited, and are waited for.

    rank: for a sign of life. allreduce: for each other's gradients. stop: for the step of a
    training that was asked to stop.
    """

    rank: int = 600
    allreduce: int = 1800
    # Batch systems kill what has not ended 30 s after SIGTERM, and the end of a run takes a moment.
    stop: int = 20


DEFAULT_TIMEOUTS = Timeouts()


def stopping_message(seconds: int) -> str:
    """The line for a training that is asked to stop, and has this many seconds to do so."""
    return (
        f'Stopping: the current step is saved if it finishes within {seconds} s; interrupt again to'
        ' stop at once'
    )


def launcher_kind() -> LauncherKind | None:
    """What started this process as a rank; None if nothing did.

    'ours': `launcher`, by an mpiexec. 'torchrun': that, or what sets the same variables. 'mpi': the
    user's own mpiexec, or an srun that speaks PMI2 or PMIx. 'slurm': an srun that does not, so that
    there is no MPI.
    """
    if _first_number(_SIZE_VARIABLES['ours']) is not None:
        return 'ours'
    is_torch = all(os.environ.get(name) for name in _TORCH_VARIABLES)
    # torchrun may itself be started by mpiexec or srun, once on each host.
    if is_torch and 'TORCHELASTIC_RUN_ID' in os.environ:
        return 'torchrun'
    if _first_number(('OMPI_COMM_WORLD_SIZE', 'PMI_SIZE')) is not None:
        return 'mpi'
    if is_torch:
        return 'torchrun'
    if (_first_number(_SIZE_VARIABLES['slurm']) or 1) > 1:
        speaks_pmi = any(name.startswith(('PMI_', 'PMIX_')) for name in os.environ)
        return 'mpi' if speaks_pmi else 'slurm'
    return None


def launched_size() -> int:
    """How many ranks the launcher of this process says it started; 1 without a launcher."""
    kind = launcher_kind()
    size = _first_number(_SIZE_VARIABLES[kind]) if kind else None
    return 1 if size is None else size


def launched_rank() -> int:
    """Which of these ranks this process is, counted from 0."""
    kind = launcher_kind()
    if kind is None or launched_size() <= 1:
        return 0
    return _first_number(_RANK_VARIABLES[kind]) or 0


def is_launched() -> bool:
    """Whether a launcher has decided how many ranks there are; torchrun's may be a single one."""
    return launched_size() > 1 or launcher_kind() == 'torchrun'


def started_by_srun() -> bool:
    """Whether srun started this process as a rank.

    With --kill-on-bad-exit it ends the ranks by SIGTERM when the first has failed. It returns the
    highest of their statuses, which is above 128 for one that was killed.
    """
    kind = launcher_kind()
    return kind == 'slurm' or (kind == 'mpi' and 'SLURM_MPI_TYPE' in os.environ)


def is_first_on_host() -> bool:
    """Whether this is the first of the ranks on its host that MPI's launcher or srun started."""
    return not _first_number(_LOCAL_RANK_VARIABLES)


def restart_count() -> int:
    """How often torchrun has started this job again, after one of its ranks had failed."""
    return _first_number(['TORCHELASTIC_RESTART_COUNT']) or 0


def was_restarted() -> bool:
    """Whether torchrun, or Slurm, started this job again after it had failed or was requeued."""
    return restart_count() > 0 or (_first_number(['SLURM_RESTART_COUNT']) or 0) > 0


def drop_launchers_threads() -> None:
    """Forget the one thread that torchrun gives each rank where the user has set no number.

    To be called before anything loads OpenMP. OMP_NUM_THREADS=1 that the user has set himself looks
    the same, and is forgotten, too.
    """
    if 'TORCHELASTIC_RUN_ID' in os.environ and os.environ.get('OMP_NUM_THREADS') == '1':
        del os.environ['OMP_NUM_THREADS']


def _first_number(variables: Sequence[str]) -> int | None:
    """The value of the first of these environment variables that is a number; None if none is."""
    for name in variables:
        value = os.environ.get(name, '')
        if value.isdecimal():
            return int(value)
    return None
