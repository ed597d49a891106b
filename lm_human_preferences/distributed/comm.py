"""Communication between ranks: `Comm` is for a single rank, TorchComm for several ranks."""

import functools
import importlib
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from lm_human_preferences.distributed import ALLREDUCE_TIMEOUT, launch_methods
from lm_human_preferences.machine import hardware

T = TypeVar('T')

MEETING_SECONDS = 1  # while rank 0 works alone, ranks exchange a sign of life after so many seconds


class Gradients:
    """Gradients of a single rank, without averaging; base class of gradients of several ranks."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self.parameters = list(parameters)

    def zero_grad(self) -> None:
        """Drop the gradients; call it before the first backward pass of an update."""
        for parameter in self.parameters:
            parameter.grad = None

    def require_sync(self) -> None:
        """Announce the last backward pass of an update; averaging may overlap with this pass."""

    def synchronize(self) -> None:
        """Wait until every gradient is averaged over ranks."""


class Comm:
    """Communication between ranks, here for a single rank; base class for several ranks.

    All ranks must call the methods in the same order.
    """

    name = 'nothing'  # name of the library that averages gradients, for the console
    rank = 0  # number of this process among the ranks, from 0
    size = 1  # number of ranks in the job
    local_size = 1  # number of ranks on this host

    def broadcast_(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite `tensors` on all ranks with those of rank 0."""

    def average_gradients(self, parameters: Iterable[torch.Tensor]) -> Gradients:
        """Return the object that averages the gradients of `parameters` over ranks."""
        return Gradients(parameters)

    def all_gather_object(self, value: T) -> list[T]:
        """Return the `value` of every rank, in the order of ranks."""
        return [value]

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self.all_gather_object(None)

    def close(self) -> None:
        """End the communication; afterwards, ranks may end one by one."""

    def all_reduce_mean(self, stats: Mapping[str, float], weight: float = 1.0) -> dict[str, float]:
        """Return weighted means of numbers over ranks; a rank of weight 0 may have no `stats`."""
        everything = self.all_gather_object((dict(stats), weight))
        counting = [(each, weight) for each, weight in everything if weight > 0]
        total = sum(weight for _, weight in counting)
        means = {}
        for name in counting[0][0]:
            means[name] = sum(each[name] * weight for each, weight in counting) / total
        return means

    def on_rank_0(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0, however long it takes; return its result on all ranks.

        Meanwhile the ranks exchange a message every second, as they wait only a limited time.
        """
        if self.size == 1:
            return work()
        while self.rank:
            message: Any = self.all_gather_object(None)[0]
            is_done, result = message
            if is_done:
                return result
        is_done = threading.Event()
        with ThreadPoolExecutor(1) as thread:
            # If a rank is lost, the new thread's error is ignored: the main thread raises one, too.
            thread.submit(self._meet_until, is_done)
            try:
                result = work()
            finally:
                is_done.set()
        self.all_gather_object((True, result))
        return result

    def _meet_until(self, is_done: threading.Event) -> None:
        while not is_done.wait(MEETING_SECONDS):
            self.all_gather_object((False, None))


@functools.cache
def init_comm(allreduce: str = 'auto', seconds: int = ALLREDUCE_TIMEOUT) -> Comm:
    """Return this process's Comm; UserError if the ranks cannot work together.

    allreduce: one of ENGINES. seconds: how long ranks wait for each other.
    """
    if launch_methods.current().size == 1:
        hardware.limit_alone()
        return Comm()
    # Import torch_comm late: it imports this module, and a single rank does not need torch_comm.
    torch_comm = importlib.import_module('lm_human_preferences.distributed.torch_comm')
    return torch_comm.TorchComm(allreduce, seconds)
