"""Averaging gradients over ranks."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from lm_human_preferences.distributed.engines import Engine

BUCKET_BYTES = (
    64 << 20
)  # small enough to overlap, large enough that sending one is not mostly waiting


class Gradients:
    """The gradients of the only rank, which has nobody to average them with."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self.parameters = list(parameters)

    def zero_grad(self) -> None:
        """Forget the gradients, before the first backward pass of an update."""
        for parameter in self.parameters:
            parameter.grad = None

    def require_sync(self) -> None:
        """Say that nothing is added after the next backward pass: averaging may overlap with it."""

    def synchronize(self) -> None:
        """Return when every gradient is the mean over ranks."""


class OverlappedGradients(Gradients):
    """Averages gradients in a few large buckets, each sent as soon as the last backward pass has
    filled it.

    A gradient is divided by the number of ranks on its way into its bucket, of which the
    parameter's `grad` is then a view; what the loss does not reach has gradient 0. Buckets are
    filled, and sent on every rank, in the order in which a backward pass reaches the parameters:
    the last ones first. size: number of ranks; engine: has all_reduce_async_(tensor) -> handle and
    wait(handle).
    """

    def __init__(self, parameters: Iterable[torch.Tensor], size: int, engine: Engine) -> None:
        super().__init__(parameters)
        self.size, self.engine = size, engine
        self.buckets: list[torch.Tensor] = []  # the vector of each bucket
        # parameter -> its bucket's number, its part of it
        self.bucket_views: dict[torch.Tensor, tuple[int, torch.Tensor]] = {}
        # how many gradients each bucket waits for, in the last pass
        self.pending: list[int] | None = None
        self.handles: list[Any] = []  # those sent
        # A parameter that held its own gradients would never be freed.
        arrived: Any = weakref.WeakMethod(self._arrived)
        for members in _buckets(self.parameters[::-1]):
            sizes = [parameter.numel() for parameter in members]
            flat = torch.zeros(sum(sizes), dtype=members[0].dtype, device=members[0].device)
            for parameter, part in zip(members, flat.split(sizes)):
                self.bucket_views[parameter] = len(self.buckets), part.view(parameter.shape)
                parameter.register_post_accumulate_grad_hook(lambda parameter: arrived()(parameter))
            self.buckets.append(flat)

    def require_sync(self) -> None:
        buckets = [bucket for bucket, _ in self.bucket_views.values()]
        self.pending = [buckets.count(bucket) for bucket in range(len(self.buckets))]

    def _arrived(self, parameter: torch.Tensor) -> None:
        if self.pending:
            self._fill(parameter)
            self.pending[self.bucket_views[parameter][0]] -= 1
            while len(self.handles) < len(self.buckets) and not self.pending[len(self.handles)]:
                self.handles.append(self.engine.all_reduce_async_(self.buckets[len(self.handles)]))

    def _fill(self, parameter: torch.Tensor) -> None:
        _, part = self.bucket_views[parameter]
        parameter.grad = (
            part.zero_()
            if parameter.grad is None
            else torch.div(parameter.grad, self.size, out=part)
        )

    def synchronize(self) -> None:
        """Send what the last backward pass did not fill, and return when every gradient is the mean
        over ranks."""
        for parameter, (_, part) in self.bucket_views.items():
            if parameter.grad is not part:
                self._fill(parameter)
        self.handles += map(self.engine.all_reduce_async_, self.buckets[len(self.handles) :])
        for handle in self.handles:
            self.engine.synchronize(handle)
        self.pending, self.handles = None, []


def _buckets(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Split a list of tensors into runs of about BUCKET_BYTES, of one type and on one device."""
    found: list[list[torch.Tensor]] = []
    room = 0
    for tensor in tensors:
        if room <= 0 or (tensor.dtype, tensor.device) != (found[-1][0].dtype, found[-1][0].device):
            found.append([])
            room = BUCKET_BYTES
        found[-1].append(tensor)
        room -= tensor.nbytes
    return found
