"""Continuation of texts, one token at a time, without waiting for the network's device."""

from typing import Any

import torch
import torch.nn.functional as F

from lm_human_preferences.language.attention import Rows, Unpadding, attention_bias
from lm_human_preferences.language.network import Network
from lm_human_preferences.utils.core import ceil_div

MASK_COLUMNS = 16  # a mask with a multiple of 16 columns is not copied for attention on a GPU


class Decoding:
    """Rows to continue by `length` tokens. h: the network's outputs at their ends, (rows, n_embd).

    contexts: (batch, context_length), in host memory so that nothing waits for the device;
    ValueError for a row that is all padding. The checks, masks and positions of all new tokens are
    made before the first one.
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
        following = max(length - 1, 0)  # the last token needs no outputs: nothing follows it
        network.check_positions(F.pad(mask, (0, following), value=True))
        columns = MASK_COLUMNS * ceil_div(self.start + following, MASK_COLUMNS)
        self.cache: Any = network.new_cache(columns)
        last = torch.tensor([self.start - 1], device=device)
        self.h = network.hidden(tokens, mask, self.cache, last)[:, 0]
        # (batch, 1, 1, columns): hides padding, and the columns of tokens not yet sampled.
        keys = F.pad(mask, (0, columns - self.start)).to(device, non_blocking=True)
        self.bias = attention_bias(keys.unsqueeze(1), batch, network.attention_type)
        # (following, batch): positions of the tokens to come
        self.positions = keys.sum(1) + torch.arange(following, device=device).unsqueeze(1)

    def repeat(self, times: int) -> None:
        """Replace each row by `times` copies of it, to be continued separately."""
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

        number: how many new tokens each row has before these.
        """
        column = self.start + number
        self.cache.length = column
        self.bias[..., column] = 0
        bias = self.bias[..., : column + 1]
        positions = self.positions[number].unsqueeze(1)
        rows = Rows(Unpadding(positions.shape), bias, cache=self.cache)
        return self.network.outputs(tokens.unsqueeze(1), positions, rows)[:, 0]
