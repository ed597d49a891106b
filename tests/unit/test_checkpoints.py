"""Saving: the original's files, twenty of them, and nothing lost whatever interrupts."""

import hashlib
import json
import os
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from full_disks import largest_file
from golden_data import found, golden

from lm_human_preferences import storage
from lm_human_preferences.checkpointing import checkpoints
from lm_human_preferences.checkpointing.checkpoints import (
    latest,
    parse_checkpoint_file,
    restore_state,
    save,
)
from lm_human_preferences.checkpointing.tf_bundle import Bundle
from lm_human_preferences.errors import UserError
from lm_human_preferences.storage.schema import matches_schema

DATA, INDEX = '.data-00000-of-00001', '.index'


def tensors(step, size=100):
    return {'model/w': np.full(size, step, 'f4'), 'global_step': np.int64(step)}


def files(directory):
    return {path.name: path.read_bytes() for path in Path(directory).iterdir()}


def step_of(prefix):
    read = {name: np.array(value) for name, value in Bundle(prefix).items()}
    assert set(read) == {'model/w', 'global_step'}
    assert (read['model/w'] == read['global_step']).all()
    return int(read['global_step'])


LATEST, ALL = 'model_checkpoint_path: ', 'all_model_checkpoint_paths: '


@pytest.mark.parametrize('name', found('**/checkpoint'))
def test_golden_checkpoint_file(tmp_path, name):
    """Saving what the original had saved, in its order, gives the text that it wrote."""
    text = golden(name).read_text()
    names = parse_checkpoint_file(text)
    assert str(golden(name).parent / names[-1]) == latest(golden(name).parent)
    for step, saved in enumerate(names):
        save(tmp_path, saved, tensors(step))
    assert (tmp_path / 'checkpoint').read_text() == text


@pytest.mark.parametrize(
    'text, names',
    [
        (f'{LATEST}"model.ckpt"\r\n{ALL}"model.ckpt"\r\n', ['model.ckpt']),
        (f'{ALL}"a"\n{ALL}"b"\n', ['a', 'b']),
        (f'{LATEST}"a"\n{ALL}"a"\n{ALL}"b"\n', ['b', 'a']),
        (f'{LATEST}"/home/x/m-9"\n{ALL}"/home/x/m-7"\n', ['m-7', 'm-9']),
        (r'model_checkpoint_path: "C:\\models\\124M\\model.ckpt"', ['model.ckpt']),
        ('model_checkpoint_path: "../../etc/passwd"\n', ['passwd']),
        ('model_checkpoint_path: ".."\n', []),
        ('model_checkpoint_path: "a\0b"\n', []),
        ('model_checkpoint_path: "' + 'a' * 300 + '"\n', []),
        (f'other: "x"\n{LATEST}"model.ckpt"\nlast_preserved: 1.5\n', ['model.ckpt']),
    ],
)
def test_parse(text, names):
    assert parse_checkpoint_file(text) == names


def test_latest(tmp_path):
    assert latest(tmp_path / 'none') is None and latest(tmp_path) is None
    save(tmp_path, 'model.ckpt-1', tensors(1))
    save(tmp_path, 'model.ckpt-2', tensors(2))
    assert latest(tmp_path) == str(tmp_path / 'model.ckpt-2')
    os.remove(tmp_path / 'model.ckpt-2.index')
    assert latest(tmp_path) == str(tmp_path / 'model.ckpt-1')
    (tmp_path / 'checkpoint').write_bytes(b'\xff\xfe\0')
    assert latest(tmp_path) is None


def test_keeps_twenty(tmp_path):
    for step in range(25):
        prefix = save(tmp_path, f'model.ckpt-{step}', tensors(step), state={'step': step})
        assert prefix == latest(tmp_path) == str(tmp_path / f'model.ckpt-{step}')
    suffixes = (DATA, INDEX, '.resume.json')
    names = {f'model.ckpt-{step}{suffix}' for step in range(5, 25) for suffix in suffixes}
    assert set(files(tmp_path)) == {'checkpoint', *names}
    assert all(step_of(tmp_path / f'model.ckpt-{step}') == step for step in range(5, 25))


def test_same_name_again(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, 'model.ckpt', tensors(step), max_to_keep=2)
    save(tmp_path, 'model.ckpt-4', tensors(4), max_to_keep=2)
    save(tmp_path, 'model.ckpt', tensors(5), max_to_keep=2)
    listed = parse_checkpoint_file((tmp_path / 'checkpoint').read_text())
    assert listed == ['model.ckpt-4', 'model.ckpt']
    assert step_of(tmp_path / 'model.ckpt') == 5 and step_of(tmp_path / 'model.ckpt-4') == 4


