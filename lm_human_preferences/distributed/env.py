"""What this process's environment says about its ranks, and how long ranks wait for each other.

Imports nothing heavy: every command reads it, `--help` included.
"""

import importlib.util
import os
from collections.abc import Sequence

# How our launcher and those of Open MPI, MPICH and Slurm tell a process how many ranks there are,
# and which of them it is. The first variable that is set counts.
SIZE_VARIABLES = ('LMHP_RANKS', 'OMPI_COMM_WORLD_SIZE', 'PMI_SIZE', 'SLURM_STEP_NUM_TASKS')
RANK_VARIABLES = ('OMPI_COMM_WORLD_RANK', 'PMI_RANK', 'SLURM_PROCID')

# How long a training that was asked to stop may take to finish its step.
STEP_GRACE_SECONDS = 5
# How long mpiexec may take to end its ranks, and to pass on what they printed before.
EXIT_GRACE_SECONDS = 2
# How long it takes until a rank's death, or its last output, has become known to the others. A rank
# that fails waits for it, as the death of another rank may be the reason.
REPORT_GRACE_SECONDS = 0.5
# How long rank 0 has to report an error that all ranks met before the others report it, too.
RANK_0_GRACE_SECONDS = 2
# How long a rank that has reported an error waits for the launcher to end it.
LAUNCHER_GRACE_SECONDS = 60

STOPPING = (
    f'Stopping: the current step is saved if it finishes within {STEP_GRACE_SECONDS} s;'
    ' interrupt again to stop at once'
)


def launched_size() -> int:
    """How many ranks the launcher of this process says it started; 1 without a launcher."""
    return _first_number(SIZE_VARIABLES, 1)


def launched_rank() -> int:
    """Which of these ranks this process is, counted from 0."""
    if launched_size() <= 1:
        return 0
    return _first_number(RANK_VARIABLES, 0)


def has_horovod() -> bool:
    """Whether Horovod was built for this environment."""
    return importlib.util.find_spec('horovod') is not None


def _first_number(variables: Sequence[str], default: int) -> int:
    for name in variables:
        value = os.environ.get(name, '')
        if value.isdecimal():
            return int(value)
    return default
