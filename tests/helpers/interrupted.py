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


class Child:
    def __init__(self, output: Path, job: dict) -> None:
        self.output = output
        self._process = _fork_server().Process(target=forked_job.run, args=[job], daemon=True)
        self._process.start()
        self.process = self._process.pid
        _children.append(self)

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self._process.is_alive():
            os.kill(self.process, number)

    def wait(self, seconds: float = PATIENCE) -> int:
        """Return the exit status, or minus the signal's number; a hang shows all threads."""
        self._process.join(seconds)
        if self._process.exitcode is None:
            self.kill(signal.SIGABRT)
            self._process.join(10)
            self.kill()
            raise AssertionError(
                f'not ended within {seconds} seconds:\n{self.output.read_text()[-10_000:]}'
            )
        return self._process.exitcode


_children: list[Child] = []  # of the present test


def kill_children() -> None:
    while _children:
        child = _children.pop()
        child.kill()
        child.wait()


def start(
    words,
    output,
    kill_at=None,
    counter=None,
    moments=MOMENTS,
    number=signal.SIGKILL,
    patches=None,
    calls=(),
) -> Child:
    """`./launch.py WORDS` in a Child, which sends itself signal `number` at the `kill_at`-th of the
    `moments`.

    It has the environment and the directory of this process as they are now. What else a test wants
    to be different there is given as data: patches {'module:NAME': value}; calls, each {'moment':
    ..., 'count': n, 'call': 'module:function', 'arguments': [...]}, of functions to be called as
    soon as a moment has come and gone n times. A moment is the call of a function,
    'module:Class.method'. The file `counter` gets how many `moments` there were.
    """
    return Child(
        Path(output),
        {
            'words': with_console(words),
            'output': str(Path(output).resolve()),
            'counter': counter and str(counter),
            'kill_at': kill_at,
            'moments': list(moments),
            'number': int(number),
            'patches': patches or {},
            'calls': list(calls),
            'environment': dict(os.environ),
            'directory': os.getcwd(),
        },
    )


def run(words, output, **settings) -> int:
    return start(words, output, **settings).wait()


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
