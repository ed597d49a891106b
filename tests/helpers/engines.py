"""The engines that ranks average by, and the tests that real ranks run on each of them."""

import sys
from pathlib import Path

from lm_human_preferences.distributed import horovod
from lm_human_preferences.distributed.launch_methods import MPICH

TESTS = Path(__file__).resolve().parents[1]
ENGINES = ('torch', 'horovod')
GRADIENTS = ['unit/test_comm.py::test_gradients_are_averaged']
OF_EACH_ENGINE = [*GRADIENTS, 'unit/test_one_against_many.py::test_policy_training']
OF_ONE_ENGINE = [
    'unit/test_comm.py',
    'unit/test_stop.py::test_tokens_count_alike_on_whichever_rank_they_are[test]',
    # Not in parts: torch would import its compiler in each rank, for longer than the tests take.
    'unit/test_one_against_many.py::test_reward_training[2-False]',
    'recorded/test_datasets.py::test_batches_of_queries_are_the_recorded_ones',
    'recorded/test_ppo.py::test_train_shuffles_as_the_original',
    'recorded/test_ppo_step.py::test_rewards_and_step_statistics',
    'recorded/test_reward_training.py::test_reward_training',
    'recorded/test_replay.py::test_run',
]


def available_engines(mpi=MPICH):
    """Return the names of the engines of ranks that speak `mpi` (None: no MPI)."""
    return [engine for engine in ENGINES if engine == 'torch' or not horovod.why_not(mpi)]


def on_mpi_command(engine, tests):
    """Return the Python command that every rank runs to do `tests`."""
    words = (str(TESTS / test) for test in tests)
    return [sys.executable, str(TESTS / 'helpers/on_mpi.py'), engine, *words]
