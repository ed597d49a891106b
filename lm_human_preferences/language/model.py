"""GPT-2 with padding, scalar heads and a cache (the original's language/model.py)."""

import re
from collections.abc import Container, Iterable
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lm_human_preferences.checkpointing.variables import VariableNames
from lm_human_preferences.hparams.model_sizes import HParams
from lm_human_preferences.language.attention import (
    KVCache,
    Unpadding,
    attend,
    attention_mask,
    last_present,
    positions_for,
)
from lm_human_preferences.language.parameters import gpt2_parameters
from lm_human_preferences.language.tf_names import TensorFlowNames
from lm_human_preferences.training import precision
from lm_human_preferences.utils.core import index_each

__all__ = ['HParams', 'Model']


class ScalarHead(nn.Module):
    """One number for each position: `h (..., n_embd)` -> `(...)`."""

    def __init__(self, n_embd: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(n_embd))
        self.b = nn.Parameter(torch.empty(()))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        """`h (..., n_embd)` -> `(...)`, in the type of its own parameters."""
        return (h.to(self.w.dtype) * self.w).sum(-1) + self.b


class Model(nn.Module):
    """A language model whose outputs at padding repeat those of the last real token before it.

    scalar_heads: names of heads, 'value' (starts at zero) or 'reward' (starts random). Parameters
    are uninitialised until `initialize` or until all of them are loaded.

    gradient_checkpointing: whether a backward pass recomputes each block from its inputs, so that
    only these are kept.

    variable_names: what checkpoints call the parameters, and what a training keeps of them.
    """

    variable_names: VariableNames = TensorFlowNames()

    def __init__(self, hparams: HParams, scalar_heads: Iterable[str] = ()) -> None:
        super().__init__()
        self.hparams = hparams
        self.gradient_checkpointing = False
        # Any: the entries of a ModuleDict are also its attributes, whose types nothing declares.
        self.transformer: Any = gpt2_parameters(hparams)
        self.heads = nn.ModuleDict({name: ScalarHead(hparams.n_embd) for name in scalar_heads})

    @torch.no_grad()
    def initialize(self, names: Container[str] | None = None) -> Self:
        """Set the original's starting values.

        names: of the parameters to set; None: all.
        """
        n_embd = self.hparams.n_embd
        n_layer = self.hparams.n_layer
        stdevs = {
            'wpe.weight': 0.01,
            'wte.weight': 0.02,
            'attn.c_attn.weight': n_embd**-0.5,
            'attn.c_proj.weight': (n_embd * n_layer) ** -0.5,
            'mlp.c_fc.weight': n_embd**-0.5,
            'mlp.c_proj.weight': (4 * n_embd * n_layer) ** -0.5,
            'heads.value.w': 0.0,
            'heads.reward.w': (n_embd + 1) ** -0.5,
        }
        for name, parameter in self.named_parameters():
            if names is not None and name not in names:
                continue
            kind = re.sub(r'^transformer\.(h\.\d+\.)?', '', name)
            if kind in stdevs:
                parameter.normal_(std=stdevs[kind])
            else:
                parameter.fill_(1.0 if re.fullmatch(r'ln_\w\.weight', kind) else 0.0)
        return self

    def hidden(
        self,
        tokens: torch.Tensor,
        mask: torch.Tensor | None = None,
        cache: KVCache | None = None,
        output_positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Outputs of the last layer: `tokens (batch, length)` -> (batch, length, n_embd).

        mask: bool (batch, past + length), False at padding, or None where all tokens are real.
        cache: keys and values of the tokens before (extended in place), or None.
        output_positions: int64 (n,), columns of `tokens`: the result is (batch, n, n_embd), and the
        last layer computes nothing else.
        """
        batch, length = tokens.shape
        past = cache.length if cache is not None else 0
        if mask is None:
            mask = torch.ones(batch, past + length, dtype=torch.bool, device=tokens.device)
        positions = positions_for(mask)[:, past:]
        allowed = attention_mask(mask, length)
        real = mask[:, past:]
        columns = last_present(real)
        if output_positions is not None:
            columns = columns[:, output_positions]
            return self._outputs(tokens, positions, allowed, real, columns, cache)
        # Padding is computed too: before the first token there is no real one to repeat.
        everywhere = torch.ones_like(real)
        h = self._outputs(tokens, positions, allowed, everywhere, None, cache)
        return index_each(h, columns)

    def last_hidden(
        self, prompt: torch.Tensor, completions: torch.Tensor, padding_token: int
    ) -> torch.Tensor:
        """Outputs at the last real token of `prompt (batch, prompt_length)` with each completion.

        completions: (batch, n, length), each of which follows the prompt on its own; an empty one
        is read at the end of the prompt. Returns (batch, n, n_embd). The prompt is computed once:
        all completions stand behind it in one row, in which none attends to another.
        """
        n, length = completions.shape[1:]
        start = prompt.shape[1]
        device = prompt.device
        prompts = prompt.unsqueeze(1).expand(-1, n, -1)
        tokens, mask = self.mask_padding(torch.cat([prompts, completions], dim=2), padding_token)
        positions = positions_for(mask)
        # Column of the last real token: with its own copy of the prompt, then in the shared row.
        ends = (mask * torch.arange(start + length, device=device)).amax(-1)
        ends += (ends >= start) * torch.arange(0, n * length, length, device=device)

        def one_row(values: torch.Tensor) -> torch.Tensor:
            """(batch, n, start + length) -> (batch, start + n * length): the prompt only once."""
            return torch.cat([values[:, 0, :start], values[:, :, start:].flatten(1)], dim=1)

        completion = torch.arange(n, device=device).repeat_interleave(length)
        same_completion = completion == completion[:, None]
        segment_mask = F.pad(same_completion, (start, 0, start, 0), value=True)
        real = one_row(mask)
        allowed = attention_mask(real, len(segment_mask), segment_mask)
        return self._outputs(one_row(tokens), one_row(positions), allowed, real, ends)

    def _outputs(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        allowed: torch.Tensor,
        real: torch.Tensor,
        output_positions: torch.Tensor | None,
        cache: KVCache | None = None,
    ) -> torch.Tensor:
        """The network: outputs of the last layer at `tokens (batch, length)`.

        output_positions: columns (batch, n), where only some of them are wanted. positions: (batch,
        length). allowed: see attention_mask. real: bool (batch, length), where anything is computed
        at all.
        """
        if positions.numel() and positions.max() >= self.hparams.n_ctx:
            raise ValueError(
                f"{positions.max() + 1} tokens are more than the model's context of"
                f' {self.hparams.n_ctx}'
            )
        network = self.transformer
        unpadding = Unpadding(real)
        x = network.wte(unpadding.unpad(tokens)) + network.wpe(unpadding.unpad(positions))
        bias = torch.zeros(allowed.shape, dtype=precision.autocast_dtype(x.dtype), device=x.device)
        bias = bias.masked_fill_(~allowed, -torch.inf).unsqueeze(1).expand(len(tokens), -1, -1, -1)
        compute = self._block
        if self.gradient_checkpointing and torch.is_grad_enabled():
            compute = partial(
                checkpoint, self._block, use_reentrant=False, preserve_rng_state=False
            )
        last = len(network.h) - 1
        with precision.autocast(x.device):
            for i in range(len(network.h)):
                # Earlier blocks compute all positions, which the last one needs keys of.
                read = output_positions if i == last else None
                x, unpadding = compute(i, x, unpadding, bias, cache, read)
        if cache is not None:
            cache.length += tokens.shape[1]
        return unpadding.pad(network.ln_f(x))

    def _block(
        self,
        i: int,
        x: torch.Tensor,
        unpadding: Unpadding,
        bias: torch.Tensor,
        cache: KVCache | None,
        output_positions: torch.Tensor | None,
    ) -> tuple[torch.Tensor, Unpadding]:
        """Block `i` on `x (tokens, n_embd)`: (its output, the Unpadding that the output has).

        bias: see attend. With `output_positions (batch, n)`, keys and values are those of all
        tokens and everything after them is computed at these columns only.
        """
        block = self.transformer.h[i]
        qkv = unpadding.pad(precision.linear(block.ln_1(x), **block.attn.c_attn))
        q, k, v = qkv.unflatten(2, (3, self.hparams.n_head, -1)).permute(2, 0, 3, 1, 4)
        if cache is not None:
            k, v = cache.extend(i, k, v)
        if output_positions is not None:
            q = _take_queries(q, output_positions)
            bias = _take_queries(bias, output_positions)
            x = index_each(unpadding.pad(x), output_positions).flatten(0, 1)
            unpadding = Unpadding(torch.ones_like(output_positions, dtype=torch.bool))
        attended = unpadding.unpad(attend(q, k, v, bias))
        x = x + precision.linear(attended, **block.attn.c_proj)
        inner = precision.linear(block.ln_2(x), **block.mlp.c_fc, gelu=True)
        return x + precision.linear(inner, **block.mlp.c_proj), unpadding

    def mask_padding(
        self, tokens: torch.Tensor, padding_token: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens with 0 for padding, bool mask of the real ones).

        Raises ValueError for a row of padding only.
        """
        mask = tokens != padding_token
        empty = (~mask.any(-1)).nonzero()
        if len(empty):
            raise ValueError(f'row {int(empty[0][0])} has no token, only padding')
        return tokens * mask, mask

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        """Language-model logits of `h (..., n_embd)` -> `(..., n_vocab)`."""
        return precision.logits(h, self.transformer.wte.weight)


def _take_queries(values: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """The values at `columns (batch, n)` of the queries: (batch, heads, n, d).

    values: (batch, heads, queries, d).
    """
    index = columns[:, None, :, None].expand(-1, values.shape[1], -1, values.shape[3])
    return values.gather(2, index)
