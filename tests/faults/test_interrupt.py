"""Ctrl-C while a training starts; caches that cannot be written."""

import errno
import os
import signal
import subprocess
import sys

import pytest
from command_line import error_of, invoke, succeed
from launched import PATIENCE, REPOSITORY, SMALL, Launch, eventually

from lm_human_preferences import errors
from lm_human_preferences.checkpointing import names
from lm_human_preferences.utils import stop_signals

AT_A_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
FOREVER = ('--ppo.total_episodes=64_000_000', '--run.log_interval=1')


def test_while_a_training_starts(tmp_path):
    """As soon as the lock is there: nothing is left that refuses the same command."""
    training = Launch(tmp_path, *SMALL, *FOREVER, '--mpi=1')
    eventually(lambda: (tmp_path / 'run/lock').exists() or training.process.poll() is not None)
    training.process.send_signal(signal.SIGINT)
    assert training.wait() == 130, training.errors()
    directory = tmp_path / 'run'
    assert not (directory / 'lock').exists()
    hints = ('Nothing is saved yet; the same command starts again.',)
    if directory.exists():  # the signal came late, perhaps after a step
        command = errors.typed(f'./launch.py resume {directory}')
        hints += (  # or before the settings were complete
            f'is saved; to go on from there: {command}',
            f'No step is saved yet; to go on from there: {command}',
        )
    assert training.errors().endswith(hints)


def test_a_terminal_that_closes(tmp_path):
    """Nothing can be printed there any more."""
    master, terminal = os.openpty()
    words = ('launch.py', 'train_policy', 'test', 'run', '--mpi=1', f'--save_dir={tmp_path}')
    with subprocess.Popen(
        [sys.executable, '-c', AT_A_TERMINAL, REPOSITORY / words[0], *words[1:], *SMALL, *FOREVER],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        env={**os.environ, 'OMP_NUM_THREADS': '1'},
    ) as process:
        os.close(terminal)
        directory = tmp_path / 'run'

        def is_ready():
            os.read(master, 1 << 16)  # or the program would wait for that
            return list((directory / 'tb/ppo').glob('events.*'))

        eventually(is_ready)
        os.close(master)
        assert process.wait(PATIENCE) in (129, 130)
    assert not (directory / 'lock').exists()
    assert names.resumable(str(directory / 'policy/checkpoints'))


def test_sighup_that_nohup_ignores():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_signals.handled(stop_signals.interrupt, signal.SIGTERM, signal.SIGHUP):
            signal.raise_signal(signal.SIGHUP)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGHUP, before)


def read_only(dir):
    raise OSError(errno.EROFS, 'Read-only file system', dir)


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    """The first command of README makes a base model there."""
    cache = tmp_path / 'cache'
    monkeypatch.setattr('tempfile.TemporaryFile', read_only)
    monkeypatch.setenv('LMHP_CACHE', str(cache))
    result = invoke(f'train_policy mock_sentiment first --mpi 1 --save_dir {tmp_path}/runs')
    assert error_of(result).startswith(f'the cache folder {cache} cannot be written: ')
    assert result.stderr.endswith('; set LMHP_CACHE to a folder in which you may write\n')
    assert not (tmp_path / 'runs/first').exists()


def test_a_cache_that_others_wrote_is_read(monkeypatch):
    few = '--mpi 1 --save_dir None --labels.num_train 32 --normalize_samples 8'
    succeed(f'train_reward mock_sentiment a {few}')
    monkeypatch.setattr('tempfile.TemporaryFile', read_only)
    succeed(f'train_reward mock_sentiment b {few}')
