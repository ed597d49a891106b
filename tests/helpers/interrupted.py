"""Trainings in processes of their own, killed at a chosen moment, and what they leave behind."""

import atexit
import contextlib
import functools
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from events import CLOCK, events_of
from launched import PATIENCE, REPOSITORY, with_console

from lm_human_preferences.checkpointing import checkpoints
from lm_human_preferences.checkpointing.tf_bundle import Bundle

PACKAGE = 'lm_human_preferences'
TRAIN_BATCH = f'{PACKAGE}.train_reward:RewardModelTrainer.train_batch'
TRAIN_MINIBATCH = f'{PACKAGE}.train_policy:PPOTrainer.train_minibatch'
STEP = f'{PACKAGE}.train_policy:PPOTrainer.step'
RECORD_STEP_STATS = f'{PACKAGE}.train_policy:PPOTrainer.record_step_stats'
MOMENTS = (
    'os:replace',
    'os:fsync',
    'os:remove',
    TRAIN_BATCH,
    f'{PACKAGE}.train_reward:RewardModelTrainer.sampled_rewards',
    TRAIN_MINIBATCH,
    RECORD_STEP_STATS,
)


class Zygote:
    """This side of zygote.py, a process that forks a child for each training.

    It ends when pytest does.
    """

    def __init__(self) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        self.said = tempfile.TemporaryFile()
        self.requests = 0
        self.running: dict[int, Child] = {}
        with theirs:
            # One thread: torch and OpenBLAS would start others, which a fork leaves behind with
            # their locks.
            one = dict.fromkeys(('OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'MKL_NUM_THREADS'), '1')
            self.process = subprocess.Popen(
                [sys.executable, REPOSITORY / 'tests/helpers/zygote.py', str(theirs.fileno())],
                env={**os.environ, **one},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self.said,
                stderr=self.said,
                start_new_session=True,
            )  # Ctrl-C is for pytest
        atexit.register(self.close)

    def close(self) -> None:
        self.connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self.process.kill()

    def request(self, **content: Any) -> dict:
        """The answer to a request."""
        self.requests += 1
        try:
            self.connection.send_bytes(json.dumps({**content, 'number': self.requests}).encode())
        except OSError as e:
            raise self.failed() from e
        answer = None
        while (
            answer is None or answer.get('number') != self.requests
        ):  # a test that was stopped may have left one
            answer = self.receive(PATIENCE)
            assert answer, f'zygote.py did not answer within {PATIENCE} seconds'
        return answer

    def receive(self, seconds: float) -> dict | None:
        """The next message, if one comes within so many seconds; a child's end is noted."""
        if not self.connection.poll(max(0, seconds)):
            return None
        try:
            message = json.loads(self.connection.recv_bytes())
        except (EOFError, OSError) as e:
            raise self.failed() from e
        if 'ended' in message and message['ended'] in self.running:
            self.running.pop(message['ended']).status = message['status']
        return message

    def failed(self) -> RuntimeError:
        self.process.wait(PATIENCE)
        self.said.seek(0)
        zygote.cache_clear()  # the next test gets another
        return RuntimeError(
            f'zygote.py ended with status {self.process.returncode}:\n{self.said.read().decode()}'
        )


@functools.cache
def zygote() -> Zygote:
    """The one of this pytest process."""
    return Zygote()


class Child:
    """A process that runs `./launch.py` and writes to the file `output`."""

    def __init__(self, output: Path, job: dict) -> None:
        self.output = output
        self.zygote = zygote()
        self.status: int | None = None
        self.process: int = self.zygote.request(job=job)['process']
        self.zygote.running[self.process] = self

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal, unless the process has ended; whoever else has its id by now does not get
        it."""
        self.zygote.request(kill=self.process, signal=number)

    def wait(self, seconds: float = PATIENCE) -> int:
        """The exit status, or minus the number of the signal that ended it; a hang shows all its
        threads."""
        until = time.monotonic() + seconds
        while self.status is None and time.monotonic() < until:
            self.zygote.receive(until - time.monotonic())
        if self.status is None:
            self.kill(signal.SIGABRT)
            self.zygote.receive(10)
            self.kill()
            raise AssertionError(
                f'not ended within {seconds} seconds:\n{self.output.read_text()[-10_000:]}'
            )
        return self.status


def kill_children() -> None:
    """End what a test has left running."""
    if zygote.cache_info().currsize:
        for child in list(zygote().running.values()):
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
    """The exit status of `start` with the same arguments."""
    return start(words, output, **settings).wait()


def result_of(directory):
    """Everything that a finished run has left but for the clock and what commands there were."""
    found = {}
    for path in sorted(Path(directory).rglob('*')):
        name = str(path.relative_to(directory))
        if path.suffix == '.index':
            bundle = Bundle(str(path.with_suffix('')))
            found.update(
                {
                    (name, variable): np.array(bundle[variable]).tobytes()
                    for variable in bundle
                    if variable.rpartition('/')[2] not in ('start_time', 'last_time')
                }
            )
            state = checkpoints.restore_state(str(path.with_suffix('')))
            if state:
                state['trainer'].pop('elapsed', None)
            found[name, 'state'] = state
        elif path.is_file() and not re.search(r'tfevents|model\.ckpt|_commands\.jsonl', name):
            found[name] = path.read_bytes()
    for folder in sorted(Path(directory).glob('tb/*')):
        found.update(
            {
                (folder.name, tag): events if tag not in CLOCK else [step for step, _ in events]
                for tag, events in events_of(folder).items()
            }
        )
    return found


def result_anywhere(directory):
    """The result of the run in `directory`, where that is not told, nor where it was started."""
    told = re.compile(rb'%b(/again)?' % re.escape(os.fsencode(directory)))
    return {
        key: told.sub(b'DIR', value) if isinstance(key, str) else value
        for key, value in result_of(directory / 'run').items()
    }


def assert_same(ours, reference):
    assert sorted(map(str, ours)) == sorted(map(str, reference))
    assert [what for what in reference if ours[what] != reference[what]] == []
