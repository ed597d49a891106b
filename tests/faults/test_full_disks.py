"""Targets that are full, read-only, a file or empty: one line each, and nothing half-written."""

import errno
import os

import pytest
from command_line import invoke, last_error_of, succeed
from full_disks import largest_file

from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.errors import UserError, disk_errors_reported
from lm_human_preferences.hparams import reward_options
from lm_human_preferences.runs import run_dir
from lm_human_preferences.storage import files

SMALL = (
    '--mpi 1 --ppo.total_episodes 64 --rewards.train_new_model.labels.num_train 64'
    ' --rewards.train_new_model.normalize_samples 16'
)


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp('saved')
    succeed(f'train_policy test run --save_dir {directory} {SMALL}')
    return directory / 'run'


def refuse(error):
    def call(*args, **settings):
        raise OSError(error, os.strerror(error))

    return call


@pytest.mark.parametrize(
    'what, target', [('', 'new'), ('/reward_model', 'new'), ('', 'file/new'), ('', '')]
)
def test_export(what, target, saved, tmp_path):
    (tmp_path / 'file').touch()
    before = sorted(tmp_path.rglob('*'))
    output = tmp_path / target if target else "''"
    with largest_file(3000):
        message = last_error_of(invoke(f'export {saved}{what} {output}'))
    assert 'cannot be written: ' in message
    assert sorted(tmp_path.rglob('*')) == before


def test_a_folder_of_labels(tmp_path, monkeypatch):
    monkeypatch.setattr(os, 'fsync', refuse(errno.ENOSPC))
    message = last_error_of(invoke(f'ask test {tmp_path}/labels'))
    assert message.startswith(f'{tmp_path}/labels/') and 'No space left' in message
    monkeypatch.undo()
    succeed(f'ask test {tmp_path}/labels')


def test_the_lock_of_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr(os, 'write', refuse(errno.ENOSPC))
    hparams = reward_options.CommandHParams()
    hparams.run.save_dir = str(tmp_path / 'run')
    with pytest.raises(UserError, match='--save_dir: .*/lock cannot be written: No space left'):
        run_dir.lock_run_dir(hparams, Comm()).__enter__()
    assert not (tmp_path / 'run').exists()


def test_whatever_is_written_elsewhere(tmp_path):
    """The error of a full disk has no name of its own."""
    file = tmp_path / 'file'
    told = pytest.raises(UserError, match=f'{file} cannot be .* make room')
    with largest_file(10), told, disk_errors_reported():
        files.write_bytes(str(file), b'-' * 11)
    with file.open('ab', buffering=0) as opened, largest_file(10), told, disk_errors_reported():
        files.append(opened, b'-' * 11, sync=False)
    assert file.read_bytes() == b''
    with pytest.raises(FileNotFoundError), disk_errors_reported():
        (tmp_path / 'nothing').read_bytes()
