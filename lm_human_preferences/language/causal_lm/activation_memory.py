"""Activation memory of a block of transformers, from tensors without values."""

import contextlib
import logging
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from lm_human_preferences.language.attention import attend_by_two_products
from lm_human_preferences.training.model_sizes import FLOAT, HALF

OWN_ATTENTION = 'sdpa'  # of models that can take ours: it knows neither soft caps nor sinks
TRACED_ATTENTION = 'lm_human_preferences_traced'
LENGTH = 1009  # tokens; a prime, as no size of a weight is a multiple of it


class Kept(NamedTuple):
    """Activation memory: bytes of_a_token, numbers of_a_pair of tokens; see model_sizes.Sizes."""

    of_a_token: int
    of_a_pair: int


class _PassedError(Exception):
    """Raised behind the block: what comes after it is not needed."""


def kept_by(causal_lm: Any, reduced: bool) -> Kept:
    """Return the activation memory of a block, in bf16 if `reduced`; a guess if values decide."""
    logger = logging.getLogger('torch._subclasses.fake_tensor')
    was_disabled, logger.disabled = logger.disabled, True
    try:
        return _traced(causal_lm.config, reduced)
    except Exception:  # of any kind: it is a family's own code
        return _guessed(causal_lm, reduced)
    finally:
        logger.disabled = was_disabled


def _traced(config: Any, reduced: bool) -> Kept:
    """Return it for a config; raises whatever code raises that would need values."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import AutoModelForCausalLM

    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[_storage_of(tensor)] = tensor
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    # Closed in any case: a block that raises would leave the hooks to all that comes after it.
    in_block = contextlib.ExitStack()

    def leave(*_: Any) -> None:
        in_block.close()
        raise _PassedError

    with FakeTensorMode(), torch.autocast('cpu', torch.bfloat16, enabled=reduced), in_block:
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        take_attention(model, TRACED_ATTENTION, _attention)
        block = blocks_of(model)[0]
        block.register_forward_pre_hook(lambda *_: in_block.enter_context(hooks))
        block.register_forward_hook(leave)
        dtype = torch.bfloat16 if reduced else torch.float32
        mask = torch.zeros(1, 1, LENGTH, LENGTH, dtype=dtype)
        with contextlib.suppress(_PassedError):
            model.base_model(
                input_ids=torch.zeros(1, LENGTH, dtype=torch.int64),
                attention_mask=mask,
                position_ids=torch.arange(LENGTH).unsqueeze(0),
                use_cache=False,
            )
        for own in (mask, *model.parameters()):
            kept.pop(_storage_of(own), None)
        return _sum_of(kept.values())


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention as on CPUs, where attention weights are kept."""
    attended = attend_by_two_products(query, key, value, attention_mask, scaling)
    return attended.unflatten(-1, (query.shape[1], -1)), None


def take_attention(model: Any, name: str, attention: Callable[..., Any]) -> bool:
    """Set a model of transformers up for an implementation of attention; False if it cannot."""
    from transformers import AttentionInterface, AttentionMaskInterface

    own = model.get_correct_attn_implementation(None)
    if own != OWN_ATTENTION or not model.is_backend_compatible():
        return False
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, AttentionMaskInterface()[OWN_ATTENTION])
    model.set_attn_implementation(name)
    return True


def _guessed(causal_lm: Any, reduced: bool) -> Kept:
    """Return an estimate: inputs and outputs of all products with weights."""
    config = causal_lm.config
    chosen = getattr(config, 'num_experts_per_tok', None) or 1
    numbers = 4 * config.hidden_size
    for weight in blocks_of(causal_lm)[0].parameters():
        if weight.ndim > 1:
            times = chosen if weight.ndim > 2 else 1  # a weight for each expert
            numbers += times * sum(weight.shape[-2:])
    return Kept(numbers * (HALF if reduced else FLOAT), 0)


def blocks_of(causal_lm: Any) -> list[nn.Module]:
    """Return the blocks of a model: the list of as many modules as its config says."""
    count = causal_lm.config.num_hidden_layers
    for module in causal_lm.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    return [causal_lm.base_model]


def _sum_of(tensors: Iterable[torch.Tensor]) -> Kept:
    """Sum over tensors with different storages; copies of weights have no tokens in them."""
    bytes_of_all = 0
    numbers_of_pairs = 0
    for tensor in tensors:
        stored = tensor.untyped_storage().nbytes()
        number = stored // tensor.itemsize
        if number % LENGTH**2 == 0:
            numbers_of_pairs += number
        elif number % LENGTH == 0:
            bytes_of_all += stored
    return Kept(bytes_of_all // LENGTH, numbers_of_pairs // LENGTH**2)


def _storage_of(tensor: torch.Tensor) -> int:
    """Return the identity of a storage without values, while one of its tensors lives."""
    return tensor.untyped_storage()._cdata
