"""Texts that a network continues a token at a time, without asking its device anything."""

from typing import Any

import torch
import torch.nn.functional as F

from lm_human_preferences.language.attention import Unpadding, attention_bias
from lm_human_preferences.language.network import Network
from lm_human_preferences.utils.core import ceil_div

MASK_COLUMNS = 16  # a mask of a multiple of them need not be copied for a GPU's attention


class Decoding:
    """Rows that are continued by `length` tokens; h: outputs at the end of each (rows, n_embd).

    contexts: (batch, context_length), from host memory if the device is not to be waited for; none
    may be padding alone (ValueError).
    Checks, masks and positions of all tokens are made before the first one.
    """

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
        # Masks padding, and each token until it is there (batch, 1, 1, columns).
        keys = F.pad(mask, (0, columns - self.start)).to(device, non_blocking=True)
        self.bias = attention_bias(keys.unsqueeze(1), batch, network.attention_type)
        # Of the tokens to come, in the order of time (following, batch)
        self.positions = keys.sum(1) + torch.arange(following, device=device).unsqueeze(1)

    def repeat(self, times: int) -> None:
        """Continue each row so many times, one beside the other."""
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
        """Return outputs (rows, n_embd) at `tokens (rows,)`, each the `number`-th new one of a row.

        number: from 0.
        """
        column = self.start + number
        self.cache.length = column
        self.bias[..., column] = 0
        bias = self.bias[..., : column + 1]
        positions = self.positions[number].unsqueeze(1)
        unpadded = Unpadding(positions.shape)
        h = self.network.outputs(tokens.unsqueeze(1), positions, bias, unpadded, None, self.cache)
        return h[:, 0]
