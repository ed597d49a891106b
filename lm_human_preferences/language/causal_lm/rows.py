"""Fast forward pass of a transformers model: no padding, and our own attention and cache.

All layers but attention treat tokens separately, so real tokens of all rows can be passed to them
as one row. For attention, we implement transformers' AttentionInterface, and pass it the layout of
the batch. The last layer needs the keys and values of all tokens, but outputs only at some tokens.
So it runs twice: up to its attention for all tokens, then as a whole for the tokens to read. If it
ran once for all tokens, a PPO pass would take 4 % longer (a Llama of 12 layers, on a CPU).

Models without this interface, or whose outputs differ with it, keep their own forward pass.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lm_human_preferences.language.causal_lm.sizes import blocks_of
from lm_human_preferences.language.networks.attention import Rows, Unpadding, attend, take_queries
from lm_human_preferences.language.networks.network import Linear
from lm_human_preferences.machine import precision

OUR_ATTENTION = 'lm_human_preferences'
OWN_ATTENTION = 'sdpa'  # sdpa, like our attention that replaces it, has no soft caps or sinks


@dataclass(frozen=True)
class LayerRows(Rows):
    """Layout of a batch, passed to the layers of a transformers model as the argument `rows`."""

    read_last: torch.Tensor | None = None  # columns (batch, n) whose outputs are wanted
    stops: bool = False  # whether attention raises _StoppedError, to skip the rest of the layer
    # The last layer runs a second time, on fewer tokens, with these keys and values of all tokens.
    all_keys_values: tuple[torch.Tensor, torch.Tensor] | None = None


class _StoppedError(Exception):
    """Exception that stops a layer at its attention and holds the keys and values of all tokens."""

    def __init__(self, reason: str, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__(reason)
        self.keys_values = (keys, values)


def prepare(causal_lm: Any) -> bool:
    """Prepare the model to take the argument `rows`; return False if it does not support that."""
    for module in causal_lm.base_model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear
    if not _take_attention(causal_lm):
        return False
    blocks_of(causal_lm)[-1].register_forward_pre_hook(_reduce_to_wanted_tokens, with_kwargs=True)
    return True


def _take_attention(model: Any) -> bool:
    """Replace the model's attention by ours; return False if the model does not support that."""
    from transformers import AttentionInterface, AttentionMaskInterface

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
    rows: Rows,
) -> torch.Tensor:
    """Return hidden states (batch, length, n_embd), or those at `rows.read (batch, n)` if set."""
    unpadding = rows.unpadding
    h = model(
        input_ids=unpadding.unpad(tokens).unsqueeze(0),
        attention_mask=rows.bias,
        position_ids=unpadding.unpad(positions).unsqueeze(0),
        use_cache=False,
        rows=LayerRows(unpadding, rows.bias, rows.is_causal, rows.cache, read_last=rows.read),
    ).last_hidden_state
    if rows.read is not None:
        return h[0].unflatten(0, rows.read.shape)
    return unpadding.pad(h[0])


def _reduce_to_wanted_tokens(
    layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the last layer's arguments for only the tokens whose outputs are needed, or None."""
    rows = kwargs.get('rows')
    if rows is None or rows.read_last is None:
        return None
    recomputes = layer.training
    layer.training = False  # no gradient checkpointing in a pass that stops at the attention
    try:
        layer.forward(*args, **{**kwargs, 'rows': replace(rows, stops=True)})
    except _StoppedError as stopped:
        keys_values = stopped.keys_values
    else:
        raise NotImplementedError('the last layer of the model has no attention')
    finally:
        layer.training = recomputes
    tokens = args[0].shape[1]
    last = replace(rows, read=rows.read_last)

    def at_wanted_tokens(value: Any) -> Any:
        """Return a per-token argument for the needed tokens only, and other arguments unchanged."""
        if isinstance(value, tuple):
            return tuple(at_wanted_tokens(part) for part in value)
        if not isinstance(value, torch.Tensor) or value.shape[:2] != (1, tokens):
            return value
        return last.wanted(value[0]).unsqueeze(0)

    bias = take_queries(kwargs['attention_mask'], rows.read_last)
    kwargs = {
        **{name: at_wanted_tokens(value) for name, value in kwargs.items()},
        'attention_mask': bias,
        'rows': LayerRows(Unpadding(rows.read_last.shape), bias, all_keys_values=keys_values),
    }
    return tuple(at_wanted_tokens(value) for value in args), kwargs


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    rows: LayerRows | None = None,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """Return attention outputs (1, tokens, heads, d) of `query (1, heads, tokens, d)`."""
    if rows is None or attention_mask is None:
        from transformers import AttentionInterface

        own = AttentionInterface()[OWN_ATTENTION]
        return own(module, query, key, value, attention_mask, scaling=scaling, **settings)
    if settings.get('position_bias') is not None:
        raise NotImplementedError('the model has a position bias of its own')
    # Rotary embeddings return float32 even under autocast to bfloat16.
    dtype = precision.autocast_dtype(query.dtype)
    q, k, v = (each[0].transpose(0, 1).to(dtype) for each in (query, key, value))
    if rows.stops:
        keys, values = rows.keys_and_values(module.layer_idx, k, v)
        raise _StoppedError('the last layer ended at its attention', keys, values)
    if rows.all_keys_values is not None:
        q = rows.unpadding.pad(q).transpose(1, 2)
        attended = attend(q, *rows.all_keys_values, attention_mask, scaling).flatten(0, 1)
    else:
        if attention_mask is not rows.bias:  # the model replaced the mask by its own
            rows = replace(rows, bias=attention_mask, is_causal=False)
        attended = rows.attend(module.layer_idx, q, k, v, scaling)
    return attended.unflatten(-1, (query.shape[1], -1)).unsqueeze(0), None
