"""Each kind of file, damaged in each way, is refused in one line that names the file."""

from pathlib import Path

import numpy as np
import pytest
from file_kinds import KINDS, read_checkpoint, read_state, write_checkpoint
from sample_files import write_byte_pairs

from lm_human_preferences.checkpointing import checkpoints
from lm_human_preferences.checkpointing.tf_bundle import BundleError
from lm_human_preferences.errors import UserError


@pytest.fixture(autouse=True)
def only_local_files(monkeypatch):
    monkeypatch.delenv('LMHP_GPT2_ENCODINGS', raising=False)
    monkeypatch.setenv('LMHP_OFFLINE', '1')


def replace_by(content):
    return lambda path: path.write_bytes(content)


def change(edit):
    return lambda path: path.write_bytes(edit(path.read_bytes()))


def make_directory(path):
    path.unlink()
    path.mkdir()


DAMAGE = {
    'missing': Path.unlink,
    'a directory': make_directory,
    'empty': replace_by(b''),
    'last byte lost': change(lambda data: data[:-1]),
    'a byte too many': change(lambda data: data + b'\0'),
    'twice': change(lambda data: data * 2),
    'no UTF-8': change(lambda data: b'\xff' + data),
    'an empty list': replace_by(b'[]'),
    'another object': replace_by(b'{"a": 1}'),
    'deep brackets': replace_by(b'[' * 100_000),
}


# What leaves the content as it was.
HARMLESS = {
    ('texts', 'last byte lost'),  # a line feed
    ('merges', 'a byte too many'),
    ('parameters', 'last byte lost'),
    ('parameters', 'a byte too many'),
    ('parameters', 'twice'),
    ('reward model', 'a byte too many'),
    ('reward model', 'twice'),
    ('index', 'twice'),  # it is read from its end
    ('values', 'a byte too many'),
    ('values', 'twice'),
}
# What is another content, and as good as the one before.
GOOD = {
    ('queries', 'an empty list'): [],
    ('texts', 'twice'): ['a text', 'another text'] * 2,
    ('state', 'missing'): None,  # a checkpoint of the original
}
# Lines that name something else than the file.
NAMED_INSTEAD = {
    ('encoding', 'missing'): "n_vocab is 27, but the encoding 'main' has 50257 tokens",
    ('Hugging Face sizes', 'missing'): '/hparams.json: no such file or directory',
}


def outcome(kind, folder):
    try:
        return kind.read(folder), None
    except UserError as e:
        return None, str(e)


@pytest.mark.parametrize('damage', DAMAGE)
@pytest.mark.parametrize('name', KINDS)
def test_a_damaged_file_is_named(name, damage, tmp_path):
    kind = KINDS[name]
    kind.write(tmp_path)
    good, error = outcome(kind, tmp_path)
    assert error is None
    DAMAGE[damage](tmp_path / kind.file)
    read, error = outcome(kind, tmp_path)
    if (name, damage) in HARMLESS:
        assert error is None and read == good
    elif (name, damage) in GOOD:
        assert error is None and read == GOOD[name, damage]
    else:
        assert error is not None and error.isprintable(), error
        named = NAMED_INSTEAD.get((name, damage), kind.file)
        assert named in error and str(tmp_path) in error


@pytest.fixture
def checkpoint(tmp_path):
    write_checkpoint(tmp_path)
    return tmp_path


def with_flipped_bits(content):
    """Copies of `content`, each with one bit flipped: a bit of each byte."""
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 1 << position % 8
        yield bytes(damaged)


@pytest.mark.parametrize(
    'name, told',
    [
        ('values', "is damaged: the checksum of '.*' does not match"),
        ('state', 'is damaged, or does not belong to .*model.ckpt-7.index'),
    ],
)
def test_every_flipped_bit_is_noticed(checkpoint, name, told):
    path = checkpoint / KINDS[name].file
    for content in with_flipped_bits(path.read_bytes()):
        path.write_bytes(content)
        with pytest.raises(BundleError, match=told):
            KINDS[name].read(checkpoint)


def test_every_flipped_bit_of_the_index_is_noticed_or_harmless(checkpoint):
    good, path = read_checkpoint(checkpoint), checkpoint / KINDS['index'].file
    unnoticed = 0
    for content in with_flipped_bits(path.read_bytes()):
        path.write_bytes(content)
        read, error = outcome(KINDS['index'], checkpoint)
        if error is None:
            unnoticed += 1
            assert read == good
    assert unnoticed <= 48 + 13  # the filling of the footer, and the meta-index, which is not read


def test_the_state_of_another_checkpoint(checkpoint):
    checkpoints.save(str(checkpoint), 'model.ckpt-8', {'v': np.zeros(1)}, state={})
    state = checkpoint / 'model.ckpt-7.resume.json'
    (checkpoint / 'model.ckpt-8.resume.json').replace(state)
    with pytest.raises(UserError) as e:
        read_state(checkpoint)
    index = checkpoint / 'model.ckpt-7.index'
    assert str(e.value) == f'{state} is damaged, or does not belong to {index}'


def test_a_vocabulary_and_other_merges(tmp_path):
    write_byte_pairs(tmp_path)
    path = tmp_path / 'vocab.bpe'
    path.write_bytes(path.read_bytes().replace(b'th e\n', b'q q\n'))
    _, error = outcome(KINDS['merges'], tmp_path)
    assert 'do not belong together' in error and error.isprintable()
    assert 'encoder.json' in error and 'vocab.bpe' in error
