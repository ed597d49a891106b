"""Sampling from an autoregressive model; knows neither the encoding nor the network."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lm_human_preferences.utils.core import (
    MIN_TEMPERATURE,
    logprobs_from_logits,
    sample_from_logits,
    take_top_k_logits,
    take_top_p_logits,
)


def adjust_logits(
    logits: torch.Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> torch.Tensor:
    """The logits that are sampled from.

    They are `logits (..., n_vocab)` divided by the temperature, cut to top k and top p.
    """
    logits = logits.float() / max(temperature, MIN_TEMPERATURE)
    if top_k != 0:
        logits = take_top_k_logits(logits, top_k)
    if top_p != 1.0:
        logits = take_top_p_logits(logits, top_p)
    return logits


@torch.no_grad()
def sample_sequence(
    *,
    step: Callable[[torch.Tensor, Any, torch.Tensor], dict[str, Any]],
    context: torch.Tensor,
    length: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    extra_outputs: Sequence[str] = (),
) -> dict[str, torch.Tensor]:
    """Continue `context (batch, context_length)` by `length` tokens.

    step: function of (tokens, past, past_tokens) that returns a dict of the 'logits' (batch,
        n_vocab) at the last position, the new 'past', and each of `extra_outputs` (batch,). Its
        argument `past` is what it returned before, at first None.
    Returns a dict of 'tokens' (batch, context_length + length), 'logprobs' (batch, length) of the
    sampled tokens under the adjusted distribution, and each of `extra_outputs` (batch, length) at
    the position where the token was chosen.
    """
    tokens = context
    new = context
    past = None
    columns: dict[str, list[torch.Tensor]] = {name: [] for name in ('logprobs', *extra_outputs)}
    for _ in range(length):
        past_tokens = tokens[:, : tokens.shape[1] - new.shape[1]]
        output = step(new, past, past_tokens)
        past = output['past']
        logits = adjust_logits(output['logits'], temperature, top_k, top_p)
        sampled = sample_from_logits(logits)
        columns['logprobs'].append(logprobs_from_logits(logits=logits, labels=sampled))
        for name in extra_outputs:
            columns[name].append(output[name])
        new = sampled.unsqueeze(1)
        tokens = torch.cat([tokens, new], dim=1)
    results = {'tokens': tokens}
    for name, values in columns.items():
        if values:
            results[name] = torch.stack(values, dim=1)
        else:
            results[name] = torch.empty(context.shape[0], 0, device=context.device)
    return results
