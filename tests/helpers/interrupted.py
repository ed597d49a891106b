"""Trainings in processes of their own, killed at a chosen moment, and what they leave behind."""

import contextlib
import functools
import importlib
import json
import multiprocessing
import os
import re
import signal
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

import forked_job
import numpy as np
from events import CLOCK, events_of
from launched import PATIENCE, PYTHONPATH, with_console

from lm_human_preferences.checkpointing import checkpoints
from lm_human_preferences.checkpointing.tf_bundle import Bundle
from lm_human_preferences.errors import UserError
from lm_human_preferences.runs.run_files import RECORD

PACKAGE = 'lm_human_preferences'
TRAIN_BATCH = f'{PACKAGE}.train_reward:RewardModelTrainer.train_batch'
TRAIN_MINIBATCH = f'{PACKAGE}.train_policy:PPOTrainer.train_minibatch'
STEP = f'{PACKAGE}.train_policy:PPOTrainer.step'
ANALYZED = f'{PACKAGE}.train_policy:PPOTrainer._analyzed'
REWARD_STEP = f'{PACKAGE}.train_reward:RewardModelTrainer.step'
RECORD_STEP_STATS = f'{PACKAGE}.train_policy:PPOTrainer.record_step_stats'
SAMPLED = f'{PACKAGE}.train_reward:RewardModelTrainer.sampled_rewards'
MOMENTS = ('os:replace', 'os:fsync', 'os:remove')
MOMENTS += (TRAIN_BATCH, SAMPLED, TRAIN_MINIBATCH, RECORD_STEP_STATS)

# What trainings import when they start: each child would spend seconds on it.
IMPORTED = 'train_policy train_reward checkpointing.checkpointer runs.uploads'
PRELOADED = ['forked_job', *(f'{PACKAGE}.{name}' for name in IMPORTED.split())]
PRELOADED += [f'{PACKAGE}.datasets.{name}' for name in ('books', 'reviews')]
# Torch and OpenBLAS would start threads, which a fork leaves behind with their locks.
ONE_THREAD = dict.fromkeys(('OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'MKL_NUM_THREADS'), '1')


@functools.cache
def _fork_server() -> multiprocessing.context.ForkServerContext:
    """The fork server of this pytest process: a fork of pytest would have the locks of threads."""
    context = multiprocessing.get_context('forkserver')
    context.set_forkserver_preload(PRELOADED)
    with mock.patch.dict(os.environ, ONE_THREAD, PYTHONPATH=PYTHONPATH):
        forkserver.ensure_running()
    return context


def run(words, output, **settings) -> int:
    """Run `./launch.py WORDS` in a child; return its exit status, or minus the signal's number.

    It has this process's environment and directory. settings: more arguments of forked_job.run.
    """
    place = {'directory': os.getcwd(), 'environment': dict(os.environ)}
    job = {'words': with_console(words), 'output': str(Path(output).resolve()), **place}
    job |= {'moments': MOMENTS, **settings}
    child = _fork_server().Process(target=forked_job.run, kwargs=job, daemon=True)
    child.start()
    try:
        child.join(PATIENCE)
        if child.exitcode is None:
            os.kill(child.pid, signal.SIGABRT)
            child.join(10)
            printed = Path(output).read_text()[-10_000:]
            raise AssertionError(f'not ended within {PATIENCE} seconds:\n{printed}')
        return child.exitcode
    finally:
        child.kill()


@contextlib.contextmanager
def failing(moment: str, call: int, error=None):
    """Within the block, the `call`-th call of a moment fails: by `error`, or as a UserError."""
    module, _, path = moment.partition(':')
    owner, method = path.split('.')
    place = getattr(importlib.import_module(module), owner)
    original, calls = getattr(place, method), []

    def counted(*args, **kwargs):
        calls.append(1)
        if len(calls) == call:
            raise error or UserError('interrupted')
        return original(*args, **kwargs)

    with mock.patch.object(place, method, counted):
        yield


def result_of(directory):
    """Everything that a finished run has left but for the clock and what commands there were."""
    found = {}
    for path in sorted(Path(directory).rglob('*')):
        name = str(path.relative_to(directory))
        if path.suffix == '.index':
            bundle = Bundle(str(path.with_suffix('')))
            for variable in bundle:
                if variable.rpartition('/')[2] not in ('start_time', 'last_time'):
                    found[name, variable] = np.array(bundle[variable]).tobytes()
            state = checkpoints.restore_state(str(path.with_suffix('')))
            if state:
                state['trainer'].pop('elapsed', None)
            found[name, 'state'] = state
        elif path.name == RECORD:
            for entry in (record := json.loads(path.read_text())).values():
                entry.pop('commands', None)
            found[name] = json.dumps(record).encode()
        elif path.is_file() and not re.search(r'tfevents|model\.ckpt', name):
            found[name] = path.read_bytes()
    for folder in sorted(Path(directory).glob('tb/*')):
        for tag, events in events_of(folder).items():
            found[folder.name, tag] = [step for step, _ in events] if tag in CLOCK else events
    return found


def result_anywhere(directory):
    """The result of the run in `directory`, where that is not told, nor where it was started."""
    told = re.compile(rb'%b(/again)?' % re.escape(os.fsencode(directory)))
    return {
        key: told.sub(b'DIR', value) if isinstance(key, str) else value
        for key, value in result_of(directory / 'run').items()
    }


def assert_same(ours, reference):
    assert {*map(str, ours)} ^ {*map(str, reference)} == set()
    assert [what for what in reference if ours[what] != reference[what]] == []
