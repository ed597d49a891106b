"""The engines that ranks average by, and the tests that real ranks run on each of them."""

import functools
import subprocess
import sys
from pathlib import Path

from lm_human_preferences.distributed.launch_methods import MPICH
from lm_human_preferences.distributed.libraries import horovod_build

TESTS = Path(__file__).resolve().parents[1]
# Horovod comes last because its thread would take time of a processor from those that are tested
# after it.
ENGINES = ('torch', 'mpi', 'horovod')
COMMUNICATION = ['unit/test_comm.py']
OF_EACH_ENGINE = [
    *COMMUNICATION,
    'unit/test_one_against_many.py::test_policy_training',
    'unit/test_stop.py::test_tokens_count_alike_on_whichever_rank_they_are[test]',
]
OF_ONE_ENGINE = [
    # Not in parts: torch would import its compiler in each rank, for longer than the tests take.
    'unit/test_one_against_many.py::test_reward_training[2-False]',
    'recorded/test_datasets.py::test_batches_of_queries_are_the_recorded_ones',
    'recorded/test_ppo.py::test_train_shuffles_as_the_original',
    'recorded/test_ppo_step.py::test_rewards_and_step_statistics',
    'recorded/test_reward_training.py::test_reward_training',
    'recorded/test_replay.py::test_run',
]


def why_not(engine, mpi=MPICH):
    """Return why ranks that speak `mpi` (None: no MPI) cannot average by an engine, or None."""
    if mpi is None:
        return None if engine == 'torch' else 'it needs MPI'
    reason = why_not_import('mpi4py.MPI')
    if reason or engine != 'horovod':
        return reason
    reason = horovod_build.why_not(mpi.soname, has_gpu=False)
    if reason == '':
        return 'Horovod is not installed'
    return reason or why_not_import('horovod.torch')


@functools.cache
def why_not_import(module):
    """The error of importing `module`, in an interpreter of its own; None if there is none."""
    run = subprocess.run([sys.executable, '-c', f'import {module}'], capture_output=True, text=True)
    return run.stderr.strip().splitlines()[-1] if run.returncode else None


def available_engines(mpi=MPICH):
    """Return the names of the engines of ranks that speak `mpi` (None: no MPI)."""
    return [engine for engine in ENGINES if why_not(engine, mpi) is None]


def skip_reason():
    """Return the packages missing for the other engines; None if none is."""
    missing = [f'{engine}: {why_not(engine)}' for engine in ENGINES if why_not(engine) is not None]
    return f'the others passed; {"; ".join(missing)}' if missing else None


def on_mpi_words(tests, *engines):
    """Return the arguments of on_mpi.py for `tests` on `engines`, or on all available ones."""
    return [','.join(engines or available_engines()), *(str(TESTS / test) for test in tests)]


def on_mpi_command(tests, *engines):
    """The Python command that every rank runs to do `tests` on `engines`, or all available ones."""
    return [sys.executable, str(TESTS / 'helpers/on_mpi.py'), *on_mpi_words(tests, *engines)]
