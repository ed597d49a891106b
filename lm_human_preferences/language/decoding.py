"""Continuation of texts, a token at a time, that never waits for the network's device."""

from typing import Any

import torch
import torch.nn.functional as F

from lm_human_preferences.language.attention import Rows, Unpadding, attention_bias
from lm_human_preferences.language.network import Network
from lm_human_preferences.utils.core import ceil_div

MASK_COLUMNS = 16  # a mask of a multiple of them need not be copied for a GPU's attention


class Decoding:
    """Rows that are continued by `length` tokens; h: outputs at the end of each (rows, n_embd).

    contexts: (batch, context_length), in host memory so that nothing waits for the device;
    ValueError for a row of padding alone. Checks, masks and positions of all tokens are made before
    the first one.
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
        following = max(length - 1, 0)  # the last token is not computed: nothing follows it
        network.check_positions(F.pad(mask, (0, following), value=True))
        columns = MASK_COLUMNS * ceil_div(self.start + following, MASK_COLUMNS)
        self.cache: Any = network.new_cache(columns)
        last = torch.tensor([self.start - 1], device=device)
        self.h = network.hidden(tokens, mask, self.cache, last)[:, 0]
        # (batch, 1, 1, columns): masks padding, and the columns of tokens that are not known yet.
        keys = F.pad(mask, (0, columns - self.start)).to(device, non_blocking=True)
        self.bias = attention_bias(keys.unsqueeze(1), batch, network.attention_type)
        # (following, batch): positions of the tokens to come
        self.positions = keys.sum(1) + torch.arange(following, device=device).unsqueeze(1)

    def repeat(self, times: int) -> None:
        """Continue each row `times` times, in neighbouring rows."""
        if times > 1:
            rows = torch.arange(len(self.h), device=self.h.device)
            self.keep(rows.repeat_interleave(times))

    def keep(self, rows: torch.Tensor) -> None:
        """Go on with only these rows."""
        self.h = self.h[rows]
        self.cache.keep(rows)
        self.positions = self.positions[:, rows]
        self.bias = self.bias[rows]

    def step(self, tokens: torch.Tensor, number: int) -> torch.Tensor:
        """Return outputs (rows, n_embd) at `tokens (rows,)`, the `number`-th new token of each row.

        number: counted from 0.
        """
        column = self.start + number
        self.cache.length = column
        self.bias[..., column] = 0
        bias = self.bias[..., : column + 1]
        positions = self.positions[number].unsqueeze(1)
        rows = Rows(Unpadding(positions.shape), bias, cache=self.cache)
        return self.network.outputs(tokens.unsqueeze(1), positions, rows)[:, 0]
