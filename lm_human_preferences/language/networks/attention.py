"""Attention over rows with padding: masks, positions, and the cache of keys and values."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F

from lm_human_preferences.machine import precision


def positions_for(mask: torch.Tensor) -> torch.Tensor:
    """Return the number of real tokens before each column of bool `mask (..., length)`: int64."""
    counts = mask.long()
    return counts.cumsum(-1) - counts


def attention_mask(
    mask: torch.Tensor,
    queries: int,
    segment_mask: torch.Tensor | None = None,
    *,
    all_real: bool = False,
) -> torch.Tensor:
    """Return a mask of the keys the last `queries` tokens attend to: bool (batch, queries, keys).

    mask: bool (batch, keys), False at padding. A token attends to itself and to the real tokens
    before it, except where `segment_mask (queries, keys)` is False. Padding before the first token
    attends to itself, as a softmax over no keys would be NaN; the output there is never used.
    all_real: whether the batch has no padding; the result is then (1, queries, keys).
    """
    keys = mask.shape[1]
    key_columns = torch.arange(keys, device=mask.device)
    query_columns = key_columns[keys - queries :, None]
    causal = key_columns <= query_columns
    if segment_mask is not None:
        causal = causal & segment_mask
    if all_real:
        return causal.unsqueeze(0)
    allowed = causal & mask.unsqueeze(1)
    sees_nothing = ~allowed.any(-1, keepdim=True)
    return allowed | ((key_columns == query_columns) & sees_nothing)


def attention_bias(allowed: torch.Tensor, batch: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a bias (batch, 1, queries, keys) that hides keys if added to query-key products.

    allowed: the result of attention_mask.
    """
    bias = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    # Hidden keys have a finite bias, not -inf: some models add their own mask to the bias.
    bias = bias.masked_fill_(~allowed, torch.finfo(dtype).min)
    return bias.unsqueeze(1).expand(batch, -1, -1, -1)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor,
    scale: float | None = None,
) -> torch.Tensor:
    """Return attention outputs of `q (batch, n_head, queries, d)`: (batch, queries, n_head * d).

    k, v: (batch, n_group, keys, d); n_head / n_group neighbouring heads share a group. bias: see
    attention_bias. scale: factor of query-key products; None: d ** -0.5.
    """
    if precision.fuses_attention():
        batch, n_head, queries, _ = q.shape
        shared_by = n_head // k.shape[1]
        if queries == 1:
            # Treat heads that share keys as queries of one head, so that no key is copied.
            q = q.unflatten(1, (-1, shared_by)).flatten(2, 3)
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
            return attended.reshape(batch, 1, -1)
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
    """Compute `attend` by matmul, softmax and matmul, which oneDNN does faster for short rows."""
    batch, n_head, queries, d = q.shape
    n_group = k.shape[1]
    # Treat heads that share keys as queries of one head, so that no key is copied.
    q_rows = q.unflatten(1, (n_group, -1)).flatten(2, 3).flatten(0, 1)
    k_rows = k.flatten(0, 1)
    alpha = d**-0.5 if scale is None else scale
    bias = bias.expand(-1, n_head // n_group, -1, -1).flatten(1, 2)
    bias = bias.unsqueeze(1).expand(-1, n_group, -1, -1).flatten(0, 1)
    if queries == 1:
        # Keys times query is faster: query times keys would copy the cached keys (not contiguous).
        scores = torch.baddbmm(bias.mT, k_rows, q_rows.mT, alpha=alpha).mT
    else:
        scores = torch.baddbmm(bias, q_rows, k_rows.mT, alpha=alpha)
    attended = torch.bmm(scores.softmax(-1), v.flatten(0, 1))
    attended = attended.view(batch, n_head, queries, -1)
    return attended.transpose(1, 2).flatten(2)


def attend_within_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    longest: int,
    scale: float | None = None,
) -> torch.Tensor:
    """Compute causal attention on a GPU within rows that are concatenated without padding.

    q: (tokens, n_head, d). k, v: (tokens, n_group, d). starts: see Rows.starts. longest: length of
    the longest row. Returns (tokens, n_head * d).
    """
    from torch.nn.attention.varlen import varlen_attn  # this import takes seconds

    shared_by = q.shape[1] // k.shape[1]
    if shared_by > 1:
        k, v = (each.repeat_interleave(shared_by, dim=1) for each in (k, v))
    causal = (-1, 0)
    attended: Any = varlen_attn(
        q, k, v, starts, starts, longest, longest, scale=scale, window_size=causal
    )
    return attended.flatten(1)


