"""Environment variables that torch and OpenMP read when they are loaded."""

import os

# How often threads of OpenMP look before they sleep. With libgomp's default, 3 ms, waiting threads
# take the processor from those that they wait for, if another program computes here, too
# (benchmarks/README.md).
SPIN_COUNT = '10000'


def prepare(launcher: str) -> None:
    """Set the variables for a rank. launcher: name of what started it, see Launch."""
    # Else a rank whose store is lost with rank 0 prints stacks of C++.
    os.environ.setdefault('TORCH_CPP_LOG_LEVEL', 'ERROR')
    if not (os.environ.get('OMP_WAIT_POLICY') or os.environ.get('GOMP_SPINCOUNT')):
        os.environ['GOMP_SPINCOUNT'] = SPIN_COUNT
    # torchrun sets it, and it looks like a user's.
    if launcher == 'torchrun' and os.environ.get('OMP_NUM_THREADS') == '1':
        del os.environ['OMP_NUM_THREADS']
