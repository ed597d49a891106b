"""One small file of every kind that the programs read, written where a test wants them."""

import json

import torch
from safetensors.torch import save_file

from lm_human_preferences import storage
from lm_human_preferences.checkpointing import checkpoints
from lm_human_preferences.hparams import reward_options
from lm_human_preferences.language import encodings, model
from lm_human_preferences.language.networks.gpt2_files import HUGGING_FACE_SIZES, TensorFlowNames
from lm_human_preferences.language.networks.weights import scoped

SIZES = dict(n_vocab=27, n_ctx=8, n_embd=4, n_head=2, n_layer=1)
SAMPLES = {'sample': [3, 4], 'sample0': [3, 4], 'sample1': [4, 5]}
LABELS = [{'query': [0, 1, 27], **SAMPLES, 'best': 1, 'score': 0.5, 'difference': -2}] * 4
MERGES = '#version: 0.2\nt h\nĠ th\nth e\nĠ the\n'.encode()


def write_lines(path, values):
    path.write_text(''.join(f'{json.dumps(value)}\n' for value in values))
    return path


def label_hparams(path, **changes):
    """Settings of a reward training on the labels at `path`, of the shape of LABELS by default."""
    hparams = reward_options.CommandHParams()
    settings = {'labels.source': str(path), 'labels.type': 'best_of_2', 'batch_size': 2}
    settings |= {'task.query_length': 3, 'task.response_length': 2}
    hparams.override_from_dict(settings | changes)
    return hparams


def tf_variables(named, scope=''):
    """Return tensors by own names, a dict or pairs, by the original's names below `scope`."""
    tensors = {scoped(scope, name): tensor for name, tensor in dict(named).items()}
    return TensorFlowNames().variables(tensors)


def write_model(folder):
    """A model in TensorFlow's format: a policy and a reward model with all that belongs to them."""
    network = _network()
    tensors = {
        **tf_variables(network.named_parameters(), 'policy'),
        **tf_variables(network.named_parameters(), 'reward_model'),
        'reward_model/reward_norm/gain': torch.ones(()),
        'reward_model/reward_norm/bias': torch.zeros(()),
    }
    storage.write_json(str(folder / 'hparams.json'), SIZES)
    storage.write_json(str(folder / 'encoding'), 'test')
    checkpoints.save(str(folder / 'checkpoints'), 'model.ckpt', tensors)


def write_hugging_face(folder, **sizes):
    sizes = {**SIZES, **sizes}
    config = {theirs: sizes[ours] for ours, (theirs, _) in HUGGING_FACE_SIZES.items()}
    storage.write_json(str(folder / 'config.json'), {'model_type': 'gpt2', **config})
    storage.write_json(str(folder / 'encoding'), 'test')
    parameters = _network(**sizes).transformer.named_parameters()
    tensors = {name: tensor.detach() for name, tensor in parameters}
    save_file(tensors, str(folder / 'model.safetensors'))


def _network(**sizes):
    return model.Model(model.HParams(**{**SIZES, **sizes}), ['reward', 'value']).initialize()


def write_byte_pairs(folder):
    """encoder.json and vocab.bpe of a small vocabulary; returns their Encoding."""
    names = [*encodings._byte_of(), 'th', 'Ġth', 'the', 'Ġthe', encodings.END_OF_TEXT]
    vocabulary = {name: number for number, name in enumerate(names)}
    (folder / 'encoder.json').write_text(json.dumps(vocabulary))
    (folder / 'vocab.bpe').write_bytes(MERGES)
    return encodings.Encoding('main', len(names), len(names) - 1, str(folder))
