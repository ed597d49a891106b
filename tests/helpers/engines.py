"""The engines that ranks average by, and which tests run on the ranks of MPI."""

import functools
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ENGINES = {
    'horovod': 'horovod.torch',
    'torch': 'torch.distributed',
    'mpi': 'mpi4py.MPI',
}  # and what they need
WHAT_RANKS_COMPUTE = [
    'unit/test_comm.py',
    'unit/test_one_against_many.py::test_reward_training',
    'unit/test_one_against_many.py::test_policy_training',
]
RECORDED = [
    'recorded/test_datasets.py::test_sequences_are_the_recorded_ones',
    'recorded/test_datasets.py::test_batches_of_queries_are_the_recorded_ones',
    'recorded/test_ppo.py::test_updates_without_shuffling',
    'recorded/test_ppo.py::test_train_shuffles_as_the_original',
    'recorded/test_ppo_step.py::test_rewards_and_step_statistics',
    'recorded/test_reward_training.py::test_reward_training',
    'recorded/test_replay.py::test_run',
]


@functools.cache
def why_not(engine):
    """Why this machine cannot test an engine; None where it can."""
    run = subprocess.run(
        [sys.executable, '-c', f'import mpi4py.MPI, {ENGINES[engine]}'],
        capture_output=True,
        text=True,
    )
    return run.stderr.strip().splitlines()[-1] if run.returncode else None
