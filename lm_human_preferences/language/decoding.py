"""Texts that a network continues a token at a time, without asking its device anything."""

import copy
from typing import Any, Self

import torch
import torch.nn.functional as F

from lm_human_preferences.language.attention import KVCache, Unpadding, attention_bias
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

    def repeated(self, times: int) -> Self:
        """Return each row so many times, one beside the other."""
        if times == 1:
            return self
        return self.select(torch.arange(len(self.h), device=self.h.device).repeat_interleave(times))

    def select(self, rows: torch.Tensor) -> Self:
        """Return only these rows; the cache may change in place."""
        selected = copy.copy(self)
        selected.h = self.h[rows]
        selected.cache = self.cache.select(rows)
        selected.positions = self.positions[:, rows]
        selected.bias = self.bias[rows]
        return selected

    def tensors(self) -> list[torch.Tensor]:
        """Return what a step of any number reads and writes; RuntimeError if there is none."""
        if not isinstance(self.cache, KVCache):
            raise RuntimeError('the cache of this model grows with each token')
        return [self.positions, self.bias, *self.cache.layers]

    def step(self, tokens: torch.Tensor, number: int | torch.Tensor) -> torch.Tensor:
        """Return outputs (rows, n_embd) at `tokens (rows,)`, each the `number`-th new one of a row.

        number: from 0; or int64 (1,) on the device, for operators and shapes that are always the
        same.
        """
        column = self.start + number
        if isinstance(column, int):
            self.cache.length, self.cache.column = column, None
            self.bias[..., column] = 0
            bias = self.bias[..., : column + 1]
        else:
            self.cache.column = column
            bias = self.bias.index_fill_(3, column, 0)
        positions = self.positions[number].view(-1, 1)
        unpadded = Unpadding(positions.shape)
        h = self.network.outputs(tokens.unsqueeze(1), positions, bias, unpadded, None, self.cache)
        return h[:, 0]
