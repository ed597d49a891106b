"""Communication between several ranks: over MPI, or by torch.distributed without it."""

import abc
import contextlib
import datetime
import functools
import os
import re
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from lm_human_preferences.distributed import launch_methods, messages, rendezvous, waiting
from lm_human_preferences.distributed.comm import Comm, T
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
)
from lm_human_preferences.distributed.waiting import Timeouts
from lm_human_preferences.errors import UserError
from lm_human_preferences.machine import threads

AS_LONG_AS_IT_TAKES = datetime.timedelta(days=365)


class EngineComm(Comm):
    """Several ranks; an engine sums their tensors. lifeline: what notices ranks that are gone."""

    engine: Engine
    lifeline: Lifeline | None

    @abc.abstractmethod
    def all_gather_on_host(self, value: T) -> list[T]:
        """Return the `value` of every rank on this host, in the order of ranks."""

    @abc.abstractmethod
    def _broadcast(self, host: torch.Tensor) -> None:
        """Overwrite a contiguous tensor in host memory with that of rank 0."""

    def average_gradients(self, parameters: Iterable[torch.Tensor]) -> Gradients:
        return OverlappedGradients(parameters, self.size, self.engine)

    def broadcast_(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite `tensors` with those of rank 0, one after another."""
        # Not by the engine, which has a timeout: ranks may wait long for another to get here.
        self.barrier()
        for tensor in tensors:
            host = tensor.detach().cpu().contiguous()
            self._broadcast(host)
            tensor.detach().copy_(host)

    def close(self) -> None:
        super().close()
        if self.lifeline:
            self.lifeline.close()

    def _share_host(self, allreduce: str = 'auto') -> None:
        """Take a GPU; where no rank sees one, a share of the processors."""
        devices = range(torch.cuda.device_count())
        own = [str(torch.cuda.get_device_properties(each).uuid) for each in devices]
        gpus = self.all_gather_on_host(own)
        if any(gpus):
            shares = allreduce == 'gloo'
            torch.cuda.set_device(choose_gpu(gpus, self.local_rank, shares=shares))
        else:
            affinities = self.all_gather_on_host(sorted(os.sched_getaffinity(0)))
            threads.limit_threads(affinities, self.local_rank)

    def _announce(self, more: str = '') -> None:
        if self.rank == 0:
            print(f'{self.size} ranks, averaging by {self.engine.name}{more}')


class MpiComm(EngineComm):
    """Several ranks that MPI started; the engine that `allreduce` names sums their tensors."""

    def __init__(self, allreduce: str, timeouts: Timeouts) -> None:
        launched = launch_methods.current()
        is_watched = launched.watches_ranks
        with contextlib.nullcontext() if is_watched else ending_a_start_after(timeouts.rank):
            mpi = mpi_library.load_mpi()
            mpi.pickle.__init__(messages.encode, messages.decode)  # in place of pickles
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
        self._share_host(allreduce)
        self.engine = create_engine(allreduce, self, timeouts.allreduce)
        self.lifeline = None if is_watched else self._start_lifeline(timeouts.rank)
        self._announce(mpi_library.announcement())

    @functools.cached_property
    def meeting(self) -> tuple[Any, rendezvous.Endpoint]:
        """Return the store that all ranks are connected to, and its endpoint."""
        return rendezvous.meet_over_mpi(self.world, self.node)

    def _start_lifeline(self, seconds: int) -> Lifeline | None:
        """Notice ranks that are stopped or gone, if all hosts reach rank 0's by TCP."""
        try:
            _, place = self.meeting
        except UserError:
            return None  # this engine does without
        store = rendezvous.open_store(place, is_host=False, seconds=seconds)
        return Lifeline(store, self.rank, self.size, seconds)

    def all_gather_on_host(self, value: T) -> list[T]:
        return self.node.allgather(value)

    def _broadcast(self, host: torch.Tensor) -> None:
        self.world.Bcast(host.numpy())

    def all_gather_object(self, value: T) -> list[T]:
        self.barrier()
        return self.world.allgather(value)

    def barrier(self) -> None:
        """Wait for the other ranks asleep: MPI by itself keeps a processor busy meanwhile."""
        waiting.sleep_until(self.world.Ibarrier().Test)


class TorchComm(EngineComm):
    """Several ranks without MPI that meet at a store; a Gloo group carries small objects."""

    def __init__(self, allreduce: str, timeouts: Timeouts) -> None:
        import torch.distributed

        self.dist = torch.distributed
        launched = launch_methods.current()
        self.rank = launched.rank
        self.size = launched.size
        place = launched.endpoint()
        store = rendezvous.open_store(place, is_host=launched.keeps_store, seconds=timeouts.rank)
        own_store = rendezvous.open_store(place, is_host=False, seconds=timeouts.rank)
        self.lifeline = Lifeline(own_store, self.rank, self.size, timeouts.rank)
        Lifeline.of_failures = self.lifeline
        if allreduce not in ('auto', 'torch', 'gloo'):
            raise UserError(
                f'--run.allreduce {allreduce} needs MPI, which these ranks were started without:'
                ' use auto or torch, or start them by mpiexec'
            )
        rendezvous.choose_interface(store, place, self.rank, self.size)
        init_torch(store, self.rank, self.size, backend='gloo', timeout=AS_LONG_AS_IT_TAKES)
        hosts = self.all_gather_object(rendezvous.host_identity())
        self.ranks_here = [rank for rank in range(self.size) if hosts[rank] == hosts[self.rank]]
        self.local_rank = self.ranks_here.index(self.rank)
        self.local_size = len(self.ranks_here)
        self._share_host(allreduce)
        with noticing_lost_ranks():
            group = self.dist.new_group(**backend_options(allreduce, timeouts.allreduce))
        self.engine = TorchEngine(group)
        self._announce()

    def all_gather_on_host(self, value: T) -> list[T]:
        values = self.all_gather_object(value)
        return [values[rank] for rank in self.ranks_here]

    def _broadcast(self, host: torch.Tensor) -> None:
        if host.numel():
            # As bytes: Gloo does not know all types.
            with noticing_lost_ranks():
                self.dist.broadcast(host.reshape(-1).view(torch.uint8), src=0)

    def all_gather_object(self, value: T) -> list[T]:
        """Return the `value` of every rank; see `messages` for its types."""
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
        """Return the `tensor` of every rank; all have the same shape."""
        tensors = [torch.empty_like(tensor) for _ in range(self.size)]
        with noticing_lost_ranks():
            self.dist.all_gather(tensors, tensor)
        return tensors

    def barrier(self) -> None:
        with noticing_lost_ranks():
            self.dist.barrier()


def choose_gpu(visible: Sequence[Sequence[str]], local_rank: int, *, shares: bool = False) -> int:
    """Return the first own GPU that no lower rank of this host takes; UserError if none.

    shares: ranks take turns instead where there are too few.
    """
    taken = []
    for gpus in visible:
        taken.append(next((gpu for gpu in gpus if gpu not in taken), None))
    own = visible[local_rank]
    if None in taken and own and shares:
        return local_rank % len(own)
    if None in taken:
        raise UserError(
            f'{len(visible)} ranks on {socket.gethostname()}, which has {len(own)}'
            f' visible GPU(s): use --mpi {len(own)}, make more visible by CUDA_VISIBLE_DEVICES, or'
            ' share them by --run.allreduce gloo'
        )
    return own.index(taken[local_rank])


def _unlink_shared_memory() -> None:
    """Unlink MPICH's shared memory, which all ranks have open: killed ranks leave none behind."""
    maps = Path('/proc/self/maps').read_text()
    for path in set(re.findall(r'/dev/shm/mpich_\S+$', maps, re.MULTILINE)):
        Path(path).unlink(missing_ok=True)
