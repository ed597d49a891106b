"""Environment variables that torch and OpenMP read when they are loaded."""

import os

# Number of times that a waiting OpenMP thread polls before it sleeps. By libgomp's default it polls
# for 3 ms, and so keeps the processor from the threads that it waits for, if another program also
# computes here (benchmarks/README.md).
SPIN_COUNT = '10000'


def prepare(launcher: str) -> None:
    """Set the environment variables of a rank. launcher: name of its launcher, see Launch."""
    # Otherwise a rank prints C++ stacks when it loses rank 0, which has the store.
    os.environ.setdefault('TORCH_CPP_LOG_LEVEL', 'ERROR')
    if not (os.environ.get('OMP_WAIT_POLICY') or os.environ.get('GOMP_SPINCOUNT')):
        os.environ['GOMP_SPINCOUNT'] = SPIN_COUNT
    # torchrun sets OMP_NUM_THREADS to 1, which would look like the user's choice.
    if launcher == 'torchrun' and os.environ.get('OMP_NUM_THREADS') == '1':
        del os.environ['OMP_NUM_THREADS']
