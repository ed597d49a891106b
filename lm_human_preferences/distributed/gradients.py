"""Averaging gradients over ranks."""

import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

# Small enough to overlap with the backward pass, large enough that latency does not matter.
BUCKET_BYTES = 64 << 20


class Gradients:
    """Gradients of a single rank, which need no averaging."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self.parameters = list(parameters)

    def zero_grad(self) -> None:
        """Drop the gradients, before the first backward pass of an update."""
        for parameter in self.parameters:
            parameter.grad = None

    def require_sync(self) -> None:
        """Announce the last backward pass of an update: averaging may overlap with it."""

    def synchronize(self) -> None:
        """Wait until every gradient is its mean over ranks."""


class OverlappedGradients(Gradients):
    """Gradients averaged in large buckets, last parameters first, during the last backward pass.

    A parameter's `grad` becomes a view of its bucket, 0 where the loss does not reach it.
    begin_sum: begins to sum a tensor over `size` ranks, and returns a function that waits.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        size: int,
        begin_sum: Callable[[torch.Tensor], Callable[[], object]],
    ) -> None:
        super().__init__(parameters)
        self.size = size
        self.begin_sum = begin_sum
        self.buckets: list[torch.Tensor] = []  # each is a vector
        # {parameter: (index of its bucket, view of its values in the bucket)}
        self.bucket_views: dict[torch.Tensor, tuple[int, torch.Tensor]] = {}
        # How many gradients each bucket still waits for; None before the last backward pass.
        self.pending: list[int] | None = None
        self.waits: list[Callable[[], object]] = []  # one for each bucket sent so far, in order
        reverse = self.parameters[::-1]
        for _, alike in itertools.groupby(reverse, lambda each: (each.dtype, each.device)):
            members: list[torch.Tensor] = []
            for parameter in alike:
                members.append(parameter)
                if sum(each.nbytes for each in members) >= BUCKET_BYTES:
                    self._add_bucket(members)
                    members = []
            if members:
                self._add_bucket(members)

    def _add_bucket(self, members: list[torch.Tensor]) -> None:
        # A weak reference, since this object holds the parameters: if their hooks held it in turn,
        # none of them would ever be freed.
        on_gradient: Any = weakref.WeakMethod(self._on_gradient)
        sizes = [parameter.numel() for parameter in members]
        bucket = torch.zeros(sum(sizes), dtype=members[0].dtype, device=members[0].device)
        for parameter, part in zip(members, bucket.split(sizes)):
            self.bucket_views[parameter] = len(self.buckets), part.view(parameter.shape)
            parameter.register_post_accumulate_grad_hook(lambda parameter: on_gradient()(parameter))
        self.buckets.append(bucket)

    def require_sync(self) -> None:
        self.pending = [0] * len(self.buckets)
        for bucket, _ in self.bucket_views.values():
            self.pending[bucket] += 1

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        """Copy a gradient into its bucket in the last backward pass, and send full buckets."""
        if not self.pending:
            return
        self._fill(parameter)
        bucket, _ = self.bucket_views[parameter]
        self.pending[bucket] -= 1
        while len(self.waits) < len(self.buckets) and not self.pending[len(self.waits)]:
            self._send_next()

    def _fill(self, parameter: torch.Tensor) -> None:
        _, view = self.bucket_views[parameter]
        if parameter.grad is None:
            view.zero_()
        else:
            torch.div(parameter.grad, self.size, out=view)
        parameter.grad = view

    def _send_next(self) -> None:
        self.waits.append(self.begin_sum(self.buckets[len(self.waits)]))

    def synchronize(self) -> None:
        """Send the buckets that the last backward pass did not fill, and wait for all means."""
        for parameter, (_, view) in self.bucket_views.items():
            if parameter.grad is not view:
                self._fill(parameter)
        while len(self.waits) < len(self.buckets):
            self._send_next()
        for wait in self.waits:
            wait()
        self.pending = None
        self.waits = []
