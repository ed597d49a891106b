"""What the ranks of a run say to each other.

`Comm` is the interface: one implementation for a single process, one for the ranks that MPI
started. There, MPI carries small objects and broadcasts, and an engine sums tensors, see `engines`.
"""

import abc
import functools
import os
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from lm_human_preferences.distributed import mpi_library
from lm_human_preferences.distributed.engines import Engine, create_engine
from lm_human_preferences.distributed.env import launched_size
from lm_human_preferences.distributed.gradients import Gradients, OverlappedGradients
from lm_human_preferences.errors import UserError

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


class MpiComm(Comm):
    """Several ranks that MPI started; the engine that `allreduce` names sums their tensors."""

    def __init__(self, allreduce: str) -> None:
        mpi = mpi_library.load_mpi()
        self.world = mpi.COMM_WORLD
        self.rank = self.world.Get_rank()
        self.size = self.world.Get_size()
        self.barrier()
        _unlink_shared_memory()
        if self.size != launched_size():
            raise UserError(
                f'{launched_size()} ranks were started, but each sees a world of {self.size}: they'
                ' were started by the mpiexec of another MPI; put the one of this environment'
                ' first on PATH'
            )
        self.node = self.world.Split_type(mpi.COMM_TYPE_SHARED)
        self.local_rank = self.node.Get_rank()
        self.local_size = self.node.Get_size()
        self._share_host()
        self.engine: Engine = create_engine(allreduce, self)
        if self.rank == 0:
            announcement = mpi_library.announcement()
            print(f'{self.size} ranks, averaging by {self.engine.name}{announcement}')

    def _share_host(self) -> None:
        """Take a GPU of this rank's own; where no rank sees one, a share of the processors."""
        gpus = self.node.allgather(_visible_gpus())
        if any(gpus):
            torch.cuda.set_device(choose_gpu(gpus, self.local_rank))
        elif 'OMP_NUM_THREADS' not in os.environ:
            affinities = self.node.allgather(os.sched_getaffinity(0))
            torch.set_num_threads(share_threads(affinities, self.local_rank))

    def broadcast_(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite `tensors` on all ranks with those of rank 0, one after another."""
        # By MPI, as engines have timeouts: MPI waits for as long as another rank takes to get here.
        for tensor in tensors:
            host = tensor.detach().cpu().contiguous()
            self.world.Bcast(host.numpy())
            tensor.detach().copy_(host)

    def all_reduce_mean_(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite `tensors` with their mean over ranks; all sums start before the first wait."""
        started = [(tensor, self.engine.all_reduce_async_(tensor)) for tensor in tensors]
        for tensor, handle in started:
            self.engine.synchronize(handle)
            tensor.div_(self.size)

    def average_gradients(self, parameters: Iterable[torch.Tensor]) -> Gradients:
        return OverlappedGradients(parameters, self.size, self.engine)

    def all_gather_object(self, value: T) -> list[T]:
        return self.world.allgather(value)

    def barrier(self) -> None:
        self.world.Barrier()


@functools.cache
def init_comm(allreduce: str = 'auto') -> Comm:
    """The ranks that this process belongs to: those that MPI started, or it alone.

    allreduce: see `engines`. UserError where the ranks cannot work together.
    """
    return LocalComm() if launched_size() == 1 else MpiComm(allreduce)


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


def share_threads(affinities: Sequence[set[int]], local_rank: int) -> int:
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
