"""Trainings in forked processes that are killed at a certain moment, and what they leave behind."""
import itertools
import os
import re
import signal
import sys
from pathlib import Path

import numpy as np

import launch
from events import CLOCK, events_of
from lm_human_preferences import train_policy, train_reward
from lm_human_preferences.utils import checkpoints
from lm_human_preferences.utils.tf_bundle import Bundle

MOMENTS = [(os, 'replace'), (os, 'fsync'), (os, 'remove'), (train_reward.RewardModelTrainer, 'train_batch'),
           (train_reward.RewardModelTrainer, 'sampled_rewards'), (train_policy.PPOTrainer, 'train_minibatch'),
           (train_policy.PPOTrainer, 'record_step_stats')]


def fork(work, output):
    """Start `work()` in a child that writes to the file `output`; returns its process id."""
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        with open(output, 'ab', buffering=0) as file:
            os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
        sys.stdout, sys.stderr = (os.fdopen(os.dup(1), 'w', buffering=1) for _ in range(2))
        work()
        status = 0
    except SystemExit as e:
        status = e.code or 0
    except BaseException:
        import traceback
        traceback.print_exc()
    finally:
        os._exit(status)


def wait(process):
    """The exit status of a child, minus the signal that has ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def start(words, output, kill_at=None, counter=None, moments=MOMENTS, number=signal.SIGKILL):
    """`./launch.py WORDS` in a child, which sends itself signal `number` at the `kill_at`-th of the `moments`."""
    def work():
        passed = itertools.count(1)  # which threads may advance at the same time

        def counted(function):
            def wrapper(*args, **kwargs):
                if next(passed) == kill_at:
                    os.kill(os.getpid(), number)
                return function(*args, **kwargs)
            return wrapper
        for place, name in moments:
            setattr(place, name, counted(getattr(place, name)))
        try:
            launch.cli(words)
        finally:
            if counter:
                Path(counter).write_text(str(next(passed) - 1))
    return fork(work, output)


def run(words, output, **settings):
    return wait(start(words, output, **settings))


def result_of(directory):
    """Everything that a finished run has left but for the clock: {what: value}."""
    found = {}
    for path in sorted(Path(directory).rglob('*')):
        name = str(path.relative_to(directory))
        if path.suffix == '.index':
            bundle = Bundle(str(path.with_suffix('')))
            found.update({(name, variable): np.array(bundle[variable]).tobytes() for variable in bundle
                          if variable not in ('start_time', 'last_time')})
            state = checkpoints.restore_state(str(path.with_suffix('')))
            if state:
                state['trainer'].pop('elapsed', None)
            found[name, 'state'] = state
        elif path.is_file() and not re.search(r'tfevents|model\.ckpt', name):
            found[name] = path.read_bytes()
    for folder in sorted(Path(directory).glob('tb/*')):
        found.update({(folder.name, tag): events if tag not in CLOCK else [step for step, _ in events]
                      for tag, events in events_of(folder).items()})
    return found


def result_anywhere(directory):
    """The result of the run in `directory`, where that is not told."""
    return {key: value.replace(os.fsencode(directory), b'DIR') if isinstance(key, str) else value
            for key, value in result_of(directory / 'run').items()}


def assert_same(ours, reference):
    assert sorted(map(str, ours)) == sorted(map(str, reference))
    assert [what for what in reference if ours[what] != reference[what]] == []
