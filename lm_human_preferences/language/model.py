"""GPT-2 with padding, scalar heads and a cache."""

import re
from collections.abc import Container, Iterable, Mapping
from functools import partial
from typing import Any, Self, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lm_human_preferences.hparams.model import HParams
from lm_human_preferences.training import precision
from lm_human_preferences.training.memory import ROOM
from lm_human_preferences.utils.core import cumulative_max, index_each

__all__ = ['HParams', 'Model']

Array = TypeVar('Array', torch.Tensor, np.ndarray)


def positions_for(mask: torch.Tensor) -> torch.Tensor:
    """Position of each token: how many real ones precede it. `mask (..., length)` bool -> int64."""
    counts = mask.long()
    return counts.cumsum(-1) - counts


def attention_mask(
    mask: torch.Tensor, queries: int, segment_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Which keys the last `queries` positions may attend to: `mask (batch, keys)` -> bool `(batch,
    queries, keys)`.

    A token sees itself and the real tokens before it, of those only the ones that `segment_mask
    (queries, keys)` allows. A position with nothing to see (padding before the first token) sees
    itself, so that nothing becomes nan; its output is never used. Where all tokens are real, the
    result has a batch of 1.
    """
    keys = mask.shape[1]
    at = torch.arange(keys, device=mask.device)
    causal, itself = at <= at[keys - queries :, None], at == at[keys - queries :, None]
    if segment_mask is not None:
        causal = causal & segment_mask
    if mask.all():
        return causal.unsqueeze(0)
    allowed = causal & mask.unsqueeze(1)
    return allowed | (itself & ~allowed.any(-1, keepdim=True))


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Attention of `q (batch, n_head, queries, d)` to `k` and `v (batch, n_head, keys, d)`: (batch,
    queries, n_embd).

    bias `(batch, 1, queries, keys)` is added to the scores of all heads: -inf where a key may not
    be seen. On CPUs two plain products are faster than PyTorch's fused attention, at these lengths
    and with `training.precision`'s.
    """
    if q.is_cuda:
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    else:
        q_rows, k_rows, alpha = q.flatten(0, 1), k.flatten(0, 1), q.shape[-1] ** -0.5
        bias = bias.expand(-1, q.shape[1], -1, -1).flatten(0, 1)
        if (
            q.shape[2] == 1
        ):  # keys times query: the other way round, keys with room in between would be copied
            scores = torch.baddbmm(bias.mT, k_rows, q_rows.mT, alpha=alpha).mT
        else:
            scores = torch.baddbmm(bias, q_rows, k_rows.mT, alpha=alpha)
        attended = torch.bmm(scores.softmax(-1), v.flatten(0, 1)).unflatten(0, q.shape[:2])
    return attended.transpose(1, 2).flatten(2)


class KVCache:
    """Keys and values of the tokens so far, in memory with room for those to come."""

    def __init__(self, past: torch.Tensor | None = None) -> None:
        """past: `(batch, n_layer, 2, n_head, past_length, d)` as `Model.forward` takes it."""
        self.layers = (
            [] if past is None else list(past.permute(1, 2, 0, 3, 4, 5))
        )  # (2, batch, n_head, room, d) each
        self.length = 0 if past is None else past.shape[-2]

    def extend(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Add `keys` and `values (batch, n_head, new, d)` of the tokens after `length`; returns
        those of all tokens."""
        new = torch.stack([keys, values])
        end = self.length + new.shape[3]
        if layer == len(self.layers):
            self.layers.append(new[..., :0, :])
        if end > self.layers[layer].shape[3]:
            self.layers[layer] = F.pad(
                self.layers[layer], (0, 0, 0, end + ROOM - self.layers[layer].shape[3])
            )
        self.layers[layer][..., self.length : end, :] = new
        return self.layers[layer][..., :end, :]

    def present(self, start: int) -> torch.Tensor:
        """Those from token `start` on, `(batch, n_layer, 2, n_head, length - start, d)`."""
        return torch.stack(self.layers)[..., start : self.length, :].permute(2, 0, 1, 3, 4, 5)


class Unpadding:
    """A grid `(batch, length)` of tokens as rows of real tokens only, for the layers that treat
    every token alike."""

    def __init__(self, real: torch.Tensor) -> None:
        """real: bool `(batch, length)`."""
        self.shape = real.shape
        self.cells = None if real.all() else real.flatten().nonzero().squeeze(1)  # of each row

    def pack(self, grid: torch.Tensor) -> torch.Tensor:
        """`grid (batch, length, ...)` -> `(rows, ...)`."""
        flat = grid.flatten(0, 1)
        return flat if self.cells is None else flat.index_select(0, self.cells)

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """`packed (rows, ...)` -> `(batch, length, ...)`, with zeros at padding."""
        if self.cells is not None:
            packed = packed.new_zeros(self.shape.numel(), *packed.shape[1:]).index_copy(
                0, self.cells, packed
            )
        return packed.unflatten(0, self.shape)


def last_present(mask: torch.Tensor) -> torch.Tensor:
    """Column of the last real token up to each of `mask (batch, length)`, whose output stands for
    padding's."""
    return cumulative_max(torch.where(mask, torch.arange(mask.shape[1], device=mask.device), 0))


def as_tf(name: str, tensor: Array) -> Array:
    """`tensor` (torch or numpy) in the shape of TensorFlow variable `name`: projections are
    convolutions of width 1.

    The same goes for Adam's slots `name`/adam and `name`/adam_1.
    """
    return tensor[None] if tensor.ndim == 2 and re.search(r'/w(/adam(_1)?)?$', name) else tensor


def in_tf_shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """{TensorFlow variable name: tensor} as views, without gradients, in the shapes that
    TensorFlow's have."""
    return {name: as_tf(name, tensor.detach()) for name, tensor in tensors.items()}


def tf_name(name: str) -> str:
    """'h.0.attn.c_attn.weight' -> 'h0/attn/c_attn/w': the GPT-2 release's name of a parameter of
    GPT2Model."""
    path = re.sub(r'^h\.', 'h', name).replace('.', '/')
    if path.endswith('/bias'):
        return path.removesuffix('ias')
    kind = '' if path in ('wte/weight', 'wpe/weight') else '/g' if 'ln_' in path else '/w'
    return path.removesuffix('/weight') + kind


def gpt2_parameters(sizes: HParams) -> nn.ModuleDict:
    """GPT-2's parameters, with any values, as modules. transformers, whose names these are, takes
    seconds to import."""
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


class ScalarHead(nn.Module):
    """One number per position: `h (..., n_embd)` -> `(...)`."""

    def __init__(self, n_embd: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(n_embd))
        self.b = nn.Parameter(torch.empty(()))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        """`h (..., n_embd)` -> `(...)`, in the type of its own parameters."""
        return (h.to(self.w.dtype) * self.w).sum(-1) + self.b

    def regularizer(self) -> torch.Tensor:
        """The L2 penalty that is 1 on average for a fresh head of the original (it never trained
        with it)."""
        return self.w.square().sum() / 2


class Model(nn.Module):
    """The original's language/model.py: a language model whose outputs at padding repeat the last
    real token's.

    scalar_heads: names of heads, 'value' (starts at zero) or 'reward' (starts random). Parameters
    are uninitialised until `initialize` or until all of them are loaded. gradient_checkpointing:
    whether a backward pass computes each block anew from its inputs, which are then all that is
    kept of it.
    """

    def __init__(self, hparams: HParams, scalar_heads: Iterable[str] = ()) -> None:
        super().__init__()
        self.hparams, self.gradient_checkpointing = hparams, False
        # Any: the entries of a ModuleDict are also its attributes, whose types nothing declares.
        self.transformer: Any = gpt2_parameters(hparams)
        self.heads = nn.ModuleDict({name: ScalarHead(hparams.n_embd) for name in scalar_heads})

    @torch.no_grad()
    def initialize(self, names: Container[str] | None = None) -> Self:
        """Draw the starting values of the original for all parameters, or for the TensorFlow
        `names` only."""
        n_embd, n_layer = self.hparams.n_embd, self.hparams.n_layer
        stdevs = {
            'wpe': 0.01,
            'wte': 0.02,
            'attn/c_attn/w': n_embd**-0.5,
            'attn/c_proj/w': (n_embd * n_layer) ** -0.5,
            'mlp/c_fc/w': n_embd**-0.5,
            'mlp/c_proj/w': (4 * n_embd * n_layer) ** -0.5,
            'heads/value/w': 0.0,
            'heads/reward/w': (n_embd + 1) ** -0.5,
        }
        for name, parameter in self.tf_parameters().items():
            if names is not None and name not in names:
                continue
            kind = re.sub(r'^model/(h\d+/)?', '', name)
            if kind in stdevs:
                parameter.normal_(std=stdevs[kind])
            else:
                parameter.fill_(1.0 if kind.endswith('/g') else 0.0)
        return self

    def tf_parameters(self, scope: str = '') -> dict[str, nn.Parameter]:
        """Parameters under the names of the GPT-2 release, in `scope`:
        {'policy/model/h0/attn/c_attn/w': Parameter}."""
        prefix = f'{scope}/model/' if scope else 'model/'
        named = {prefix + tf_name(name): p for name, p in self.transformer.named_parameters()}
        for name, p in self.heads.named_parameters():
            named[f'{prefix}heads/' + name.replace('.', '/')] = p
        return named

    def hidden(
        self,
        tokens: torch.Tensor,
        mask: torch.Tensor | None = None,
        cache: KVCache | None = None,
        output_positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Outputs of the last layer: `tokens (batch, length)` -> `(batch, length, n_embd)`.

        mask: bool `(batch, past + length)`, False where a token is padding, or None when all are
        real. cache: keys and values of the tokens before (extended in place), or None.
        output_positions: int64 (n,), columns of `tokens`; then the result is (batch, n, n_embd),
        and nothing else is computed.
        """
        (batch, length), past = tokens.shape, cache.length if cache is not None else 0
        if mask is None:
            mask = torch.ones(batch, past + length, dtype=torch.bool, device=tokens.device)
        positions, allowed, new = (
            positions_for(mask)[:, past:],
            attention_mask(mask, length),
            mask[:, past:],
        )
        columns = last_present(new)
        if output_positions is not None:
            return self._outputs(
                tokens, positions, allowed, new, columns[:, output_positions], cache
            )
        return index_each(
            self._outputs(tokens, positions, allowed, torch.ones_like(new), None, cache), columns
        )

    def last_hidden(
        self, stem: torch.Tensor, branches: torch.Tensor, padding_token: int
    ) -> torch.Tensor:
        """Outputs at the end of each of `branches (batch, n, length)`, each alone after `stem
        (batch, stem_length)`.

        Returns (batch, n, n_embd). A branch ends at its last real token, an empty one at the
        stem's. The stem, which is computed once, does not see the branches, nor do they see each
        other.
        """
        n, length = branches.shape[1:]
        start, device = stem.shape[1], stem.device
        each = torch.cat([stem.unsqueeze(1).expand(-1, n, -1), branches], dim=2)
        each, mask = self.mask_padding(each, padding_token)
        ends = (mask * torch.arange(start + length, device=device)).amax(-1)
        ends += (ends >= start) * torch.arange(0, n * length, length, device=device)

        def in_a_row(values: torch.Tensor) -> torch.Tensor:
            return torch.cat([values[:, 0, :start], values[:, :, start:].flatten(1)], dim=1)

        tokens, mask, positions = in_a_row(each), in_a_row(mask), in_a_row(positions_for(mask))
        branch = torch.arange(n, device=device).repeat_interleave(length)
        segment_mask = F.pad(branch == branch[:, None], (start, 0, start, 0), value=True)
        return self._outputs(
            tokens, positions, attention_mask(mask, len(segment_mask), segment_mask), mask, ends
        )

    def _outputs(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        allowed: torch.Tensor,
        real: torch.Tensor,
        output_positions: torch.Tensor | None,
        cache: KVCache | None = None,
    ) -> torch.Tensor:
        """The network: outputs of the last layer at all of `tokens (batch, length)`, or at columns
        `read (batch, n)`.

        positions: (batch, length); allowed: see attention_mask; real: bool (batch, length), where
        to compute at all.
        """
        if positions.numel() and positions.max() >= self.hparams.n_ctx:
            raise ValueError(
                f"{positions.max() + 1} tokens are more than the model's context of"
                f' {self.hparams.n_ctx}'
            )
        network, packing = self.transformer, Unpadding(real)
        x = network.wte(packing.pack(tokens)) + network.wpe(packing.pack(positions))
        bias = torch.zeros(allowed.shape, dtype=precision.autocast_dtype(x.dtype), device=x.device)
        bias = bias.masked_fill_(~allowed, -torch.inf).unsqueeze(1).expand(len(tokens), -1, -1, -1)
        compute = self._block
        if self.gradient_checkpointing and torch.is_grad_enabled():
            compute = partial(
                checkpoint, self._block, use_reentrant=False, preserve_rng_state=False
            )
        with precision.autocast(x.device):
            for i in range(len(network.h)):
                x, packing = compute(
                    i,
                    x,
                    packing,
                    bias,
                    cache,
                    output_positions if i == len(network.h) - 1 else None,
                )
        if cache is not None:
            cache.length += tokens.shape[1]
        return packing.unpack(network.ln_f(x))

    def _block(
        self,
        i: int,
        x: torch.Tensor,
        packing: Unpadding,
        bias: torch.Tensor,
        cache: KVCache | None,
        output_positions: torch.Tensor | None,
    ) -> tuple[torch.Tensor, Unpadding]:
        """Block `i` on `x (rows, n_embd)`, after its keys only at columns `read` if there are any:
        (x, its packing)."""
        block, n_head = self.transformer.h[i], self.hparams.n_head
        qkv = packing.unpack(precision.linear(block.ln_1(x), **block.attn.c_attn))
        q, k, v = qkv.unflatten(2, (3, n_head, -1)).permute(2, 0, 3, 1, 4)
        if cache is not None:
            k, v = cache.extend(i, k, v)
        if output_positions is not None:
            columns = output_positions[:, None, :, None]
            q, bias = (
                grid.gather(2, columns.expand(-1, grid.shape[1], -1, grid.shape[3]))
                for grid in (q, bias)
            )
            x, packing = (
                index_each(packing.unpack(x), output_positions).flatten(0, 1),
                Unpadding(torch.ones_like(output_positions) > 0),
            )
        x = x + precision.linear(packing.pack(attend(q, k, v, bias)), **block.attn.c_proj)
        inner = precision.linear(block.ln_2(x), **block.mlp.c_fc, gelu=True)
        return x + precision.linear(inner, **block.mlp.c_proj), packing

    def mask_padding(
        self, tokens: torch.Tensor, padding_token: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens with 0 for padding, bool mask of the real ones); ValueError for a row of padding
        only."""
        mask = tokens != padding_token
        empty = (~mask.any(-1)).nonzero()
        if len(empty):
            raise ValueError(f'row {int(empty[0][0])} has no token, only padding')
        return tokens * mask, mask

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        """Language-model logits of `h (..., n_embd)` -> `(..., n_vocab)`."""
        return precision.logits(h, self.transformer.wte.weight)

    def forward(
        self,
        X: torch.Tensor,
        *,
        past: torch.Tensor | None = None,
        past_tokens: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        padding_token: int | None = None,
    ) -> dict[str, torch.Tensor]:
        """Everything at every position, as the original returned it; training computes only what it
        reads.

        X: int64 `(batch, length)`. Padding is named by `mask` (bool, of past and X) or by
        `padding_token`, not both; the latter needs `past_tokens (batch, past_length)` beside `past
        (batch, n_layer, 2, n_head, past_length, d)`. Returns 'h' (batch, length, n_embd), 'present'
        (keys and values of X, shaped like past), 'lm_logits', 'lm_all_losses' (batch, length - 1),
        'lm_losses' (batch,), and of each head NAME 'NAME' (batch, length) and 'NAME_regularizer'.
        """
        if padding_token is not None:
            if mask is not None:
                raise ValueError('at most one of mask and padding_token may be given')
            if past is not None and past_tokens is None:
                raise ValueError('padding_token with past needs past_tokens')
            mask = torch.ne(X, padding_token)
            X = X * mask
            if past is not None:
                assert past_tokens is not None
                mask = torch.cat([torch.ne(past_tokens, padding_token), mask], dim=1)
        cache = KVCache(past)
        h = self.hidden(X, mask, cache)
        logits = self.logits(h)
        losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), X[:, 1:], reduction='none')
        results = {
            'h': h,
            'present': cache.present(cache.length - X.shape[1]),
            'lm_logits': logits,
            'lm_all_losses': losses,
            'lm_losses': losses.mean(-1),
        }
        for name, head in self.heads.items():
            assert isinstance(head, ScalarHead)
            results[name], results[f'{name}_regularizer'] = head(h), head.regularizer()
        return results