def test_only_ours_is_deleted(tmp_path):
    """Remains of a kill, and files of a checkpoint that rotates out, go; others stay."""
    save(tmp_path, 'model.ckpt-1', tensors(1))
    others = 'model.ckpt-1.index.bak model.ckpt-0.index model.ckpt-0.data-00000-of-00001'
    others += ' graph.pbtxt my.ckpt-1.index model.ckpt-1x.index checkpoint.old'
    others += ' model.ckpt-7.index.part notes.12.part'
    left = 'model.ckpt-9.resume.json model.ckpt-9.index model.ckpt-9.data-00000-of-00001'
    left += ' checkpoint.12.part model.ckpt-10.index.77.part model.ckpt.resume.json.77.part'
    left += ' model.ckpt-1.meta'
    for name in f'{others} {left}'.split():
        (tmp_path / name).write_text('x')
    save(tmp_path, 'model.ckpt-2', tensors(2), max_to_keep=1)
    own = {'checkpoint', f'model.ckpt-2{DATA}', 'model.ckpt-2.index'}
    assert set(files(tmp_path)) == own | {*others.split()}


def test_nothing_is_deleted_before_the_commit(tmp_path):
    save(tmp_path, 'model.ckpt-1', tensors(1), max_to_keep=1)
    before = files(tmp_path)
    with (
        mock.patch.object(checkpoints, '_commit', side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        save(tmp_path, 'model.ckpt-2', tensors(2), state={}, max_to_keep=1)
    assert files(tmp_path) == before


@pytest.mark.parametrize('name', ['model.ckpt-1', 'model.ckpt-2'])
def test_write_that_fails_half_way(tmp_path, name):
    save(tmp_path, 'model.ckpt-1', tensors(1), state={})
    before = files(tmp_path)
    with largest_file(100000), pytest.raises(UserError) as e:
        save(tmp_path, name, tensors(2, size=1 << 20), state={})
    assert f'cannot save {name} in {tmp_path}: File too large; it needs 5 MiB' in str(e.value)
    assert files(tmp_path) == before


CALLS = {'os.fsync': os.fsync, 'os.replace': os.replace, 'os.open': os.open, 'builtins.open': open}


@pytest.mark.parametrize('call', CALLS)
@pytest.mark.parametrize('passing', [0, 1, 2, 3, 4, 6])
def test_any_call_that_fails(tmp_path, call, passing):
    save(tmp_path, 'model.ckpt-1', tensors(1), state=1)
    before = files(tmp_path)
    calls = []

    def failing(*args, **kwargs):
        calls.append(args)
        if len(calls) == passing + 1:
            raise OSError(30, os.strerror(30))
        return CALLS[call](*args, **kwargs)

    failed = False
    with mock.patch(call, failing):
        try:
            save(tmp_path, 'model.ckpt-2', tensors(2), state=2)
        except UserError as e:
            failed = True
            assert 'Read-only file system' in str(e) and str(tmp_path) in str(e)
    assert failed == (len(calls) > passing)
    first = tmp_path / 'model.ckpt-1'
    assert step_of(first) == restore_state(str(first)) == 1
    after = files(tmp_path)
    if failed:
        assert step_of(latest(tmp_path)) == 1
        before.pop('checkpoint'), after.pop('checkpoint')
        assert after == before
    else:
        assert step_of(latest(tmp_path)) == 2


def test_directory_that_cannot_be_made(tmp_path):
    (tmp_path / 'file').write_text('')
    directory = tmp_path / 'file' / 'checkpoints'
    with pytest.raises(UserError, match=f'cannot save model.ckpt in {directory}: Not a directory;'):
        save(directory, 'model.ckpt', tensors(1))
    with pytest.raises(UserError, match=f'^cannot write {directory}/x.json: Not a directory$'):
        storage.write_json(directory / 'x.json', 1)


def test_state(tmp_path):
    state = {'kl_coef': 0.1 + 0.2, 'rng': [1, 2**63], 'names': ['é'], 'none': None}
    state['inf'] = float('inf')
    prefix = save(tmp_path, 'model.ckpt-1', tensors(1), state=state)
    assert restore_state(prefix) == state
    index = hashlib.sha256(Path(f'{prefix}.index').read_bytes()).hexdigest()
    earlier = {'sha256': 'x', 'index_sha256': index, 'state': state}  # as before
    Path(f'{prefix}.resume.json').write_text(json.dumps(earlier))
    assert restore_state(prefix) == state
    assert restore_state(save(tmp_path, 'model.ckpt-2', tensors(2))) is None


@pytest.mark.parametrize(
    'name',
    found('original_save_dir_*/**/hparams.json')
    + found('original_save_dir_*/**/encoding')
    + found('original_save_dir_*/*_hparams.json'),
)
def test_golden_json_file(tmp_path, name):
    storage.write_json(tmp_path / 'new' / 'file', json.loads(golden(name).read_text()))
    assert (tmp_path / 'new' / 'file').read_bytes() == golden(name).read_bytes()
    assert os.listdir(tmp_path / 'new') == ['file']


@pytest.mark.parametrize(
    'value, schema, matches',
    [
        ({'a': 1, 'more': 2}, {'a': int}, True),
        ({'a': 1.5}, {'a': int}, False),
        ([1, 2], [int], True),
        ([], [int], False),  # at least one
        ('x', [str], False),  # though all its letters match
        ([1, 'x'], (int, str), True),
        ([1, 'x', 2], (int, str), False),
        ({0: 1, 1: 'x'}, (int, int), False),
        (3, range(3, 5), True),
        (2, range(3, 5), False),
        (True, range(0, 5), False),
    ],
)
def test_what_matches_a_schema(value, schema, matches):
    assert matches_schema(value, schema) is matches
