"""GPT-2's parameters, and their names and shapes in TensorFlow's checkpoints."""

import re
from collections.abc import Mapping
from typing import TypeVar

import numpy as np
import torch
from torch import nn

from lm_human_preferences.hparams.model import HParams

Array = TypeVar('Array', torch.Tensor, np.ndarray)


def as_tf(name: str, tensor: Array) -> Array:
    """`tensor` (torch or numpy) in the shape of the TensorFlow variable `name`.

    The original's projections are convolutions of width 1, so their weights, and Adam's slots for
    them (`name`/adam and `name`/adam_1), have one more dimension.
    """
    is_projection = re.search(r'/w(/adam(_1)?)?$', name) is not None
    return tensor[None] if is_projection and tensor.ndim == 2 else tensor


def in_tf_shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """{TensorFlow variable name: tensor} as views in TensorFlow's shapes, without gradients."""
    return {name: as_tf(name, tensor.detach()) for name, tensor in tensors.items()}


def tf_name(name: str) -> str:
    """The GPT-2 release's name of a parameter of transformers' GPT2Model.

    'h.0.attn.c_attn.weight' -> 'h0/attn/c_attn/w'.
    """
    path = re.sub(r'^h\.', 'h', name).replace('.', '/')
    if path.endswith('/bias'):
        return path.removesuffix('ias')
    path = path.removesuffix('/weight')
    if path in ('wte', 'wpe'):
        return path
    return f'{path}/g' if 'ln_' in path else f'{path}/w'


def gpt2_parameters(sizes: HParams) -> nn.ModuleDict:
    """GPT-2's parameters, uninitialised, as modules with the names of transformers' GPT2Model.

    Not that class itself, because transformers takes seconds to import.
    """
    n_embd = sizes.n_embd

    def embedding(count: int) -> nn.Embedding:
        return nn.Embedding.from_pretrained(torch.empty(count, n_embd), freeze=False)

    def layer(inputs: int, outputs: int) -> nn.ParameterDict:
        return nn.ParameterDict(
            {'weight': torch.empty(inputs, outputs), 'bias': torch.empty(outputs)}
        )

    blocks = [
        nn.ModuleDict(
            {
                'ln_1': nn.LayerNorm(n_embd),
                'attn': nn.ModuleDict(
                    {'c_attn': layer(n_embd, 3 * n_embd), 'c_proj': layer(n_embd, n_embd)}
                ),
                'ln_2': nn.LayerNorm(n_embd),
                'mlp': nn.ModuleDict(
                    {'c_fc': layer(n_embd, 4 * n_embd), 'c_proj': layer(4 * n_embd, n_embd)}
                ),
            }
        )
        for _ in range(sizes.n_layer)
    ]
    return nn.ModuleDict(
        {
            'wte': embedding(sizes.n_vocab),
            'wpe': embedding(sizes.n_ctx),
            'h': nn.ModuleList(blocks),
            'ln_f': nn.LayerNorm(n_embd),
        }
    )
