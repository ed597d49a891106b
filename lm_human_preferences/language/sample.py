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

LEAVING = 0.2  # share of the rows that has ended when they leave: the cache is copied then


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
    is_end: Callable[[torch.Tensor, int], torch.Tensor] | None = None,
    padding_token: int = 0,
) -> dict[str, torch.Tensor]:
    """Continue `context (batch, context_length)` by `length` tokens, or until every row has ended.

    step: function of (tokens, past, past_tokens) that returns a dict of the 'logits' (batch,
        n_vocab) at the last position, the new 'past', and each of `extra_outputs` (batch,). Its
        argument `past` is what it returned before, at first None.
    is_end: function of sampled tokens (batch,) and their position that returns where a row ends:
        bool (batch,). Rows that have ended leave the batch, by `past.select(rows)`.
    Returns a dict of 'tokens' (batch, context_length + length), padded after the end of a row,
    'logprobs' (batch, length) under the adjusted distribution, and each of `extra_outputs` (batch,
    length) where the token was chosen; 0 after the end.
    """
    batch, start = context.shape
    tokens = context.new_full((batch, start + length), padding_token)
    tokens[:, :start] = context
    results = {
        name: torch.zeros(batch, length, device=context.device)
        for name in ('logprobs', *extra_outputs)
    }
    rows = torch.arange(batch, device=context.device)  # those that are computed
    ended = torch.zeros_like(rows, dtype=torch.bool)  # of these
    new, past = context, None
    for position in range(length):
        known = start + position
        output = step(new, past, tokens[rows, : known - new.shape[1]])
        past = output['past']
        logits = output['logits'].float() / max(temperature, MIN_TEMPERATURE)
        if top_k != 0:
            logits = take_top_k_logits(logits, top_k)
        if top_p != 1.0:
            logits = take_top_p_logits(logits, top_p)
        sampled = sample_from_logits(logits)
        output['logprobs'] = logprobs_from_logits(logits=logits, labels=sampled)
        for name, values in results.items():
            results[name] = values.to(output[name].dtype)
            results[name][rows, position] = output[name].masked_fill(ended, 0)
        sampled = sampled.masked_fill(ended, padding_token)
        tokens[rows, known] = sampled
        new = sampled.unsqueeze(1)
        if is_end is None:
            continue
        ended = ended | is_end(sampled, position)
        if ended.all():
            break
        if ended.float().mean() >= LEAVING:
            going = (~ended).nonzero().squeeze(1)
            past = past.select(going)
            rows, new, ended = rows[going], new[going], ended[going]
    return {'tokens': tokens, **results}
