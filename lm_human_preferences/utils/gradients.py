"""Averaging gradients over ranks."""
import weakref

import torch

BUCKET_BYTES = 64 << 20  # small enough to overlap, large enough that sending one is not mostly waiting


class Gradients:
    """The gradients of the only rank, which has nobody to average them with."""

    def __init__(self, parameters):
        self.parameters = list(parameters)

    def clear(self):
        """Forget the gradients, before the first backward pass of an update."""
        for parameter in self.parameters:
            parameter.grad = None

    def expect_last(self):
        """Say that nothing is added after the next backward pass: averaging may overlap with it."""

    def wait(self):
        """Return when every gradient is the mean over ranks."""


class OverlappedGradients(Gradients):
    """Averages gradients in a few large buckets, each sent as soon as the last backward pass has filled it.

    A gradient is divided by the number of ranks on its way into its bucket, of which the parameter's `grad` is then a
    view; what the loss does not reach has gradient 0. Buckets are filled, and sent on every rank, in the order in which
    a backward pass reaches the parameters: the last ones first. size: number of ranks; engine: has
    start_sum_(tensor) -> handle and wait(handle).
    """

    def __init__(self, parameters, size, engine):
        super().__init__(parameters)
        self.size, self.engine = size, engine
        self.flats, self.places = [], {}  # the vector of each bucket; parameter -> its bucket's number, its part of it
        self.missing, self.handles = None, []  # how many gradients each bucket waits for, in the last pass; those sent
        arrived = weakref.WeakMethod(self._arrived)  # a parameter that held its own gradients would never be freed
        for members in _buckets(self.parameters[::-1]):
            sizes = [parameter.numel() for parameter in members]
            flat = torch.zeros(sum(sizes), dtype=members[0].dtype, device=members[0].device)
            for parameter, part in zip(members, flat.split(sizes)):
                self.places[parameter] = len(self.flats), part.view(parameter.shape)
                parameter.register_post_accumulate_grad_hook(lambda parameter: arrived()(parameter))
            self.flats.append(flat)

    def expect_last(self):
        buckets = [bucket for bucket, _ in self.places.values()]
        self.missing = [buckets.count(bucket) for bucket in range(len(self.flats))]

    def _arrived(self, parameter):
        if self.missing:
            self._fill(parameter)
            self.missing[self.places[parameter][0]] -= 1
            while len(self.handles) < len(self.flats) and not self.missing[len(self.handles)]:
                self.handles.append(self.engine.start_sum_(self.flats[len(self.handles)]))

    def _fill(self, parameter):
        _, part = self.places[parameter]
        parameter.grad = part.zero_() if parameter.grad is None else torch.div(parameter.grad, self.size, out=part)

    def wait(self):
        """Send what the last backward pass did not fill, and return when every gradient is the mean over ranks."""
        for parameter, (_, part) in self.places.items():
            if parameter.grad is not part:
                self._fill(parameter)
        self.handles += map(self.engine.start_sum_, self.flats[len(self.handles):])
        for handle in self.handles:
            self.engine.wait(handle)
        self.missing, self.handles = None, []


def _buckets(tensors):
    """Split a list of tensors into runs of about BUCKET_BYTES, of one type and on one device."""
    found, room = [], 0
    for tensor in tensors:
        if room <= 0 or (tensor.dtype, tensor.device) != (found[-1][0].dtype, found[-1][0].device):
            found.append([])
            room = BUCKET_BYTES
        found[-1].append(tensor)
        room -= tensor.nbytes
    return found
