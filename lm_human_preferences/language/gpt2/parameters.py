"""GPT-2's parameters."""

import torch
from torch import nn

from lm_human_preferences.language.gpt2.sizes import HParams


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
