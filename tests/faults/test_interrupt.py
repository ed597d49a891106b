"""Ctrl-C while a training starts; caches that cannot be written."""

import errno
import signal

import pytest
from command_line import error_of, invoke, succeed
from launched import REPOSITORY, SMALL, Launch, eventually, needs_mpi

FOREVER = ('--ppo.total_episodes=64_000_000', '--run.log_interval=1')


def start(directory, *words):
    return Launch(directory, *SMALL, *FOREVER, *words)


@pytest.mark.parametrize(
    'mpi, number',
    [
        pytest.param(1, signal.SIGINT, id='one'),
        pytest.param(2, signal.SIGTERM, id='two', marks=[pytest.mark.slow, needs_mpi]),
    ],
)
def test_while_ranks_start(mpi, number, tmp_path):
    """As soon as the lock is there: nothing is left that refuses the same command."""
    training = start(tmp_path, f'--mpi={mpi}')
    eventually(lambda: (tmp_path / 'run/lock').exists() or training.process.poll() is not None)
    training.process.send_signal(number)
    assert training.wait() in (130, 143), training.errors()
    directory = tmp_path / 'run'
    assert not (directory / 'lock').exists()
    hints = ('Nothing is saved yet; the same command starts again.',)
    if directory.exists():  # the signal came late, perhaps after a step
        command = f'{REPOSITORY}/launch.py resume {directory}'
        hints += (  # or before the settings were complete
            f'No step is saved yet; to start again with the same settings: {command}',
            f'is saved; to go on from there: {command}',
            f'The reward model is finished and saved; to go on with the policy: {command}',
        )
    assert training.errors().endswith(hints)


def read_only(dir):
    raise OSError(errno.EROFS, 'Read-only file system', dir)


@pytest.mark.parametrize('place', ['file', '/proc/nothing', 'read-only'])
def test_a_cache_that_cannot_be_written(place, tmp_path, monkeypatch):
    """The first command of README makes a base model there."""
    cache = tmp_path / place
    if place == 'file':
        cache.write_text('')
    if place == 'read-only':
        monkeypatch.setattr('tempfile.TemporaryFile', read_only)
    monkeypatch.setenv('LMHP_CACHE', str(cache))
    result = invoke(f'train_policy mock_sentiment first --mpi 1 --save_dir {tmp_path}/runs')
    assert error_of(result).startswith(f'the cache folder {cache} cannot be written (')
    assert result.stderr.endswith('): set LMHP_CACHE to a folder that can\n')
    assert not (tmp_path / 'runs/first').exists()


def test_a_cache_that_others_wrote_is_read(monkeypatch):
    few = '--mpi 1 --save_dir None --labels.num_train 32 --normalize_samples 8'
    succeed(f'train_reward mock_sentiment a {few}')
    monkeypatch.setattr('tempfile.TemporaryFile', read_only)
    succeed(f'train_reward mock_sentiment b {few}')
