"""Communication between ranks: `Comm`, for one process here; several_ranks.py has the others."""

import abc
import functools
import importlib
from collections.abc import Iterable, Mapping
from typing import TypeVar

import torch

from lm_human_preferences.distributed import launch_methods
from lm_human_preferences.distributed.gradients import Gradients
from lm_human_preferences.distributed.waiting import DEFAULT_TIMEOUTS, Timeouts
from lm_human_preferences.machine import threads

T = TypeVar('T')


class Comm(abc.ABC):
    """Ranks of a run, as one of them sees them. All ranks call its methods in the same order."""

    rank: int  # this one, from 0
    size: int
    local_rank: int  # this one among those on its host, from 0
    local_size: int

    @abc.abstractmethod
    def broadcast_(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite `tensors` on all ranks with those of rank 0."""

    @abc.abstractmethod
    def average_gradients(self, parameters: Iterable[torch.Tensor]) -> Gradients:
        """Return the `Gradients` that average those of `parameters`."""

    @abc.abstractmethod
    def all_gather_object(self, value: T) -> list[T]:
        """Return the `value` of every rank, in the order of ranks."""

    @abc.abstractmethod
    def barrier(self) -> None:
        """Wait until every rank is here."""

    def close(self) -> None:
        """End the communication: after this, one rank may end before the others."""
        self.barrier()

    def all_reduce_mean(self, stats: Mapping[str, float], weight: float = 1.0) -> dict[str, float]:
        """Return the mean over ranks of each number; with weight 0 `stats` may be empty."""
        everything = self.all_gather_object((dict(stats), weight))
        counting = [(each, weight) for each, weight in everything if weight > 0]
        total = sum(weight for _, weight in counting)
        means = {}
        for name in counting[0][0]:
            means[name] = sum(each[name] * weight for each, weight in counting) / total
        return means


class LocalComm(Comm):
    """Single process: nothing is exchanged."""

    rank = 0
    size = 1
    local_rank = 0
    local_size = 1

    def broadcast_(self, tensors: Iterable[torch.Tensor]) -> None:
        pass

    def average_gradients(self, parameters: Iterable[torch.Tensor]) -> Gradients:
        return Gradients(parameters)

    def all_gather_object(self, value: T) -> list[T]:
        return [value]

    def barrier(self) -> None:
        pass


@functools.cache
def init_comm(allreduce: str = 'auto', timeouts: Timeouts = DEFAULT_TIMEOUTS) -> Comm:
    """Return the ranks of this process, or it alone; UserError if they cannot work together."""
    launched = launch_methods.current()
    if launched.size == 1:
        threads.limit_alone()
        return LocalComm()
    # One process needs neither MPI nor torch.distributed. By name: that module builds on this one.
    several = importlib.import_module('lm_human_preferences.distributed.several_ranks')
    kind = several.MpiComm if launched.has_mpi else several.TorchComm
    return kind(allreduce, timeouts)
