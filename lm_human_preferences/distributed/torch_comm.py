"""Communication between several ranks: small objects by Gloo, gradients by NCCL or Horovod."""

import base64
import contextlib
import datetime
import faulthandler
import itertools
import json
import os
import re
import socket
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch.distributed

from lm_human_preferences.distributed import horovod, launch_methods, meeting
from lm_human_preferences.distributed.comm import Comm, Gradients, T
from lm_human_preferences.distributed.meeting import RankLost
from lm_human_preferences.machine import hardware

_TENSOR = '\0tensor'  # the only key of a JSON object that encodes a tensor
# Buckets of this many bytes are averaged while the backward pass computes more gradients.
BUCKET_BYTES = 64 << 20
STACKS_SECONDS = 5  # seconds after the timeout until stack traces are printed


class TorchComm(Comm):
    """Communication between several ranks by torch.distributed."""

    def __init__(self, allreduce: str, seconds: int) -> None:
        """Connect the ranks. allreduce: one of ENGINES. seconds: longest wait for another rank."""
        self.dist = torch.distributed
        launch = launch_methods.current()
        self.rank, self.size = launch.rank, launch.size
        timeout = datetime.timedelta(seconds=seconds)
        # If MPI_Init or a wrong address makes this rank wait for ever, print stack traces and exit.
        later = seconds + STACKS_SECONDS * (2 if self.rank else 1)
        faulthandler.dump_traceback_later(later, exit=True, file=sys.__stderr__ or sys.stderr)
        group = {'rank': self.rank, 'world_size': self.size, 'timeout': timeout}
        with noticing_lost_ranks():
            self.dist.init_process_group('gloo', store=meeting.meet(seconds), **group)
        faulthandler.cancel_dump_traceback_later()
        self._share_host()
        self.horovod = None
        if all(self.all_gather_object(horovod.is_chosen(allreduce, launch.family))):
            self.horovod = horovod.Horovod(seconds)
            self.name = 'horovod'
            return
        self.group: Any = self.dist.group.WORLD
        self.name = 'torch (gloo)'
        if torch.cuda.is_available():
            device = torch.device('cuda', torch.cuda.current_device())
            self.group = self.dist.new_group(backend='nccl', timeout=timeout, device_id=device)
            self.name = 'torch (nccl)'

    def _share_host(self) -> None:
        """Choose this rank's GPU, or its number of threads if no rank on this host sees a GPU."""
        devices = range(torch.cuda.device_count())
        gpus = [str(torch.cuda.get_device_properties(each).uuid) for each in devices]
        # Each container counts as a host: containers share a boot id, but not their processors.
        host = f'{socket.gethostname()} {Path("/proc/sys/kernel/random/boot_id").read_text()}'
        own = host, gpus, sorted(os.sched_getaffinity(0))
        of_ranks = self.all_gather_object(own)
        local_rank = sum(each[0] == host for each in of_ranks[: self.rank])
        here = [each for each in of_ranks if each[0] == host]
        self.local_size = len(here)
        _, gpus_of_ranks, processors_of_ranks = zip(*here)
        if any(gpus_of_ranks):
            torch.cuda.set_device(hardware.choose_gpu(gpus_of_ranks, local_rank))
        else:
            hardware.limit_threads(processors_of_ranks, local_rank)

    def average_gradients(self, parameters: Iterable[torch.Tensor]) -> Gradients:
        return OverlappedGradients(parameters, self.size, self._begin_sum)

    def _begin_sum(self, tensor: torch.Tensor) -> Callable[[], object]:
        """Start replacing `tensor` by its sum over ranks; return a function that waits for it."""
        if self.horovod:
            return self.horovod.begin_sum(tensor)
        with noticing_lost_ranks():
            work: Any = self.dist.all_reduce(tensor, group=self.group, async_op=True)
        return noticing_lost_ranks()(work.wait)

    def broadcast_(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite `tensors` with those of rank 0, one after another."""
        for tensor in tensors:
            host = tensor.detach().cpu().contiguous()
            if host.numel():
                with noticing_lost_ranks():  # send bytes, as Gloo does not know all dtypes
                    self.dist.broadcast(host.reshape(-1).view(torch.uint8), src=0)
            tensor.detach().copy_(host)

    def all_gather_object(self, value: T) -> list[T]:
        """Return the `value` of every rank; see `encode` for possible types."""
        message = bytearray(encode(value))
        lengths = self._all_gather(torch.tensor([len(message)]))
        padded = message.ljust(int(max(lengths)))  # JSON decoders ignore the spaces of this padding
        values = []
        for received in self._all_gather(torch.frombuffer(padded, dtype=torch.uint8)):
            values.append(decode(received.numpy().tobytes()))
        return values

    def _all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's `tensor`; all must have the same shape."""
        tensors = [torch.empty_like(tensor) for _ in range(self.size)]
        with noticing_lost_ranks():
            self.dist.all_gather(tensors, tensor)
        return tensors

    def close(self) -> None:
        """Wait for the other ranks, then end communication."""
        self.barrier()
        if self.horovod:
            self.horovod.close()
        self.dist.destroy_process_group()


class OverlappedGradients(Gradients):
    """Gradients that are averaged in large buckets while the last backward pass still computes.

    The last parameters come first. A parameter's `grad` becomes a view of its bucket, 0 if the loss
    does not depend on it. begin_sum: see TorchComm._begin_sum.
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
        self.buckets: list[torch.Tensor] = []  # one vector of concatenated gradients per bucket
        # `bucket_views` maps a parameter to its bucket's index and its gradient in that bucket.
        self.bucket_views: dict[torch.Tensor, tuple[int, torch.Tensor]] = {}
        # None, or the number of each bucket's missing gradients in the last backward pass
        self.pending: list[int] | None = None
        self.waits: list[Callable[[], object]] = []  # functions that wait for a bucket's average
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
        # A hook with a strong reference to this object would keep all parameters alive for ever.
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
        """In the last backward pass, copy a new gradient into its bucket, and send full buckets."""
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
        """Send the buckets that the backward pass has not filled, and wait for all averages."""
        for parameter, (_, view) in self.bucket_views.items():
            if parameter.grad is not view:
                self._fill(parameter)
        while len(self.waits) < len(self.buckets):
            self._send_next()
        for wait in self.waits:
            wait()
        self.pending = None
        self.waits = []


@contextlib.contextmanager
def noticing_lost_ranks() -> Iterator[None]:
    """Turn a lost connection or a timeout within the block into a `RankLost`."""
    try:
        yield
    except RuntimeError as error:
        # Gloo raises plain RuntimeErrors; other errors of torch.distributed are DistErrors.
        if not isinstance(error, torch.distributed.DistError) and type(error) is not RuntimeError:
            raise
        # Remove the position in Gloo's source code, and Gloo's advice, from the message.
        reason = re.sub(r'^\[\S+\] |\.( This is typically .*)?$', '', str(error).splitlines()[0])
        raise RankLost(f'communication failed: {reason}; see --run.allreduce_timeout') from error


def encode(value: Any) -> bytes:
    """Return `value` as JSON (a pickle could run code); TypeError for types that JSON lacks."""
    return json.dumps(value, default=_encode_numbers).encode()


def decode(message: bytes) -> Any:
    """Return the value encoded in `message`, with tuples as lists and tensors on the CPU."""
    return json.loads(message, object_hook=_decode_tensor)


def _encode_numbers(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if not isinstance(value, torch.Tensor):
        raise TypeError(f'ranks cannot send values of {type(value)} to each other')
    tensor = value.detach().cpu().contiguous()
    return {_TENSOR: base64.b64encode(safetensors.torch.save({_TENSOR: tensor})).decode()}


def _decode_tensor(value: dict[str, Any]) -> Any:
    if value.keys() != {_TENSOR}:
        return value
    return safetensors.torch.load(base64.b64decode(value[_TENSOR]))[_TENSOR]
