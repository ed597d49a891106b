"""Queries of a training, wherever they come from."""

from typing import Protocol

import torch


class Queries(Protocol):
    """Stream of batches of queries, as `lm_tasks.QuerySampler`."""

    position: tuple[int, int]

    def __call__(self) -> dict[str, torch.Tensor]:
        """Return the next {'tokens': (batch, query_length)}."""
        ...

    def seek(self, position: tuple[int, int]) -> None:
        """Continue from the `position` of a stream."""
        ...
