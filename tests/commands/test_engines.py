"""Real ranks, on each engine and launcher: the tests that use ranks.on_ranks.

Each engine averages gradients, alone and in a training; one does the rest, which is the same.
"""

import os
import sys

import pytest
import real_launchers
from launched import REPOSITORY, output_of

pytestmark = pytest.mark.slow
GRADIENTS = 'unit/test_comm.py::test_gradients_are_averaged'
OF_EACH = (GRADIENTS, 'unit/test_one_against_many.py::test_policy_training')
OF_ONE = (
    'unit/test_comm.py',
    'unit/test_stop.py::test_tokens_count_alike_on_whichever_rank_they_are[test]',
    # Not in parts: torch would import its compiler in each rank, for longer than the tests take.
    'unit/test_one_against_many.py::test_reward_training[2-False]',
    'recorded/test_datasets.py::test_batches_of_queries_are_the_recorded_ones',
    'recorded/test_ppo.py::test_train_shuffles_as_the_original',
    'recorded/test_ppo_step.py::test_rewards_and_step_statistics',
    'recorded/test_reward_training.py::test_reward_training',
)
RECORDED_RUN = 'recorded/test_replay.py::test_run'


@pytest.mark.parametrize(
    'name, tests',
    [
        ('mpiexec of MPICH', (*OF_EACH, *OF_ONE, RECORDED_RUN)),
        ('mpiexec of MPICH, horovod', (*OF_EACH, RECORDED_RUN)),
        ('mpiexec of Open MPI', (GRADIENTS, RECORDED_RUN)),
        ('torchrun', (GRADIENTS, RECORDED_RUN)),
    ],
)
def test_two_ranks(name, tests, request):
    launcher = real_launchers.find(name, request)
    program = [sys.executable, f'{REPOSITORY}/tests/helpers/on_mpi.py', launcher.engine, *tests]
    output = output_of([*launcher.command, *program], {**os.environ, **launcher.variables}, 900)
    announced, *counts = output.splitlines()[-3:]
    assert announced.startswith(f'averaged by {launcher.engine}')
    assert len(set(counts)) == 1, output  # as many tests passed on each rank
    for test in tests[:2]:  # recordings that are not in the set are skipped
        assert test.rpartition('::')[2] in counts[0]
