"""Kinds of files that the programs read: how each is written, and what reading it gives."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from query_sequences import sequences_of
from sample_files import LABELS, label_hparams, write_byte_pairs, write_hugging_face, write_model

import launch
from lm_human_preferences import storage
from lm_human_preferences.checkpointing import checkpoints
from lm_human_preferences.checkpointing.tf_bundle import Bundle
from lm_human_preferences.cli import launch as jobs
from lm_human_preferences.datasets import books
from lm_human_preferences.hparams import policy_options
from lm_human_preferences.labels import training_data
from lm_human_preferences.language import encodings
from lm_human_preferences.language.datasets import get_dataset
from lm_human_preferences.language.trained_models import TrainedModel
from lm_human_preferences.rewards import TrainedRewardModel
from lm_human_preferences.runs.run_settings import load_run_hparams

QUERIES, RESPONSES = torch.zeros(1, 3, dtype=torch.int64), torch.ones(1, 2, dtype=torch.int64)


@dataclass(frozen=True)
class Kind:
    """A kind of file: `write(folder)` makes it at `file`, `read(folder)` reads and checks it."""

    file: str
    write: Callable[[Path], Any]
    read: Callable[[Path], Any]


def write_labels(folder):
    (folder / 'labels.json').write_text(json.dumps(LABELS))


def read_labels(folder):
    hparams = label_hparams(folder / 'labels.json')
    labels, *_ = training_data.load_labels(hparams, encodings.Test)
    queries = labels['query']
    assert queries.shape[1:] == (3,) and 0 <= queries.min() <= queries.max() <= 27
    return {name: values.tolist() for name, values in labels.items()}


def read_queries(folder):
    books._passages.cache_clear()
    return queries_of(get_dataset('books', labels=str(folder / 'labels.json')))


def queries_of(dataset):
    encoder = encodings.Test.get_encoder()
    sequences = list(sequences_of(dataset, 3, mode='train', encoder=encoder, repeat_count=1))
    for tokens in sequences:
        torch.tensor(tokens, dtype=torch.int64)
        assert len(tokens) == 3 and all(0 <= token <= 27 for token in tokens)
    return sequences


def write_texts(folder):
    (folder / 'texts.jsonl').write_text('"a text"\n"another text"\n')


def read_texts(folder):
    dataset = get_dataset(str(folder / 'texts.jsonl'))
    queries_of(dataset)
    texts = list(dataset.generator('train'))
    assert all(isinstance(text, str) for text in texts)
    return texts


def write_settings(folder):
    hparams = policy_options.HParams()
    names = ('task.query_dataset', 'task.policy.initial_model', 'rewards.trained_model')
    lengths = {'task.query_length': 3, 'task.response_length': 2}
    hparams.override_from_dict({**dict.fromkeys(names, 'test'), **lengths})
    storage.write_json(str(folder / 'train_policy_hparams.json'), hparams.to_nested_dict())


def read_settings(folder):
    return load_run_hparams(str(folder)).to_nested_dict()


def resume(folder):
    with mock.patch.object(jobs, 'start_job') as start_job:
        launch.resume({}, str(folder))
    (_, arguments, *_), _ = start_job.call_args
    settings = arguments['hparams'].to_nested_dict()
    settings['run'].pop('save_dir')
    return settings


def read_model(folder):
    network = TrainedModel(str(folder)).build(scope='policy')
    assert network.hidden(QUERIES).shape[:2] == (1, 3)
    return {name: tensor.tolist() for name, tensor in network.state_dict().items()}


def read_reward_model(folder):
    return TrainedRewardModel(str(folder), encodings.Test).score(QUERIES, RESPONSES).tolist()


def read_byte_pairs(folder):
    encodings._byte_pair_encoder.cache_clear()
    size = 256 + 5  # bytes, merges and the end of a text
    encoder = encodings.Encoding('main', size, size - 1, str(folder)).get_encoder()
    tokens = encoder.encode('and the thé\0')
    assert encoder.decode(tokens) == 'and the thé\0'
    return tokens


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


MODEL_DATA = 'checkpoints/model.ckpt.data-00000-of-00001'
KINDS = {
    'labels': Kind('labels.json', write_labels, read_labels),
    'queries': Kind('labels.json', write_labels, read_queries),
    'texts': Kind('texts.jsonl', write_texts, read_texts),
    'settings': Kind('train_policy_hparams.json', write_settings, read_settings),
    'resumed settings': Kind('train_policy_hparams.json', write_settings, resume),
    'sizes': Kind('hparams.json', write_model, read_model),
    'encoding': Kind('encoding', write_model, read_model),
    'parameters': Kind(MODEL_DATA, write_model, read_model),
    'reward model': Kind(MODEL_DATA, write_model, read_reward_model),
    'Hugging Face sizes': Kind('config.json', write_hugging_face, read_model),
    'safetensors': Kind('model.safetensors', write_hugging_face, read_model),
    'vocabulary': Kind('encoder.json', write_byte_pairs, read_byte_pairs),
    'merges': Kind('vocab.bpe', write_byte_pairs, read_byte_pairs),
    'index': Kind('model.ckpt-7.index', write_checkpoint, read_checkpoint),
    'values': Kind('model.ckpt-7.data-00000-of-00001', write_checkpoint, read_checkpoint),
    'state': Kind('model.ckpt-7.resume.json', write_checkpoint, read_state),
}
