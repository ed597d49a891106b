"""Environment variables that torch and OpenMP read when they are loaded."""

import os

# A waiting OpenMP thread polls this many times before it sleeps; by default it polls for 3 ms.
# When programs compete for processors, polling delays working threads (benchmarks/README.md).
SPIN_COUNT = '10000'


def prepare(launcher: str) -> None:
    """Set the environment variables of a rank. launcher: name of its launcher, see Launch."""
    # By default, a rank prints C++ stacks when it loses the connection to rank 0's store.
    os.environ.setdefault('TORCH_CPP_LOG_LEVEL', 'ERROR')
    if not (os.environ.get('OMP_WAIT_POLICY') or os.environ.get('GOMP_SPINCOUNT')):
        os.environ['GOMP_SPINCOUNT'] = SPIN_COUNT
    # Remove torchrun's OMP_NUM_THREADS=1, which would count as the user's choice.
    if launcher == 'torchrun' and os.environ.get('OMP_NUM_THREADS') == '1':
        del os.environ['OMP_NUM_THREADS']
