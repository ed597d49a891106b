"""The fast pass of a model of transformers: its real tokens as one row, attention and cache ours.

All layers but attention treat every token alike, so that a batch without its padding can be one row
to them. Attention is an implementation of transformers' AttentionInterface, which is given what it
needs to know of the batch; without that it is the one that the models have as their own.

Models that have no such interface, or compute something else by it, keep their own pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lm_human_preferences.language.attention import KVCache, Unpadding, attend
from lm_human_preferences.training import precision

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OWN_ATTENTION = 'sdpa'  # of models that can take ours: it knows neither soft caps nor sinks
OUR_ATTENTION = 'lm_human_preferences'


@dataclass
class Rows:
    """The rows (batch, length) that the tokens of one row are from. cache: of tokens before."""

    unpadding: Unpadding
    cache: KVCache | None


class Linear(nn.Linear):
    """A linear layer that multiplies as this program does: see `precision.linear_transposed`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`input (..., inputs)` -> (..., outputs)."""
        return precision.linear_transposed(input, self.weight, self.bias)


def prepare(causal_lm: PreTrainedModel) -> bool:
    """Let the model compute as above where it is given `rows`; False if its family cannot."""
    from transformers import AttentionInterface, AttentionMaskInterface

    model: Any = causal_lm
    for module in model.base_model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear
    own = model.get_correct_attn_implementation(None)
    if own != OWN_ATTENTION or not model.is_backend_compatible():
        return False
    AttentionInterface.register(OUR_ATTENTION, _attention)
    AttentionMaskInterface.register(OUR_ATTENTION, AttentionMaskInterface()[OWN_ATTENTION])
    model.set_attn_implementation(OUR_ATTENTION)
    return True


def outputs(
    model: Any,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    bias: torch.Tensor,
    real: torch.Tensor,
    cache: KVCache | None,
) -> torch.Tensor:
    """The last hidden state (batch, length, n_embd) of a base model, anything where not `real`.

    tokens, positions, real: (batch, length). bias: see attention.attend. cache: is extended, but
    for its length.
    """
    unpadding = Unpadding(real)
    h = model(
        input_ids=unpadding.unpad(tokens).unsqueeze(0),
        attention_mask=bias,
        position_ids=unpadding.unpad(positions).unsqueeze(0),
        use_cache=False,
        rows=Rows(unpadding, cache),
    ).last_hidden_state
    return unpadding.pad(h[0])


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    rows: Rows | None = None,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of `query (1, heads, tokens, d)` as transformers calls it, within its own row.

    attention_mask: the bias of `outputs`. Returns (1, tokens, heads, d).
    """
    if rows is None or attention_mask is None:
        from transformers import AttentionInterface

        own = AttentionInterface()[OWN_ATTENTION]
        return own(module, query, key, value, attention_mask, scaling=scaling, **settings)
    if settings.get('position_bias') is not None:
        raise NotImplementedError('a bias of its own for positions')
    # Rotations leave float32 behind.
    dtype = precision.autocast_dtype(query.dtype)
    q, k, v = (
        rows.unpadding.pad(each[0].transpose(0, 1).to(dtype)).transpose(1, 2)
        for each in (query, key, value)
    )
    if rows.cache is not None:
        k, v = rows.cache.extend(module.layer_idx, k, v)
    attended = rows.unpadding.unpad(attend(q, k, v, attention_mask, scaling))
    return attended.unflatten(-1, (query.shape[1], -1)).unsqueeze(0), None
