"""Sampling from a network, token by token, without waiting for its device."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from lm_human_preferences.language.networks.attention import Rows, Unpadding, attention_bias
from lm_human_preferences.language.networks.network import Network
from lm_human_preferences.utils.core import MIN_TEMPERATURE, ceil_div, sample_from_probs

MASK_COLUMNS = 16  # a mask with a multiple of 16 columns is not copied for attention on a GPU

LEAVING = 0.2  # smallest fraction of ended rows that is removed, as each removal copies the cache
# Number of tokens between two checks for ended rows, by device; a check waits for the GPU.
LOOK_EVERY = {'cpu': 1, 'cuda': 8}


class Decoding:
    """Batch of rows that sampling continues by `length` tokens each.

    contexts: (batch, context_length), in host memory so that nothing waits for the device;
    ValueError for a row that is all padding. The checks, masks and positions of all new tokens are
    made before the first one. h: (rows, n_embd), the network's outputs at the ends of the rows.
    """

    @torch.no_grad()
    def __init__(
        self,
        network: Network,
        contexts: torch.Tensor,
        padding_token: int,
        length: int,
    ) -> None:
        self.network = network
        device = network.device
        tokens, mask = network.mask_padding(contexts, padding_token)
        batch, self.start = tokens.shape
        following = max(length - 1, 0)  # the last new token needs no outputs
        network.check_positions(F.pad(mask, (0, following), value=True))
        columns = MASK_COLUMNS * ceil_div(self.start + following, MASK_COLUMNS)
        self.cache: Any = network.new_cache(columns)
        last = torch.tensor([self.start - 1], device=device)
        self.h = network.hidden(tokens, mask, self.cache, last)[:, 0]
        # The bias (batch, 1, 1, columns) hides padding and the columns of tokens not yet sampled.
        keys = F.pad(mask, (0, columns - self.start)).to(device, non_blocking=True)
        self.bias = attention_bias(keys.unsqueeze(1), batch, network.attention_type)
        # The position of a new token is the number of tokens before it, not counting padding.
        self.positions = keys.sum(1) + torch.arange(following, device=device).unsqueeze(1)

    def repeat(self, times: int) -> None:
        """Replace each row by `times` copies, which are then continued separately."""
        if times > 1:
            rows = torch.arange(len(self.h), device=self.h.device)
            self.keep(rows.repeat_interleave(times))

    def keep(self, rows: torch.Tensor) -> None:
        """Continue only the rows with these indices."""
        self.h = self.h[rows]
        self.cache.keep(rows)
        self.positions = self.positions[:, rows]
        self.bias = self.bias[rows]

    def step(self, tokens: torch.Tensor, number: int) -> torch.Tensor:
        """Return outputs (rows, n_embd) at `tokens (rows,)`, the newest token of each row.

        number: count of new tokens that each row already has before these.
        """
        column = self.start + number
        self.cache.length = column
        self.bias[..., column] = 0
        bias = self.bias[..., : column + 1]
        positions = self.positions[number].unsqueeze(1)
        rows = Rows(Unpadding(positions.shape), bias, cache=self.cache)
        return self.network.outputs(tokens.unsqueeze(1), positions, rows)[:, 0]


class Sampling:
    """State of sampling: tables of tokens and outputs, and the indices `kept` of unfinished rows.

    tables: {name: (length, batch)}. outputs: see sample_sequence.
    """

    def __init__(
        self,
        rows: Decoding,
        outputs: Callable[[torch.Tensor], dict[str, torch.Tensor]],
        length: int,
        temperature: float,
    ) -> None:
        self.rows, self.outputs = rows, outputs
        self.temperature = temperature
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

    def step(self, number: int) -> None:
        """Draw token `number` of each row, given the tokens before it."""
        tokens = self.tables['tokens'][number - 1, self.kept]
        self._draw(self.outputs(self.rows.step(tokens, number - 1)), number)

    def _draw(self, outputs: dict[str, torch.Tensor], number: int) -> None:
        logits = outputs.pop('logits').float()
        if self.temperature != 1:
            logits = logits / max(self.temperature, MIN_TEMPERATURE)
        probs = logits.softmax(-1)
        tokens, sums = sample_from_probs(probs, self.uniform[number, self.kept])
        # Divide by the sum, as a float32 softmax sums to 1 only within 2e-5.
        chosen = probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) / sums
        for name, values in {'tokens': tokens, 'probs': chosen, **outputs}.items():
            self.tables[name][number, self.kept] = values

    def keep(self, rows: torch.Tensor) -> None:
        """Remove all rows but `rows`, which are indices among the rows not yet removed."""
        self.kept = rows if isinstance(self.kept, slice) else self.kept[rows]
        self.rows.keep(rows)


@torch.no_grad()
def sample_sequence(
    *,
    rows: Decoding,
    outputs: Callable[[torch.Tensor], dict[str, torch.Tensor]],
    length: int,
    temperature: float = 1.0,
    is_end: Callable[[torch.Tensor, int], torch.Tensor] | None = None,
    padding_token: int = 0,
) -> dict[str, torch.Tensor]:
    """Continue `rows` by `length` tokens, or until every row has ended.

    outputs: function of the network's outputs (rows, n_embd) that returns {'logits': (rows,
        n_vocab)} and {name: (rows,)} of any further outputs.
    is_end: function of the tokens sampled at a position (batch,) and this position that returns
        which rows end there: bool (batch,). Ended rows are removed by `rows.keep`.
    Returns {name: (batch, length)}: 'tokens', padded after the end of a row, 'logprobs' at the
    temperature, and the further outputs computed with a token's logits; 0 after the end.
    """
    sampling = Sampling(rows, outputs, length, temperature)
    tokens = sampling.tables['tokens']
    ends = torch.zeros_like(tokens, dtype=torch.bool)
    for number in range(length):
        if number > 0:
            sampling.step(number)
        if is_end is None:
            continue
        ends[number] = is_end(tokens[number], number)
        is_last = number + 1 == length
        if is_last or (number + 1) % LOOK_EVERY[tokens.device.type] > 0:
            continue
        ended = ends[:, sampling.kept].any(0).cpu().numpy()
        if ended.all():
            break
        if ended.mean() >= LEAVING:
            staying = torch.from_numpy(np.flatnonzero(~ended))
            sampling.keep(staying.to(tokens.device, non_blocking=True))
    results = dict(sampling.tables)
    results['logprobs'] = results.pop('probs').log().float()
    after_end = ends.cumsum(0) > ends
    for name, table in results.items():
        filling = padding_token if name == 'tokens' else 0
        results[name] = table.masked_fill(after_end, filling).T.contiguous()
    return results
