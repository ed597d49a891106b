"""Names and shapes of GPT-2's parameters in the original's checkpoints."""

import re
from collections.abc import Mapping

import numpy as np
import torch

from lm_human_preferences.training.optimizer import BETAS

_MOMENTS = {'/mean': '/adam', '/square': '/adam_1'}  # {our suffix: tf.train.AdamOptimizer's}
_REWARD_NORM = {'reward_gain': 'reward_norm/gain', 'reward_bias': 'reward_norm/bias'}
_COUNTS = {
    'ppo/step': 'global_step',
    'ppo/start_time': 'start_time',
    'ppo/last_time': 'last_time',
    'train_reward/step': 'train_step',
}
# {our counter of an optimizer's steps: the scope of its variables in the original}
_OPTIMIZERS = {
    'ppo/optimizer_steps': 'ppo_opt',
    'train_reward/optimizer_steps': 'train_reward/minibatch/opt',
}
# The original's projections are convolutions of width 1, whose weights have a first dimension 1.
_PROJECTION = re.compile(r'\.(c_attn|c_proj|c_fc)\.weight(/mean|/square)?$')


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
        """Return {original's name: view in its shape}; counts of steps become powers of beta."""
        variables = {}
        for name, tensor in tensors.items():
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
