"""GPT-2 with padding, scalar heads and a cache (the original's language/model.py)."""

import re
from collections.abc import Container, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, Self

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lm_human_preferences.checkpointing.names import VariableNames
from lm_human_preferences.language.networks.attention import KVCache, Rows
from lm_human_preferences.language.networks.gpt2_files import HParams, TensorFlowNames
from lm_human_preferences.language.networks.network import Network
from lm_human_preferences.machine import precision


class Projection(nn.Module):
    """Linear layer with an uninitialised `weight (inputs, outputs)`; see `precision.linear`."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(outputs))
        self.weight = nn.Parameter(torch.empty(inputs, outputs))

    def forward(self, x: torch.Tensor, *, gelu: bool = False) -> torch.Tensor:
        """Map `x (n, inputs)` to (n, outputs). gelu: whether to apply GELU to the result."""
        return precision.linear(x, self.weight, self.bias, gelu=gelu)


def gpt2_parameters(sizes: HParams) -> nn.ModuleDict:
    """Return uninitialised parameters of GPT-2, with the names of transformers' GPT2Model."""
    n_embd = sizes.n_embd

    def embedding(count: int) -> nn.Embedding:
        return nn.Embedding.from_pretrained(torch.empty(count, n_embd), freeze=False)

    def block() -> nn.ModuleDict:
        """Return the parameters of one block."""
        attn = {'c_attn': Projection(n_embd, 3 * n_embd), 'c_proj': Projection(n_embd, n_embd)}
        mlp = {'c_fc': Projection(n_embd, 4 * n_embd), 'c_proj': Projection(4 * n_embd, n_embd)}
        return nn.ModuleDict(
            {
                'ln_1': nn.LayerNorm(n_embd),
                'attn': nn.ModuleDict(attn),
                'ln_2': nn.LayerNorm(n_embd),
                'mlp': nn.ModuleDict(mlp),
            }
        )

    return nn.ModuleDict(
        {
            'wte': embedding(sizes.n_vocab),
            'wpe': embedding(sizes.n_ctx),
            'h': nn.ModuleList(block() for _ in range(sizes.n_layer)),
            'ln_f': nn.LayerNorm(n_embd),
        }
    )


class Model(Network):
    """GPT-2 network. scalar_heads: names of scalar heads, see Network.add_heads."""

    variable_names: VariableNames = TensorFlowNames()
    sizes: HParams

    def __init__(self, sizes: HParams, scalar_heads: Iterable[str] = ()) -> None:
        super().__init__(sizes)
        # The type is Any, as the entries of a ModuleDict have no declared types.
        self.transformer: Any = gpt2_parameters(sizes)
        self.add_heads(scalar_heads)

    @torch.no_grad()
    def initialize(self, names: Container[str] | None = None) -> Self:
        """Set parameters to the original's initial values. names: parameters to set; None: all."""
        n_embd = self.sizes.n_embd
        n_layer = self.sizes.n_layer
        stdevs = {
            'wpe.weight': 0.01,
            'wte.weight': 0.02,
            'attn.c_attn.weight': n_embd**-0.5,
            'attn.c_proj.weight': (n_embd * n_layer) ** -0.5,
            'mlp.c_fc.weight': n_embd**-0.5,
            'mlp.c_proj.weight': (4 * n_embd * n_layer) ** -0.5,
        }
        for name, parameter in self.transformer.named_parameters():
            if names is not None and f'transformer.{name}' not in names:
                continue
            kind = re.sub(r'^h\.\d+\.', '', name)
            if kind in stdevs:
                parameter.normal_(std=stdevs[kind])
            else:
                parameter.fill_(1.0 if re.fullmatch(r'ln_\w\.weight', kind) else 0.0)
        return super().initialize(names)

    def outputs(self, tokens: torch.Tensor, positions: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Return the network's outputs; the last block skips tokens that a caller does not need."""
        network, unpadding, kept = self.transformer, rows.unpadding, rows.kept
        x = network.wte(unpadding.unpad(tokens)) + network.wpe(unpadding.unpad(positions))
        compute = self._block
        if self.gradient_checkpointing and torch.is_grad_enabled():
            compute = partial(
                checkpoint, self._block, use_reentrant=False, preserve_rng_state=False
            )
        # Only the last block can skip tokens, as each block needs all tokens of the block before.
        all_rows = rows if rows.read is None else replace(rows, read=None)
        last = self.sizes.n_layer - 1
        with precision.autocast(x.device):
            for i, block in enumerate(network.h):
                if kept is not None and i in kept.blocks:
                    kept.states[i] = rows.wanted(x)
                x = compute(i, block, x, rows if i == last else all_rows)
        if rows.cache is not None:
            rows.cache.length += tokens.shape[1]
        h = network.ln_f(x)
        return unpadding.pad(h) if rows.read is None else h.unflatten(0, rows.read.shape)

    def new_cache(self, capacity: int) -> KVCache:
        return KVCache(capacity)

    def output_layer(self) -> tuple[torch.Tensor, None]:
        """Return the token embedding, which GPT-2 also uses as output layer, and no bias."""
        return self.transformer.wte.weight, None

    def _block(self, i: int, block: Any, x: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Return outputs of block `i` on `x (tokens, n_embd)`, for the needed tokens only."""
        attn, mlp = block.attn, block.mlp
        qkv = attn.c_attn(block.ln_1(x)).unflatten(1, (3, self.sizes.n_head, -1))
        attended = rows.attend(i, *qkv.unbind(1))
        x = rows.wanted(x) + attn.c_proj(attended)
        return x + mlp.c_proj(mlp.c_fc(block.ln_2(x), gelu=True))
