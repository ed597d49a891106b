"""Files of GPT-2: model sizes, and tensors' names and shapes in the 2019 program's checkpoints."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError
from lm_human_preferences.language.networks.scopes import Sizes
from lm_human_preferences.training.optimizer import BETAS
from lm_human_preferences.utils.hyperparams import note_unknown, option

_MOMENTS = {'/mean': '/adam', '/square': '/adam_1'}  # {our suffix of a moment: TensorFlow's}
_REWARD_NORM = {'reward_gain': 'reward_norm/gain', 'reward_bias': 'reward_norm/bias'}
_COUNTS = {
    'ppo/step': 'global_step',
    'ppo/start_time': 'start_time',
    'ppo/last_time': 'last_time',
    'train_reward/step': 'train_step',
}
# {our name of an optimizer's step count: the optimizer's scope in the original's checkpoints}
_OPTIMIZERS = {
    'ppo/optimizer_steps': 'ppo_opt',
    'train_reward/optimizer_steps': 'train_reward/minibatch/opt',
}
# The original's projections are convolutions of width 1: the first dimension of their weights is 1.
_PROJECTION = re.compile(r'\.(c_attn|c_proj|c_fc)\.weight(/mean|/square)?$')
# {size: (its key in transformers' config.json, its default)}
HUGGING_FACE_SIZES = dict(
    n_vocab=('vocab_size', 50257),
    n_ctx=('n_positions', 1024),
    n_embd=('n_embd', 768),
    n_head=('n_head', 12),
    n_layer=('n_layer', 12),
)
# Alternative keys for a model's sizes in transformers' config.json
_OTHER_NAMES = {
    *'hidden_size num_attention_heads num_hidden_layers max_position_embeddings'.split()
}
MOST_LAYERS, MOST_PARAMETERS = 1000, 2e10  # A file with more layers or parameters is damaged.
TANH_GELUS = ('gelu_new', 'gelu_pytorch_tanh')  # transformers' names for GELU with tanh


class TensorFlowNames:
    """Converter from our names and shapes to the original's (see VariableNames)."""

    def name_of(self, name: str) -> str:
        """Map 'policy/transformer.h.0.attn.c_attn.weight' to 'policy/model/h0/attn/c_attn/w'."""
        if name in _COUNTS:
            return _COUNTS[name]
        for own, slot in _MOMENTS.items():
            if name.endswith(own):
                return self.name_of(name.removesuffix(own)) + slot
        scope, slash, parameter = name.rpartition('/')
        return scope + slash + _parameter_name(parameter)

    def variables(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return views of `tensors` with the names and shapes of the original's variables."""
        variables = {}
        for name, tensor in tensors.items():
            # TensorFlow's Adam saves powers of its betas instead of the number of steps.
            if name in _OPTIMIZERS:
                for i, beta in enumerate(BETAS, start=1):
                    power = torch.tensor(np.float32(beta ** (int(tensor) + 1)))
                    variables[f'{_OPTIMIZERS[name]}/beta{i}_power'] = power
                continue
            value = tensor.detach()
            variables[self.name_of(name)] = value[None] if _PROJECTION.search(name) else value
        if 'train_reward/step' in tensors:
            # The original's reward training saves a global_step as well, which stays 0.
            variables['global_step'] = torch.tensor(0)
        return variables


def _parameter_name(name: str) -> str:
    """Map 'transformer.h.0.ln_1.bias' to 'model/h0/ln_1/b'."""
    if name in _REWARD_NORM:
        return _REWARD_NORM[name]
    path = re.sub(r'^h\.', 'h', name.removeprefix('transformer.'))
    module, _, kind = path.replace('.', '/').rpartition('/')
    if module in ('wte', 'wpe'):
        return f'model/{module}'
    if kind == 'weight':
        kind = 'g' if 'ln_' in module else 'w'
    elif kind == 'bias':
        kind = 'b'
    return f'model/{module}/{kind}'


@dataclass
class HParams(Sizes):
    """Sizes of a GPT-2 model, as in hparams.json; dropout rates are read and written, not used."""

    embd_pdrop: float = option(0.1, 'dropout of the embeddings')
    attn_pdrop: float = option(0.1, 'dropout of the attention')
    resid_pdrop: float = option(0.1, 'dropout of the residual branches')
    head_pdrop: float = option(0.1, 'dropout before the scalar heads')

    @property
    def kept_numbers(self) -> int:
        return 16 * self.n_embd

    def parameters(self) -> int:
        of_a_block = (12 * self.n_embd + 13) * self.n_embd
        return self.n_layer * of_a_block + (self.n_vocab + self.n_ctx + 2) * self.n_embd

    def validate(self) -> None:
        """Raise TypeError or ValueError for sizes that are wrong, too large or inconsistent."""
        super().validate()
        if any(isinstance(value, bool) for value in vars(self).values()):
            raise TypeError('sizes must be numbers, not true or false')
        if self.n_layer > MOST_LAYERS or self.parameters() > MOST_PARAMETERS:
            raise ValueError('sizes are larger than those of any GPT-2')
        if self.n_embd % self.n_head:
            width, heads = self.option_name('n_embd'), self.option_name('n_head')
            raise ValueError(f'{width} {self.n_embd} is not a multiple of {heads} {self.n_head}')


def test_hparams() -> HParams:
    """Return the sizes of the tiny model of the original's tests."""
    return HParams(n_vocab=27, n_ctx=8, n_layer=2, n_embd=7, n_head=1)


def load_hparams(path: str) -> HParams:
    return _checked(storage.read_json(path), path)


def is_own(config: Any, n_vocab: int) -> bool:
    """Return whether a config.json describes a GPT-2 that our own Model computes exactly."""
    if not isinstance(config, dict) or config.get('model_type') != 'gpt2':
        return False
    width = config.get('n_embd', 768)
    if not isinstance(width, int):
        return True  # load_config will report a width that is no integer.
    name_of_vocabulary, tokens = HUGGING_FACE_SIZES['n_vocab']
    return (
        config.get(name_of_vocabulary, tokens) == n_vocab
        and config.get('activation_function', 'gelu_new') in TANH_GELUS
        and config.get('n_inner') in (None, 4 * width)
        and config.get('layer_norm_epsilon', 1e-5) == 1e-5
        and config.get('scale_attn_weights', True)
        and not config.get('scale_attn_by_inverse_layer_idx', False)
        and config.get('tie_word_embeddings', True)
        and not config.get('add_cross_attention', False)
        and _OTHER_NAMES.isdisjoint(config)
    )


def load_config(path: str) -> HParams:
    """Read the sizes in a config.json that `is_own` accepts."""
    config = storage.read_json(path)
    sizes = {name: config.get(key, default) for name, (key, default) in HUGGING_FACE_SIZES.items()}
    return _checked(sizes, path)


def _checked(sizes: Any, path: str) -> HParams:
    """Return the sizes that were read from `path`, as HParams; UserError if they are invalid."""
    found = HParams()
    try:
        found.override_from_nested_dict(sizes, keep_unknown=True)
        found.validate()
    except (AttributeError, TypeError, ValueError) as e:
        raise UserError(f'{path} does not give the sizes of a model, such as n_layer: {e}') from e
    note_unknown(path, tuple(found.unknown))
    return found
