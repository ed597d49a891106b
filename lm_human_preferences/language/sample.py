"""Sampling from an autoregressive model; knows neither the encoding nor the network."""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from lm_human_preferences.utils.core import (
    MIN_TEMPERATURE,
    sample_from_cdf,
    take_top_k_logits,
    take_top_p_logits,
)

LEAVING = 0.2  # share of the rows that has ended when they leave: the cache is copied then
# Tokens from one look at what has ended to the next: a look has to wait for a GPU.
LOOK_EVERY = {'cpu': 1, 'cuda': 8}


class Rows(Protocol):
    """Rows of tokens that a model continues; h: its outputs at the end of each."""

    h: torch.Tensor

    def step(self, tokens: torch.Tensor, number: int | torch.Tensor) -> torch.Tensor:
        """Return the outputs at `tokens (rows,)`, each the `number`-th new one of its row.

        number: from 0; or int64 (1,) on the device.
        """
        ...

    def select(self, rows: torch.Tensor) -> Any:
        """Keep only these rows, in place."""
        ...


class Sampling:
    """Tables (length, batch) of what is drawn, and the `kept` columns, whose rows still go on.

    outputs: see sample_sequence. adjust: function of logits.
    """

    def __init__(
        self,
        rows: Rows,
        outputs: Callable[[torch.Tensor], dict[str, torch.Tensor]],
        adjust: Callable[[torch.Tensor], torch.Tensor],
        length: int,
    ) -> None:
        self.rows, self.outputs, self.adjust = rows, outputs, adjust
        first = outputs(rows.h)
        shape = length, len(rows.h)
        logits = first['logits']
        self.tables = {
            'tokens': logits.new_zeros(shape, dtype=torch.int64),
            'probs': logits.new_zeros(shape, dtype=torch.float64),
        }
        for name in first.keys() - {'logits'}:
            self.tables[name] = first[name].new_zeros(shape)
        self.uniform = torch.rand(shape, dtype=torch.float64, device=logits.device)
        self.kept: slice | torch.Tensor = slice(None)
        if length > 0:
            self._draw(first, 0)

    def step(self, number: int | torch.Tensor) -> None:
        """Draw the `number`-th tokens, after those before; number: see Rows.step."""
        tokens = self.tables['tokens'][number - 1, self.kept].view(-1)
        self._draw(self.outputs(self.rows.step(tokens, number - 1)), number)

    def _draw(self, outputs: dict[str, torch.Tensor], number: int | torch.Tensor) -> None:
        probs = self.adjust(outputs.pop('logits').float()).softmax(-1)
        # In float64, as float32 has too few numbers for the tail of a large vocabulary.
        cdf = probs.cumsum(-1, dtype=torch.float64)
        tokens = sample_from_cdf(cdf, self.uniform[number, self.kept].view(-1))
        # A softmax errs by 2e-5, the same for all words: its sum in float64 shows by how much.
        chosen = probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) / cdf[..., -1]
        for name, values in {'tokens': tokens, 'probs': chosen, **outputs}.items():
            self.tables[name][number, self.kept] = values

    def select(self, rows: torch.Tensor) -> None:
        """Go on with these of the rows that are kept."""
        self.kept = rows if isinstance(self.kept, slice) else self.kept[rows]
        self.rows.select(rows)


@torch.no_grad()
def sample_sequence(
    *,
    rows: Rows,
    outputs: Callable[[torch.Tensor], dict[str, torch.Tensor]],
    length: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    is_end: Callable[[torch.Tensor, int], torch.Tensor] | None = None,
    padding_token: int = 0,
) -> dict[str, torch.Tensor]:
    """Continue `rows` by `length` tokens, or until every row has ended.

    outputs: function of outputs (rows, n_embd) that returns the 'logits' (rows, n_vocab) and others
        (rows,).
    is_end: function of sampled tokens (batch,) and their position that returns where a row ends:
        bool (batch,). Rows that have ended leave the batch, by `rows.select`.
    Returns 'tokens' (batch, length), padded after the end of a row, 'logprobs' under the adjusted
    distribution, and each of the other outputs where the token was chosen; 0 after the end.
    """

    def adjust(logits: torch.Tensor) -> torch.Tensor:
        """Return logits at the temperature, of top_k or top_p."""
        logits = logits / max(temperature, MIN_TEMPERATURE)
        if top_k != 0:
            logits = take_top_k_logits(logits, top_k)
        return take_top_p_logits(logits, top_p)

    sampling = Sampling(rows, outputs, adjust, length)
    results = sampling.tables
    device = results['tokens'].device
    ends = torch.zeros_like(results['tokens'], dtype=torch.bool)
    for number in range(length):
        if number > 0:
            sampling.step(number)
        if is_end is None:
            continue
        ends[number] = is_end(results['tokens'][number], number)
        if (number + 1) % LOOK_EVERY[device.type] > 0:
            continue
        ended = ends[:, sampling.kept].any(0).cpu().numpy()
        if ended.all():
            break
        if ended.mean() >= LEAVING:
            going = torch.from_numpy(np.flatnonzero(~ended))
            sampling.select(going.to(device, non_blocking=True))
    results['logprobs'] = results.pop('probs').log().float()
    after_end = ends.cumsum(0) > ends
    for name, table in results.items():
        filling = padding_token if name == 'tokens' else 0
        results[name] = table.masked_fill(after_end, filling).T.contiguous()
    return results
