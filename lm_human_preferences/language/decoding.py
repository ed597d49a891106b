"""Texts that a network continues a token at a time, without asking its device anything."""

from __future__ import annotations

from typing import Any, Self

import torch
import torch.nn.functional as F

from lm_human_preferences.language.attention import Unpadding, attention_bias
from lm_human_preferences.language.network import Network


class Decoding:
    """Rows that are continued by `length` tokens; h: outputs at the end of each (rows, n_embd).

    contexts: (batch, context_length), from host memory if the device is not to be waited for; none
    may be padding alone (ValueError). repeats: rows that continue each context.
    Checks, masks and positions of all tokens are made before the first one.
    """

    def __init__(
        self,
        network: Network,
        contexts: torch.Tensor,
        padding_token: int,
        length: int,
        repeats: int = 1,
    ) -> None:
        self.network = network
        device = network.device
        tokens, mask = network.mask_padding(contexts, padding_token)
        batch, self.start = tokens.shape
        # The last token is not computed: nothing follows it.
        following = max(length - 1, 0)
        whole = F.pad(mask, (0, following), value=True)
        network.check_positions(whole)
        self.cache: Any = network.new_cache(whole.shape[1])
        last = torch.tensor([self.start - 1], device=device)
        self.h = network.hidden(tokens, mask, self.cache, last)[:, 0]
        whole = whole.to(device, non_blocking=True)
        # Of the tokens to come, in the order of time (length - 1, batch)
        first = whole[:, : self.start].sum(1)
        self.positions = first + torch.arange(following, device=device).unsqueeze(1)
        # Masks padding, and each token until it is there (batch, 1, 1, keys).
        whole[:, self.start :] = False
        self.bias = attention_bias(whole.unsqueeze(1), batch, network.attention_type)
        if repeats > 1:
            rows = torch.arange(batch, device=device).repeat_interleave(repeats)
            self.h = self.h[rows]
            self.select(rows)

    def select(self, rows: torch.Tensor) -> Self:
        """Keep only these rows, in place."""
        self.cache = self.cache.select(rows)
        self.positions = self.positions[:, rows]
        self.bias = self.bias[rows]
        return self

    def step(self, tokens: torch.Tensor, number: int | torch.Tensor) -> torch.Tensor:
        """Return outputs (rows, n_embd) at `tokens (rows,)`, each the `number`-th new one of a row.

        number: from 0; or int64 (1,) on the device, for operators that are the same each time.
        """
        column = self.start + number
        if isinstance(column, int):
            self.cache.length = column
            self.bias[..., column] = 0
            bias = self.bias[..., : column + 1]
        else:
            self.cache.column = column
            bias = self.bias.index_fill_(3, column, 0)
        positions = self.positions[number].view(-1, 1)
        unpadded = Unpadding(positions.shape)
        h = self.network.outputs(tokens.unsqueeze(1), positions, bias, unpadded, None, self.cache)
        return h[:, 0]
