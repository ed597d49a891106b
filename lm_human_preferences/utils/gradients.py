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

    A parameter's `grad` is a view into its bucket, so nothing is copied; what the loss does not reach has gradient 0.
    Buckets are filled, and sent on every rank, in the order in which a backward pass reaches the parameters: the last
    ones first. size: number of ranks; engine: has start_sum_(tensor) -> handle and wait(handle).
    """

    def __init__(self, parameters, size, engine):
        super().__init__(parameters)
        self.size, self.engine = size, engine
        self.flats, self.views, self.bucket_of = [], {}, {}
        self.sending, self.missing, self.handles = False, [], []
        arrived = weakref.WeakMethod(self._arrived)  # a parameter that held its own gradients would never be freed
        for members in _buckets(self.parameters[::-1]):
            flat = torch.zeros(sum(p.numel() for p in members), dtype=members[0].dtype, device=members[0].device)
            for parameter, view in zip(members, _views(flat, members)):
                parameter.grad = self.views[parameter] = view
                self.bucket_of[parameter] = len(self.flats)
                parameter.register_post_accumulate_grad_hook(lambda parameter: arrived()(parameter))
            self.flats.append(flat)

    def clear(self):
        for flat in self.flats:
            flat.zero_()

    def expect_last(self):
        self.sending = True
        self.missing = [0] * len(self.flats)
        for bucket in self.bucket_of.values():
            self.missing[bucket] += 1

    def _arrived(self, parameter):
        assert parameter.grad is self.views[parameter], 'a gradient left its bucket: clear() is the way to reset it'
        if self.sending:
            self.missing[self.bucket_of[parameter]] -= 1
            self._send_filled()

    def _send_filled(self):
        while len(self.handles) < len(self.flats) and self.missing[len(self.handles)] == 0:
            self.handles.append(self.engine.start_sum_(self.flats[len(self.handles)]))

    def wait(self):
        self.missing = [0] * len(self.flats)
        self._send_filled()
        for handle, flat in zip(self.handles, self.flats):
            self.engine.wait(handle)
            flat.div_(self.size)
        self.sending, self.handles = False, []


@torch.no_grad()
def in_buckets(act, tensors):
    """Call `act` on vectors that hold `tensors` together, and put what it leaves there back into them."""
    for members in _buckets(tensors):
        flat = torch.cat([tensor.flatten() for tensor in members])
        act(flat)
        for tensor, view in zip(members, _views(flat, members)):
            tensor.copy_(view)


def _views(flat, tensors):
    """The parts of a vector that are as large as `tensors`, in their shapes."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors)]


def _buckets(tensors):
    """Split a list of tensors into runs of about BUCKET_BYTES, of one type and on one device."""
    found, room = [], 0
    for tensor in tensors:
        if room <= 0 or (tensor.dtype, tensor.device) != (found[-1][0].dtype, found[-1][0].device):
            found.append([])
            room = BUCKET_BYTES
        found[-1].append(tensor)
        room -= tensor.numel() * tensor.element_size()
    return found
