"""Micro-batches: work on a few rows of a batch at a time, to save memory with the same result."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar

import torch


@dataclasses.dataclass
class TensorBatch:
    """Base class of dataclasses whose tensors (or None) are indexed and split together by rows."""

    def __len__(self) -> int:
        first = dataclasses.fields(self)[0]
        return len(getattr(self, first.name))

    def __getitem__(self, rows: torch.Tensor | slice) -> Self:
        selected = dict.fromkeys(vars(self))
        for name, tensor in vars(self).items():
            if tensor is None:
                continue
            if isinstance(rows, slice):
                selected[name] = tensor[rows]
            else:
                selected[name] = tensor[rows.to(tensor.device, non_blocking=True)]
        return type(self)(**selected)

    def split(self, size: int) -> Sequence[Self]:
        """Return batches of `size` rows each; the last has the remainder."""
        return [self[start : start + size] for start in range(0, len(self), size)]


Batch = TypeVar('Batch', bound=torch.Tensor | TensorBatch)


def micro_batches(batch: Batch, size: int | None) -> Sequence[Batch]:
    """Return the rows of `batch`, at most `size` at a time, in order; None: all at once."""
    return batch.split(size or len(batch))  # pyright: ignore[reportReturnType]


def concatenate(parts: Sequence[Batch]) -> Batch:
    """Return one batch of the rows of all `parts`, in order."""
    first: Any = parts[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(parts)  # pyright: ignore
    joined = dict.fromkeys(vars(first))
    for name, tensor in vars(first).items():
        if tensor is not None:
            joined[name] = torch.cat([getattr(part, name) for part in parts])
    return type(first)(**joined)


def map_micro_batches(
    function: Callable[..., Batch], size: int | None, *batches: torch.Tensor
) -> Batch:
    """Return `function(*batches)`, computed on at most `size` rows at a time (None: on all)."""
    parts = zip(*(micro_batches(batch, size) for batch in batches), strict=True)
    return concatenate([function(*part) for part in parts])
