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
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from lm_human_preferences.distributed import messages, mpi_library, network
from lm_human_preferences.distributed.engines import (
    Engine,
    TorchEngine,
    backend_options,
    create_engine,
    init_torch,
)
from lm_human_preferences.distributed.env import (
    DEFAULT_TIMEOUTS,
    WITHOUT_MPI,
    Timeouts,
    launched_rank,
    launched_size,
    launcher_kind,
)
from lm_human_preferences.distributed.gradients import Gradients, OverlappedGradients
from lm_human_preferences.distributed.lifeline import (
    Lifeline,
    ending_a_start_after,
    noticing_lost_ranks,
    tell_failures_through,
)
from lm_human_preferences.errors import UserError

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
    def all_reduce_mean_(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite `tensors` with their mean over ranks."""

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

    def all_reduce_mean(self, stats: Mapping[str, float]) -> dict[str, float]:
        """The mean over ranks of each number in `stats`."""
        stats_of_ranks = self.all_gather_object(stats)
        means = {}
        for name in stats:
            means[name] = sum(each[name] for each in stats_of_ranks) / self.size
        return means


class LocalComm(Comm):
    """A single process: collectives have nothing to do."""

    rank = 0
    size = 1
    local_rank = 0
    local_size = 1

    def broadcast_(self, tensors: Iterable[torch.Tensor]) -> None:
        pass

    def all_reduce_mean_(self, tensors: Iterable[torch.Tensor]) -> None:
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

    def all_reduce_mean_(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite `tensors` with their mean over ranks; all sums start before the first wait."""
        started = [(tensor, self.engine.all_reduce_async_(tensor)) for tensor in tensors]
        for tensor, handle in started:
            self.engine.synchronize(handle)
            tensor.div_(self.size)

    def average_gradients(self, parameters: Iterable[torch.Tensor]) -> Gradients:
        return OverlappedGradients(parameters, self.size, self.engine)

    def _share_host(self) -> None:
        """Take a GPU of this rank's own; where no rank sees one, a share of the processors."""
        gpus = self.all_gather_on_host(_visible_gpus())
        if any(gpus):
            torch.cuda.set_device(choose_gpu(gpus, self.local_rank))
        elif 'OMP_NUM_THREADS' not in os.environ:
            affinities = self.all_gather_on_host(sorted(os.sched_getaffinity(0)))
            torch.set_num_threads(share_threads(affinities, self.local_rank))

    def _announce(self, more: str = '') -> None:
        if self.rank == 0:
            print(f'{self.size} ranks, averaging by {self.engine.name}{more}')


class MpiComm(EngineComm):
    """Several ranks that MPI started; the engine that `allreduce` names sums their tensors."""

    def __init__(self, allreduce: str, timeouts: Timeouts) -> None:
        # Our own launcher watches its ranks itself, and from their start.
        is_watched = launcher_kind() == 'ours'
        with contextlib.nullcontext() if is_watched else ending_a_start_after(timeouts.rank):
            mpi = mpi_library.load_mpi()
            self.world = mpi.COMM_WORLD
            self.rank = self.world.Get_rank()
            self.size = self.world.Get_size()
            self.barrier()
        _unlink_shared_memory()
        if self.size != launched_size():
            raise UserError(
                f'{launched_size()} ranks were started, but each sees a world of {self.size}:'
                f' {mpi_library.why_worlds_differ()}'
            )
        self.node = self.world.Split_type(mpi.COMM_TYPE_SHARED)
        self.local_rank = self.node.Get_rank()
        self.local_size = self.node.Get_size()
        self._share_host()
        self.engine = create_engine(allreduce, self, timeouts.allreduce)
        self.lifeline = None if is_watched else self._start_lifeline(timeouts.rank)
        self._announce(mpi_library.announcement())

    @functools.cached_property
    def meeting(self) -> 'tuple[Store, network.Endpoint]':
        """The store that all ranks are connected to, and where it is; see `network`."""
        return network.meet_over_mpi(self)

    def _start_lifeline(self, seconds: int) -> Lifeline | None:
        """Notice ranks that are stopped or gone, if all hosts reach rank 0's by TCP."""
        try:
            _, place = self.meeting
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
        self.rank = launched_rank()
        self.size = launched_size()
        place = network.endpoint()
        is_host = network.is_store_host()
        store = network.open_store(place, is_host=is_host, seconds=timeouts.rank)
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
    if launched_size() == 1:
        return LocalComm()
    if launcher_kind() in WITHOUT_MPI:
        return TorchComm(allreduce, timeouts)
    return MpiComm(allreduce, timeouts)


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


def share_threads(affinities: Sequence[Collection[int]], local_rank: int) -> int:
    """How many threads `local_rank` takes: its share of the processors that it may use.

    affinities: the processors that each rank of this host may use; MPI may bind ranks to some.
    """
    sharing = affinities.count(affinities[local_rank])
    return max(1, torch.get_num_threads() // sharing)


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
