"""Communication between several ranks: small objects by Gloo, gradients by NCCL or Horovod."""

import contextlib
import datetime
import faulthandler
import os
import re
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from lm_human_preferences.distributed import horovod, launch_methods, meeting, messages
from lm_human_preferences.distributed.comm import Comm, T
from lm_human_preferences.distributed.gradients import Gradients, OverlappedGradients
from lm_human_preferences.distributed.meeting import RankLost
from lm_human_preferences.machine import process

STACKS_SECONDS = 5  # between the timeout and the print of stacks


class TorchComm(Comm):
    """Several ranks that have met at a store, with a process group of torch.distributed."""

    def __init__(self, allreduce: str, seconds: int) -> None:
        """allreduce: one of ENGINES. seconds: how long ranks wait for each other."""
        self.dist = torch.distributed
        launch = launch_methods.current()
        self.rank, self.size = launch.rank, launch.size
        timeout = datetime.timedelta(seconds=seconds)
        # MPI_Init, or a store at a wrong address, may wait for ever. Then ranks print their stacks.
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
        """Choose this rank's GPU, or its number of threads if no rank of the host sees a GPU."""
        devices = range(torch.cuda.device_count())
        gpus = [str(torch.cuda.get_device_properties(each).uuid) for each in devices]
        # Containers of one host have its boot id, but processors and memory of their own.
        host = f'{socket.gethostname()} {Path("/proc/sys/kernel/random/boot_id").read_text()}'
        own = host, gpus, sorted(os.sched_getaffinity(0))
        of_ranks = self.all_gather_object(own)
        self.local_rank = sum(each[0] == host for each in of_ranks[: self.rank])
        here = [each for each in of_ranks if each[0] == host]
        self.local_size = len(here)
        _, gpus_of_ranks, processors_of_ranks = zip(*here)
        if any(gpus_of_ranks):
            torch.cuda.set_device(process.choose_gpu(gpus_of_ranks, self.local_rank))
        else:
            process.limit_threads(processors_of_ranks, self.local_rank)

    def average_gradients(self, parameters: Iterable[torch.Tensor]) -> Gradients:
        return OverlappedGradients(parameters, self.size, self._begin_sum)

    def _begin_sum(self, tensor: torch.Tensor) -> Callable[[], object]:
        """Begin to overwrite `tensor` with its sum over ranks; return a function that waits."""
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
                with noticing_lost_ranks():  # as bytes: Gloo does not know all types
                    self.dist.broadcast(host.reshape(-1).view(torch.uint8), src=0)
            tensor.detach().copy_(host)

    def all_gather_object(self, value: T) -> list[T]:
        """Return the `value` of every rank; see `messages` for possible types."""
        message = bytearray(messages.encode(value))
        lengths = self._all_gather(torch.tensor([len(message)]))
        padded = message.ljust(int(max(lengths)))  # JSON may end in spaces
        values = []
        for received in self._all_gather(torch.frombuffer(padded, dtype=torch.uint8)):
            values.append(messages.decode(received.numpy().tobytes()))
        return values

    def _all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the `tensor` of every rank; all have the same shape."""
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


@contextlib.contextmanager
def noticing_lost_ranks() -> Iterator[None]:
    """Turn a lost connection, or a timeout, within the block into a `RankLost`."""
    try:
        yield
    except RuntimeError as error:
        # Gloo raises plain RuntimeErrors; the process group's other errors are DistErrors.
        if not isinstance(error, torch.distributed.DistError) and type(error) is not RuntimeError:
            raise
        # Leave out the place in Gloo's source, and Gloo's advice.
        reason = re.sub(r'^\[\S+\] |\.( This is typically .*)?$', '', str(error).splitlines()[0])
        raise RankLost(f'{reason}; see --run.allreduce_timeout') from error
