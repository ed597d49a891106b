"""Real ranks, started by mpiexec on each engine: the tests that use ranks.on_ranks.

Each engine averages gradients, alone and in a training. The rest, recordings included, is the same
for all of them, and is done by one.
faults/test_two_hosts.py has three ranks, and some without MPI.
"""

import pytest
from engines import (
    ENGINES,
    OF_EACH_ENGINE,
    OF_ONE_ENGINE,
    available_engines,
    on_mpi_command,
)
from launched import output_of

from lm_human_preferences.distributed import launcher

pytestmark = pytest.mark.slow
TIMEOUT_SECONDS = 900  # an idle machine needs a tenth of it


@pytest.mark.parametrize('engine', ENGINES)
def test_two_ranks(engine):
    if engine not in available_engines():
        pytest.skip(f'{engine} is not built for the MPI of this environment')
    tests = OF_EACH_ENGINE + (OF_ONE_ENGINE if engine == 'torch' else [])
    command = [*launcher.mpiexec_words(2), *on_mpi_command(engine, tests)]
    output = output_of(command, launcher.rank_environment(), TIMEOUT_SECONDS)
    announced, *counts = output.splitlines()[-3:]
    assert announced.startswith(f'averaged by {engine}')
    assert len(set(counts)) == 1, output  # as many tests passed on each rank
    for test in OF_EACH_ENGINE:  # recordings that are not in the set are skipped
        assert test.rpartition('::')[2] in counts[0]
