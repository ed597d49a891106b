"""Attention over rows with padding: masks, positions, and the cache of keys and values."""

from typing import Self

import torch
import torch.nn.functional as F

from lm_human_preferences.hparams.model_sizes import CACHE_HEADROOM
from lm_human_preferences.training import precision


def positions_for(mask: torch.Tensor) -> torch.Tensor:
    """Return the number of real tokens before each: bool mask (..., length) -> int64."""
    counts = mask.long()
    return counts.cumsum(-1) - counts


def attention_mask(
    mask: torch.Tensor, queries: int, segment_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the keys that the last `queries` positions attend to: bool (batch, queries, keys).

    mask: bool (batch, keys), False at padding. A token attends to itself and to the real tokens
    before it, as far as `segment_mask (queries, keys)` allows. Padding before the first token
    attends to itself, since its softmax over no keys would be NaN; its output is never used. Where
    all tokens are real, the result has a batch of 1.
    """
    keys = mask.shape[1]
    key_columns = torch.arange(keys, device=mask.device)
    query_columns = key_columns[keys - queries :, None]
    causal = key_columns <= query_columns
    if segment_mask is not None:
        causal = causal & segment_mask
    if mask.all():
        return causal.unsqueeze(0)
    allowed = causal & mask.unsqueeze(1)
    sees_nothing = ~allowed.any(-1, keepdim=True)
    return allowed | ((key_columns == query_columns) & sees_nothing)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor,
    scale: float | None = None,
) -> torch.Tensor:
    """Compute attention of `q (batch, n_head, queries, d)`: (batch, queries, n_head * d).

    k, v: (batch, n_group, keys, d); each serves n_head / n_group neighbouring heads. bias: (batch,
    1, queries, keys), -inf where a key is masked. scale: of the products, by default d ** -.5.
    """
    if precision.fuses_attention():
        shared_by = q.shape[1] // k.shape[1]
        if shared_by > 1:
            k, v = (each.repeat_interleave(shared_by, dim=1) for each in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
        return attended.transpose(1, 2).flatten(2)
    return attend_by_two_products(q, k, v, bias, scale)


def attend_by_two_products(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor,
    scale: float | None = None,
) -> torch.Tensor:
    """Compute `attend` with a softmax between two products: faster at our lengths by oneDNN."""
    batch, n_head, queries, d = q.shape
    n_group = k.shape[1]
    # The heads that share keys stand below each other, as if they were more queries.
    q_rows = q.unflatten(1, (n_group, -1)).flatten(2, 3).flatten(0, 1)
    k_rows = k.flatten(0, 1)
    alpha = d**-0.5 if scale is None else scale
    bias = bias.expand(-1, n_head // n_group, -1, -1).flatten(1, 2)
    bias = bias.unsqueeze(1).expand(-1, n_group, -1, -1).flatten(0, 1)
    if queries == 1:
        # Keys times query: query times keys would copy the keys, which have gaps in a cache.
        scores = torch.baddbmm(bias.mT, k_rows, q_rows.mT, alpha=alpha).mT
    else:
        scores = torch.baddbmm(bias, q_rows, k_rows.mT, alpha=alpha)
    attended = torch.bmm(scores.softmax(-1), v.flatten(0, 1))
    attended = attended.view(batch, n_head, queries, -1)
    return attended.transpose(1, 2).flatten(2)


def take_queries(values: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Take `columns (batch, n)` of `values (batch, heads, queries, d)`: (batch, heads, n, d)."""
    index = columns[:, None, :, None].expand(-1, values.shape[1], -1, values.shape[3])
    return values.gather(2, index)


class KVCache:
    """Keys and values of the tokens so far, in memory with room for more."""

    def __init__(self) -> None:
        self.layers: list[torch.Tensor] = []  # (2, batch, n_head, capacity, d) each
        self.length = 0

    def extend(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Add keys and values; return those of all tokens: (2, batch, n_head, length + new, d)."""
        new = torch.stack([keys, values])
        end = self.length + new.shape[3]
        if layer == len(self.layers):
            self.layers.append(new[..., :0, :])
        capacity = self.layers[layer].shape[3]
        if end > capacity:
            padding = (0, 0, 0, end + CACHE_HEADROOM - capacity)
            self.layers[layer] = F.pad(self.layers[layer], padding)
        self.layers[layer][..., self.length : end, :] = new
        return self.layers[layer][..., :end, :]

    def select(self, rows: torch.Tensor) -> Self:
        """Keep only these rows of the batch, in place."""
        self.layers = [layer[:, rows, :, : self.length] for layer in self.layers]
        return self


class Unpadding:
    """Layout of a batch without padding, by `real (batch, length)`: (tokens, ...) and back."""

    def __init__(self, real: torch.Tensor) -> None:
        self.shape = real.shape
        # Of each real token, in the flattened batch; None where there is no padding.
        self.indices: torch.Tensor | None = None
        if not real.all():
            self.indices = real.flatten().nonzero().squeeze(1)

    def unpad(self, padded: torch.Tensor) -> torch.Tensor:
        """Map `padded (batch, length, ...)` to (tokens, ...)."""
        flat = padded.flatten(0, 1)
        return flat if self.indices is None else flat.index_select(0, self.indices)

    def pad(self, unpadded: torch.Tensor) -> torch.Tensor:
        """Map `unpadded (tokens, ...)` to (batch, length, ...), with zeros at padding."""
        if self.indices is not None:
            zeros = unpadded.new_zeros(self.shape.numel(), *unpadded.shape[1:])
            unpadded = zeros.index_copy_(0, self.indices, unpadded)
        return unpadded.unflatten(0, self.shape)


def last_present(mask: torch.Tensor) -> torch.Tensor:
    """Return for each column of `mask (..., length)` that of the last real token up to there."""
    columns = torch.arange(mask.shape[-1], device=mask.device)
    return torch.where(mask, columns, 0).cummax(-1).values