def take_queries(values: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return `values (batch, heads, queries, d)` at `columns (batch, n)`: (batch, heads, n, d)."""
    index = columns[:, None, :, None].expand(-1, values.shape[1], -1, values.shape[3])
    return values.gather(2, index)


class KVCache:
    """Cache of attention keys and values, in memory allocated for `capacity` tokens.

    length: number of cached tokens; new ones are written after them. No gradient passes through.
    layers: each layer's keys and values (2, batch, n_head, capacity, d).
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.layers: list[torch.Tensor] = []
        self.length = 0

    def extend(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Append `k, v (batch, n_head, n, d)`; return all k and v: (2, batch, n_head, keys, d)."""
        if layer == len(self.layers):
            self.layers.append(k.new_zeros(2, *k.shape[:2], self.capacity, k.shape[3]))
        held = self.layers[layer]
        end = self.length + k.shape[2]
        torch.stack([k, v], out=held[..., self.length : end, :])
        return held[..., :end, :]

    def keep(self, rows: torch.Tensor) -> None:
        """Keep only the batch's rows with the indices `rows`."""
        self.layers = [layer[:, rows] for layer in self.layers]


class Unpadding:
    """Converter of padded tensors (batch, length, ...) to real tokens (tokens, ...), and back.

    shape: (batch, length). real: bool (batch, length), in host memory so that nothing waits for the
    device; None: no padding.
    """

    def __init__(self, shape: tuple[int, ...], real: torch.Tensor | None = None) -> None:
        self.shape = shape
        # The indices locate the real tokens in the flattened batch, and are None without padding.
        self.indices: torch.Tensor | None = None
        if real is None:
            return
        on_host = real.cpu().numpy()
        if not on_host.all():
            self.indices = torch.from_numpy(np.flatnonzero(on_host))

    def to(self, device: torch.device) -> Self:
        """Move the indices to `device`, where the tensors to convert are; return self."""
        if self.indices is not None:
            self.indices = self.indices.to(device, non_blocking=True)
        return self

    def unpad(self, padded: torch.Tensor) -> torch.Tensor:
        """Map `padded (batch, length, ...)` to (tokens, ...)."""
        flat = padded.flatten(0, 1)
        return flat if self.indices is None else flat.index_select(0, self.indices)

    def pad(self, unpadded: torch.Tensor) -> torch.Tensor:
        """Map `unpadded (tokens, ...)` to (batch, length, ...), with zeros at padding."""
        if self.indices is not None:
            batch, length = self.shape
            zeros = unpadded.new_zeros(batch * length, *unpadded.shape[1:])
            unpadded = zeros.index_copy_(0, self.indices, unpadded)
        return unpadded.view(*self.shape, *unpadded.shape[1:])

    def tokens_before(self, places: torch.Tensor) -> torch.Tensor:
        """Return the numbers of real tokens before the indices `places (n,)` in the flat batch."""
        return places if self.indices is None else torch.searchsorted(self.indices, places)


class BlockInputs:
    """Storage for the inputs of a network's `blocks` (numbered from 0) in a forward pass."""

    def __init__(self, blocks: Iterable[int]) -> None:
        self.blocks = tuple(blocks)
        self.states: dict[int, torch.Tensor] = {}  # {block: its inputs (batch * n, n_embd)}

    def stacked(self) -> torch.Tensor:
        """Return the inputs of all blocks as one tensor, (blocks, batch * n, n_embd)."""
        return torch.stack([self.states[block] for block in self.blocks])


@dataclass(frozen=True)
class Rows:
    """Layout of a batch's real tokens, and the attention between them.

    bias: see attention_bias. is_causal: whether the bias only hides later tokens and padding.
    cache: keys and values of earlier tokens, or None. read: the columns (batch, n) whose outputs
    the caller needs; None: all. kept: where the inputs of its blocks at `read` are stored.
    """

    unpadding: Unpadding
    bias: torch.Tensor
    is_causal: bool = False
    cache: Any = None
    read: torch.Tensor | None = None
    kept: BlockInputs | None = None

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float | None = None,
    ) -> torch.Tensor:
        """Return the attention outputs of the wanted tokens. q, k, v: (tokens, heads, d) each."""
        if self.is_causal and precision.attends_without_padding(q):
            if self.cache is not None:
                self.keys_and_values(layer, k, v)
            longest = self.unpadding.shape[1]
            return self.wanted(attend_within_rows(q, k, v, self.starts, longest, scale))
        keys, values = self.keys_and_values(layer, k, v)
        queries = self._by_head(q)
        if self.read is None:
            return self.unpadding.unpad(attend(queries, keys, values, self.bias, scale))
        queries, bias = (take_queries(each, self.read) for each in (queries, self.bias))
        return attend(queries, keys, values, bias, scale).flatten(0, 1)

    def keys_and_values(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> Any:
        """Return all keys and all values, (batch, heads, keys, d) each, with cached ones first.

        k, v: (tokens, heads, d) of the new tokens, which are added to the cache.
        """
        k, v = self._by_head(k), self._by_head(v)
        return (k, v) if self.cache is None else self.cache.extend(layer, k, v)

    def _by_head(self, values: torch.Tensor) -> torch.Tensor:
        """Map `values (tokens, heads, d)` to (batch, heads, length, d)."""
        if self.unpadding.shape[1] == 1 and self.unpadding.indices is None:
            return values.unsqueeze(2)  # unsqueeze gives the same result as pad, but faster
        return self.unpadding.pad(values).transpose(1, 2)

    def wanted(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values at the columns `self.read` from all `values (tokens, ...)`."""
        return values if self.read is None else values.index_select(0, self._tokens_read)

    @cached_property
    def starts(self) -> torch.Tensor:
        """Return the number of real tokens before each row and in all rows: int32 (batch + 1,)."""
        batch, length = self.unpadding.shape
        ends = torch.arange(0, batch * length + 1, length, device=self.bias.device)
        return self.unpadding.tokens_before(ends).int()

    @cached_property
    def _tokens_read(self) -> torch.Tensor:
        assert self.read is not None
        length = self.unpadding.shape[1]
        rows = torch.arange(len(self.read), device=self.read.device).unsqueeze(1)
        tokens = self.unpadding.tokens_before((rows * length + self.read).flatten())
        if self.unpadding.indices is None:
            return tokens
        # Padding after the last real token reads the last output, as a higher index would fail.
        return tokens.clamp_(max=len(self.unpadding.indices) - 1)


def last_present(mask: torch.Tensor) -> torch.Tensor:
    """Return, for each column of `mask (..., length)`, the last True column so far, or 0."""
    columns = torch.arange(mask.shape[-1], device=mask.device)
    return torch.where(mask, columns, 0).cummax(-1).values
