"""Damaged files: each kind of file that is read, damaged in each way, is refused in one line.

The line names the file. Only damage that leaves the content as it was may go unnoticed. Random
damage is in test_fuzz.py, damage to the entries of TensorFlow's index in test_tf_bundle.py.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sample_files import (
    LABELS,
    label_hparams,
    write_byte_pairs,
    write_hugging_face,
    write_model,
)

from lm_human_preferences import storage
from lm_human_preferences.checkpointing import checkpoints
from lm_human_preferences.checkpointing.tf_bundle import Bundle, BundleError
from lm_human_preferences.commands.sample_policy import load_run_hparams
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams import policy_options
from lm_human_preferences.labels import label_files
from lm_human_preferences.language import encodings
from lm_human_preferences.language.datasets import get_dataset
from lm_human_preferences.language.trained_models import TrainedModel


@pytest.fixture(autouse=True)
def encodings_of_the_model(monkeypatch):
    monkeypatch.delenv('LMHP_GPT2_ENCODINGS', raising=False)


# ---------------------------------------------------------------- kinds of files


@dataclass(frozen=True)
class Kind:
    """A kind of file: `write(folder)` makes it and all that belongs to it, `read(folder)` reads it.

    file: its place in the folder. What is read can be compared by ==.
    """

    file: str
    write: Callable[[Path], None]
    read: Callable[[Path], Any]


def write_labels(folder):
    (folder / 'labels.json').write_text(json.dumps(LABELS))


def read_labels(folder):
    labels, _ = label_files.load_labels(label_hparams(folder / 'labels.json'), encodings.Test)
    return {name: values.tolist() for name, values in labels.items()}


def write_texts(folder):
    (folder / 'texts.jsonl').write_text('"a text"\n"another text"\n')


def read_texts(folder):
    return list(get_dataset(str(folder / 'texts.jsonl')).generator('train'))


def write_settings(folder):
    hparams = policy_options.HParams()
    hparams.override_from_dict(
        {
            'task.query_length': 3,
            'task.response_length': 2,
            'task.query_dataset': 'test',
            'task.policy.initial_model': 'test',
            'rewards.trained_model': 'test',
        }
    )
    storage.write_json(str(folder / 'train_policy_hparams.json'), hparams.to_nested_dict())


def read_settings(folder):
    return load_run_hparams(str(folder)).to_nested_dict()


def read_model(folder):
    network = TrainedModel(str(folder)).build(scope='policy')
    return {name: tensor.tolist() for name, tensor in network.state_dict().items()}


def read_byte_pairs(folder):
    encodings._byte_pair_encoder.cache_clear()
    size = 256 + 5  # bytes, merges and the end of a text
    encoder = encodings.Encoding('main', size, size - 1, str(folder)).get_encoder()
    return encoder.encode('and the thé\0')


TENSORS = {
    'model/w': np.arange(12, dtype='f4').reshape(3, 4),
    'scalar': np.float32(2),
    'empty': np.zeros((0, 3), 'f8'),
    'é': np.array([True, False, True]),
    **{f'm/{i:03d}': np.full(i % 5, i, 'f4') for i in range(30)},
}
STATE = {'step': 7, 'random': [[1, 2**63]]}


def write_checkpoint(folder):
    checkpoints.save(str(folder), 'model.ckpt-7', TENSORS, state=STATE)


def read_checkpoint(folder):
    bundle = Bundle(str(folder / 'model.ckpt-7'))
    return {name: bundle[name].tolist() for name in bundle}


def read_state(folder):
    return checkpoints.restore_state(str(folder / 'model.ckpt-7'))


KINDS = {
    'labels': Kind('labels.json', write_labels, read_labels),
    'texts': Kind('texts.jsonl', write_texts, read_texts),
    'settings': Kind('train_policy_hparams.json', write_settings, read_settings),
    'sizes': Kind('hparams.json', write_model, read_model),
    'encoding': Kind('encoding', write_model, read_model),
    'parameters': Kind('checkpoints/model.ckpt.data-00000-of-00001', write_model, read_model),
    'Hugging Face sizes': Kind('config.json', write_hugging_face, read_model),
    'safetensors': Kind('model.safetensors', write_hugging_face, read_model),
    'vocabulary': Kind('encoder.json', write_byte_pairs, read_byte_pairs),
    'merges': Kind('vocab.bpe', write_byte_pairs, read_byte_pairs),
    'index': Kind('model.ckpt-7.index', write_checkpoint, read_checkpoint),
    'values': Kind('model.ckpt-7.data-00000-of-00001', write_checkpoint, read_checkpoint),
    'state': Kind('model.ckpt-7.resume.json', write_checkpoint, read_state),
}

# ---------------------------------------------------------------- ways of damage


def replace_by(content):
    return lambda path: path.write_bytes(content)


def change(edit):
    """Function that puts edit(content) into a file."""
    return lambda path: path.write_bytes(edit(path.read_bytes()))


def make_directory(path):
    path.unlink()
    path.mkdir()


DAMAGE = {
    'missing': Path.unlink,
    'a directory': make_directory,
    'empty': replace_by(b''),
    'first byte alone': change(lambda data: data[:1]),
    'first half': change(lambda data: data[: len(data) // 2]),
    'last byte lost': change(lambda data: data[:-1]),
    'a byte too many': change(lambda data: data + b'\0'),
    'twice': change(lambda data: data * 2),
    'zeros': change(lambda data: bytes(len(data))),
    'noise': change(lambda data: random.Random(0).randbytes(len(data))),
    'no UTF-8': change(lambda data: b'\xff' + data),
    'a web page': replace_by(b'<html>503 Service Unavailable</html>'),
    'a number': replace_by(b'3'),
    'null': replace_by(b'null'),
    'an empty list': replace_by(b'[]'),
    'an empty object': replace_by(b'{}'),
    'another object': replace_by(b'{"a": 1}'),
    'an open bracket': replace_by(b'{'),
    'deep brackets': replace_by(b'[' * 100_000),
}


# What leaves the content as it was.
HARMLESS = {
    ('texts', 'last byte lost'),  # a line feed
    ('merges', 'a byte too many'),
    ('parameters', 'first half'),  # the second half is of the reward model
    ('parameters', 'last byte lost'),
    ('parameters', 'a byte too many'),
    ('parameters', 'twice'),
    ('index', 'twice'),  # it is read from its end
    ('values', 'a byte too many'),
    ('values', 'twice'),
}
# What is another content, and as good as the one before.
GOOD = {
    ('texts', 'twice'): ['a text', 'another text'] * 2,
    ('state', 'missing'): None,  # a checkpoint of the original
}
# Lines that name something else than the file.
NAMED_INSTEAD = {
    ('encoding', 'missing'): "its sizes have n_vocab 27, encoding 'main' has 50257",
    ('Hugging Face sizes', 'missing'): '/hparams.json: no such file or directory',
}


def outcome(kind, folder):
    """(what reading gives, the line that refuses it): one of them is None."""
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


@pytest.mark.parametrize(
    'name, damage, message',
    [
        ('labels', 'missing', ': no such file or directory'),
        ('labels', 'a directory', ' is not a file'),
        ('labels', 'empty', ' is not JSON: Expecting value: line 1 column 1 (char 0)'),
        (
            'labels',
            'no UTF-8',
            " cannot be read as UTF-8 text: 'utf-8' codec can't decode byte 0xff in position 0:"
            ' invalid start byte',
        ),
        ('encoding', 'a number', ': unknown encoding 3; there are main, test, reviews'),
        ('texts', 'a number', ', line 1 is not a JSON string, as every line must be'),
        ('vocabulary', 'another object', ' is not an object of 261 tokens; get it again'),
        ('merges', 'first half', ' has 1 merges, not 4; get it again'),
        (
            'index',
            'a web page',
            ' is damaged or no checkpoint: it does not end as the index of a TensorFlow checkpoint',
        ),
        (
            'index',
            'no UTF-8',
            ' is damaged or no checkpoint: the checksum of a block does not match',
        ),
        ('values', 'empty', " is truncated: 'm/001' ends at byte 4, the file at 0"),
        ('values', 'zeros', " is damaged: the checksum of 'm/001' does not match"),
        ('state', 'last byte lost', ' is damaged: its checksum does not match'),
    ],
)
def test_messages_in_full(name, damage, message, tmp_path):
    kind = KINDS[name]
    kind.write(tmp_path)
    DAMAGE[damage](tmp_path / kind.file)
    assert outcome(kind, tmp_path)[1] == f'{tmp_path / kind.file}{message}'


# ---------------------------------------------------------------- every bit and every length


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


def test_every_flipped_bit_of_the_values_is_noticed(checkpoint):
    path = checkpoint / KINDS['values'].file
    for content in with_flipped_bits(path.read_bytes()):
        path.write_bytes(content)
        with pytest.raises(BundleError, match='is damaged: the checksum of .* does not match'):
            read_checkpoint(checkpoint)


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


@pytest.mark.parametrize('name', ['index', 'values'])
def test_every_truncation_is_noticed(checkpoint, name):
    path = checkpoint / KINDS[name].file
    content = path.read_bytes()
    for size in range(0, len(content), 7):
        path.write_bytes(content[:size])
        with pytest.raises(BundleError):
            read_checkpoint(checkpoint)


# ---------------------------------------------------------------- files that do not fit together


def test_the_state_of_another_checkpoint(checkpoint):
    checkpoints.save(str(checkpoint), 'model.ckpt-8', {'v': np.zeros(1)}, state={})
    state = checkpoint / 'model.ckpt-7.resume.json'
    (checkpoint / 'model.ckpt-8.resume.json').replace(state)
    with pytest.raises(UserError) as e:
        read_state(checkpoint)
    index = checkpoint / 'model.ckpt-7.index'
    assert str(e.value) == f'{state} does not belong to {index}: one of them is damaged'


def swap_two_tokens(folder):
    path = folder / 'encoder.json'
    vocabulary = json.loads(path.read_text())
    vocabulary['th'], vocabulary['the'] = vocabulary['the'], vocabulary['th']
    path.write_text(json.dumps(vocabulary))


def rename_a_merge(folder):
    path = folder / 'vocab.bpe'
    path.write_bytes(path.read_bytes().replace(b'th e\n', b'q q\n'))


@pytest.mark.parametrize('change', [swap_two_tokens, rename_a_merge])
def test_a_vocabulary_and_other_merges(tmp_path, change):
    write_byte_pairs(tmp_path)
    change(tmp_path)
    _, error = outcome(KINDS['merges'], tmp_path)
    assert 'do not belong together' in error and error.isprintable()
    assert 'encoder.json' in error and 'vocab.bpe' in error
