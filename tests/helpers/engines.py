"""The engines that ranks average by, and the tests that real ranks run on each of them."""

import functools
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
# Each with what it needs beside torch, which every environment has. Horovod comes last because its
# thread would take time of a processor from those that are tested after it.
ENGINES = {
    'torch': 'mpi4py.MPI',
    'mpi': 'mpi4py.MPI',
    'horovod': 'mpi4py.MPI, horovod.torch',
}
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


def why_not(engine):
    """Why this machine cannot run an engine; None if it can."""
    return why_not_import(ENGINES[engine])


@functools.cache
def why_not_import(modules):
    """The error of importing `modules`, in an interpreter of its own; None if there is none."""
    run = subprocess.run(
        [sys.executable, '-c', f'import {modules}'],
        capture_output=True,
        text=True,
    )
    return run.stderr.strip().splitlines()[-1] if run.returncode else None


def available_engines():
    """Names of the engines that this machine can run."""
    return [engine for engine in ENGINES if why_not(engine) is None]


def skip_reason():
    """What is missing for the other engines; None if nothing is."""
    missing = [f'{engine}: {why_not(engine)}' for engine in ENGINES if why_not(engine) is not None]
    return f'the others passed; {"; ".join(missing)}' if missing else None


def on_mpi_command(tests, *engines):
    """The Python command that every rank runs to do `tests` on `engines`, or all available ones."""
    paths = [str(TESTS / test) for test in tests]
    names = ','.join(engines or available_engines())
    return [sys.executable, str(TESTS / 'helpers/on_mpi.py'), names, *paths]
