"""What the ranks of a run say to each other.

`Comm` is the interface: one implementation for a single process, one for ranks with MPI and one for
those without. MPI, or Gloo, carries small objects and broadcasts; an engine sums tensors, see
`engines`.
"""

import abc
import contextlib
import datetime
import functools
import os
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from lm_human_preferences.distributed import launch_methods, messages, network
from lm_human_preferences.distributed.engines import (
    Engine,
    TorchEngine,
    backend_options,
    create_engine,
    init_torch,
)
from lm_human_preferences.distributed.gradients import Gradients, OverlappedGradients
from lm_human_preferences.distributed.libraries import mpi_library
from lm_human_preferences.distributed.lifeline import (
    Lifeline,
    ending_a_start_after,
    noticing_lost_ranks,
    tell_failures_through,
)
from lm_human_preferences.distributed.waiting import DEFAULT_TIMEOUTS, Timeouts
from lm_human_preferences.errors import UserError
from lm_human_preferences.machine import threads

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

AS_LONG_AS_IT_TAKES = datetime.timedelta(days=365)
T = TypeVar('T')


class Comm(abc.ABC):
    """The ranks of a run, as one of them sees them.

    Every method is collective: all ranks have to call it, in the same order.
    """

    rank: int  # this one, from 0
    size: int
    local_rank: int  # this one among those on its host, from 0
    local_size: int

    @abc.abstractmethod
    def broadcast_(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite `tensors` on all ranks with those of rank 0."""

    @abc.abstractmethod
    def average_gradients(self, parameters: Iterable[torch.Tensor]) -> Gradients:
        """A `Gradients` for `parameters`, which averages what backward passes leave in them."""

    @abc.abstractmethod
    def all_gather_object(self, value: T) -> list[T]:
        """`value` of every rank, in the order of ranks."""

    @abc.abstractmethod
    def barrier(self) -> None:
        """Wait until every rank is here."""

    def close(self) -> None:
        """To be called when the work is done: one rank may end before the others after this."""
        self.barrier()

    def all_reduce_mean(self, stats: Mapping[str, float], weight: float = 1.0) -> dict[str, float]:
        """The mean over ranks of each number in `stats`.

        weight: what this rank counts in the mean. With 0 its `stats` may be empty.
        """
        everything = self.all_gather_object((dict(stats), weight))
        counting = [(each, weight) for each, weight in everything if weight > 0]
        total = sum(weight for _, weight in counting)
        means = {}
        for name in counting[0][0]:
            means[name] = sum(each[name] * weight for each, weight in counting) / total
        return means


class LocalComm(Comm):
    """A single process: collectives have nothing to do."""

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


class EngineComm(Comm):
    """Several ranks; an engine sums their tensors."""

    engine: Engine

    @abc.abstractmethod
    def all_gather_on_host(self, value: T) -> list[T]:
        """`value` of every rank on this host, in the order of ranks."""

    def average_gradients(self, parameters: Iterable[torch.Tensor]) -> Gradients:
        return OverlappedGradients(parameters, self.size, self.engine)

    def _share_host(self) -> None:
        """Take a GPU of this rank's own; where no rank sees one, a share of the processors."""
        gpus = self.all_gather_on_host(_visible_gpus())
        if any(gpus):
            torch.cuda.set_device(choose_gpu(gpus, self.local_rank))
        elif not threads.is_set_by_user():
            affinities = self.all_gather_on_host(sorted(os.sched_getaffinity(0)))
            threads.limit_threads(affinities, self.local_rank)

    def _announce(self, more: str = '') -> None:
        if self.rank == 0:
            print(f'{self.size} ranks, averaging by {self.engine.name}{more}')


class MpiComm(EngineComm):
    """Several ranks that MPI started; the engine that `allreduce` names sums their tensors."""

    def __init__(self, allreduce: str, timeouts: Timeouts) -> None:
        self._meeting: tuple[Store, network.Endpoint] | None = None
        launched = launch_methods.current()
        is_watched = launched.watches_ranks
        with contextlib.nullcontext() if is_watched else ending_a_start_after(timeouts.rank):
            mpi = mpi_library.load_mpi()
            self.world = mpi.COMM_WORLD
            self.rank = self.world.Get_rank()
            self.size = self.world.Get_size()
            self.barrier()
        _unlink_shared_memory()
        if self.size != launched.size:
            raise UserError(
                f'{launched.size} ranks were started, but each sees a world of {self.size}:'
                f' {mpi_library.why_worlds_differ()}'
            )
        self.node = self.world.Split_type(mpi.COMM_TYPE_SHARED)
        self.local_rank = self.node.Get_rank()
        self.local_size = self.node.Get_size()
        self._share_host()
        self.engine = create_engine(allreduce, self, timeouts.allreduce)
        self.lifeline = None if is_watched else self._start_lifeline(timeouts.rank)
        self._announce(mpi_library.announcement())

    def meet(self) -> 'tuple[Store, network.Endpoint]':
        """The store that all ranks are connected to, and where it is; see `network`."""
        if self._meeting is None:
            self._meeting = network.meet_over_mpi(self)
        return self._meeting

    def _start_lifeline(self, seconds: int) -> Lifeline | None:
        """Notice ranks that are stopped or gone, if all hosts reach rank 0's by TCP."""
        try:
            _, place = self.meet()
        except UserError:
            return None  # this engine does without
        store = network.open_store(place, is_host=False, seconds=seconds)
        return Lifeline(store, self.rank, self.size, seconds)

    def close(self) -> None:
        super().close()
        if self.lifeline:
            self.lifeline.close()

    def all_gather_on_host(self, value: T) -> list[T]:
        return self.node.allgather(value)

    def broadcast_(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite `tensors` on all ranks with those of rank 0, one after another."""
        # By MPI, as engines have timeouts: MPI waits for as long as another rank takes to get here.
        for tensor in tensors:
            host = tensor.detach().cpu().contiguous()
            self.world.Bcast(host.numpy())
            tensor.detach().copy_(host)

    def all_gather_object(self, value: T) -> list[T]:
        return self.world.allgather(value)

    def barrier(self) -> None:
        self.world.Barrier()


class TorchComm(EngineComm):
    """Several ranks without MPI, that torchrun or srun started.

    They meet at a store, see `network`. A Gloo group, which waits for as long as another rank takes
    to get there, carries small objects and broadcasts; another group is the engine. A rank that is
    gone is noticed by its `lifeline`.
    """

    def __init__(self, allreduce: str, timeouts: Timeouts) -> None:
        import torch.distributed

        self.dist = torch.distributed
        launched = launch_methods.current()
        self.rank = launched.rank
        self.size = launched.size
        place = launched.endpoint()
        store = network.open_store(place, is_host=launched.keeps_store, seconds=timeouts.rank)
        own_store = network.open_store(place, is_host=False, seconds=timeouts.rank)
        self.lifeline = Lifeline(own_store, self.rank, self.size, timeouts.rank)
        tell_failures_through(self.lifeline)
        if allreduce not in ('auto', 'torch'):
            raise UserError(
                f'--run.allreduce {allreduce} needs MPI, which these ranks were started without:'
                ' take auto or torch, or start them by mpiexec'
            )
        network.choose_interface(store, place, self.rank, self.size)
        init_torch(store, self.rank, self.size, backend='gloo', timeout=AS_LONG_AS_IT_TAKES)
        hosts = self.all_gather_object(network.host_identity())
        self.ranks_here = [rank for rank in range(self.size) if hosts[rank] == hosts[self.rank]]
        self.local_rank = self.ranks_here.index(self.rank)
        self.local_size = len(self.ranks_here)
        self._share_host()
        with noticing_lost_ranks():
            group = self.dist.new_group(**backend_options(timeouts.allreduce))
        self.engine = TorchEngine(group)
        self._announce()

    def all_gather_on_host(self, value: T) -> list[T]:
        values = self.all_gather_object(value)
        return [values[rank] for rank in self.ranks_here]

    def broadcast_(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite `tensors` on all ranks with those of rank 0, one after another."""
        for tensor in tensors:
            host = tensor.detach().cpu().contiguous()
            if host.numel():
                # As bytes: Gloo does not know all types.
                with noticing_lost_ranks():
                    self.dist.broadcast(host.reshape(-1).view(torch.uint8), src=0)
                tensor.detach().copy_(host)

    def all_gather_object(self, value: T) -> list[T]:
        """`value` of every rank, in the order of ranks; see `messages` for what it may be."""
        message = torch.frombuffer(bytearray(messages.encode(value)), dtype=torch.uint8)
        lengths = [int(length) for length in self._all_gather(torch.tensor([len(message)]))]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(message)] = message
        received = self._all_gather(padded)
        return [
            messages.decode(part[:length].numpy().tobytes())
            for part, length in zip(received, lengths, strict=True)
        ]

    def _all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """`tensor` of every rank; all have the same shape."""
        tensors = [torch.empty_like(tensor) for _ in range(self.size)]
        with noticing_lost_ranks():
            self.dist.all_gather(tensors, tensor)
        return tensors

    def barrier(self) -> None:
        with noticing_lost_ranks():
            self.dist.barrier()

    def close(self) -> None:
        super().close()
        self.lifeline.close()


@functools.cache
def init_comm(allreduce: str = 'auto', timeouts: Timeouts = DEFAULT_TIMEOUTS) -> Comm:
    """The ranks that this process belongs to: those that a launcher started, or it alone.

    allreduce: see `engines`. UserError where the ranks cannot work together.
    """
    launched = launch_methods.current()
    if launched.size == 1:
        threads.limit_alone()
        return LocalComm()
    if launched.has_mpi:
        return MpiComm(allreduce, timeouts)
    return TorchComm(allreduce, timeouts)


def choose_gpu(visible: Sequence[Sequence[str]], local_rank: int) -> int:
    """Number of the first GPU visible to `local_rank` that no rank before it on its host takes.

    visible: what each rank of this host sees. So rank r takes GPU r of those that all see, or the
    only one that it sees, as Slurm may deal them out. UserError if GPUs do not suffice for every
    rank.
    """
    taken = []
    for gpus in visible:
        taken.append(next((gpu for gpu in gpus if gpu not in taken), None))
    own = visible[local_rank]
    if None in taken:
        raise UserError(
            f'{len(visible)} ranks on {socket.gethostname()}, which has {len(own)}'
            f' visible GPU(s): take --mpi {len(own)}, or make more visible by'
            ' CUDA_VISIBLE_DEVICES'
        )
    return own.index(taken[local_rank])


def _visible_gpus() -> list[str]:
    count = torch.cuda.device_count()
    return [str(torch.cuda.get_device_properties(i).uuid) for i in range(count)]


def _unlink_shared_memory() -> None:
    """Unlink the files through which MPICH's ranks share memory: all have them open by now.

    So ranks that are killed leave none behind.
    """
    maps = Path('/proc/self/maps').read_text()
    for path in set(re.findall(r'/dev/shm/mpich_\S+$', maps, re.MULTILINE)):
        Path(path).unlink(missing_ok=True)
