"""What the ranks of a run say to each other: the only module that knows MPI, Horovod and
torch.distributed.

MPI starts the ranks, carries small objects and broadcasts. Tensors are summed by one of three
engines, `--run.allreduce`:

    horovod     Horovod over MPI; NCCL for tensors on GPUs where it was built with it
    torch       torch.distributed: NCCL on GPUs, Gloo on CPUs; the ranks find each other through MPI
    mpi         mpi4py on host memory: slow with GPUs, works wherever MPI does
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import os
import re
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch

from lm_human_preferences.distributed import network
from lm_human_preferences.distributed.gradients import Engine, Gradients, OverlappedGradients
from lm_human_preferences.distributed.ranks import launched_size
from lm_human_preferences.errors import UserError

T = TypeVar('T')


class LocalComm:
    """A world of one rank: everything it would say to others is already known."""

    rank = local_rank = 0
    size = local_size = 1

    def broadcast_(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite `tensors` on all ranks with those of rank 0."""

    def all_reduce_mean_(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite `tensors` with their mean over ranks."""

    def average_gradients(self, parameters: Iterable[torch.Tensor]) -> Gradients:
        """A `Gradients` for `parameters`, which averages what backward passes leave in them."""
        return Gradients(parameters)

    def all_reduce_mean(self, stats: Mapping[str, float]) -> dict[str, float]:
        """The mean over ranks of each of `stats`, a dict of numbers."""
        every = self.all_gather_object(stats)
        return {name: sum(s[name] for s in every) / self.size for name in stats}

    def all_gather_object(self, value: T) -> list[T]:
        """`value` of every rank, as a list, on all ranks."""
        return [value]

    def barrier(self) -> None:
        """Wait until every rank is here."""


Comm = LocalComm  # the type of what functions take: the ranks of MPI have the same methods


class _HorovodEngine:
    def __init__(self, world: _MpiWorld) -> None:
        self.hvd: Any = _horovod()
        if self.hvd is None:
            raise UserError(
                '--run.allreduce horovod: Horovod is not installed; compile it by `sh'
                ' tools/horovod.sh`, or take auto'
            )
        os.environ.setdefault(
            'HOROVOD_FUSION_THRESHOLD', '0'
        )  # tensors come in large buckets already
        if not torch.cuda.is_available():
            # Every millisecond its thread would wait for the others', on a processor that has
            # better things to do.
            os.environ.setdefault('HOROVOD_CYCLE_TIME', '10')
        self.hvd.init()
        self.name = (
            'horovod (NCCL)'
            if torch.cuda.is_available() and self.hvd.nccl_built()
            else 'horovod (MPI)'
        )

    def all_reduce_async_(self, tensor: torch.Tensor) -> Any:
        return self.hvd.allreduce_async_(tensor, op=self.hvd.Sum)

    def synchronize(self, handle: Any) -> None:
        self.hvd.synchronize(handle)


class _TorchEngine:
    def __init__(self, world: _MpiWorld) -> None:
        import torch.distributed

        self.dist = torch.distributed
        backend = 'nccl' if torch.cuda.is_available() else 'gloo'
        self.name = f'torch ({backend})'
        self.dist.init_process_group(
            backend,
            store=self._rendezvous(world),
            rank=world.rank,
            world_size=world.size,
            device_id=(
                torch.device('cuda', torch.cuda.current_device()) if backend == 'nccl' else None
            ),
        )
        atexit.register(self.dist.destroy_process_group)

    def _rendezvous(self, world: _MpiWorld) -> Any:
        """A store on rank 0 that all ranks are connected to; Gloo is told the interface of that
        connection."""
        theirs = ours = '127.0.0.1'
        store = world.rank == 0 and self.dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            theirs, 0, is_master=True, wait_for_workers=False
        )
        port, addresses = world.comm.bcast(store and (store.port, list(network.interfaces())))
        if world.local_size < world.size:
            is_first_host = world.node.bcast(world.rank) == 0
            found = world.comm.allgather(None if is_first_host else network.route(addresses, port))
            theirs, ours = found[world.rank] or (theirs, next(pair[0] for pair in found if pair))
        interface = network.interfaces().get(ours)
        if interface:  # else it goes by the name of the host
            os.environ.setdefault('GLOO_SOCKET_IFNAME', interface)
        return store or self.dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            theirs, port, wait_for_workers=False
        )

    def all_reduce_async_(self, tensor: torch.Tensor) -> Any:
        return self.dist.all_reduce(tensor, async_op=True)

    def synchronize(self, handle: Any) -> None:
        handle.wait()


class _MpiEngine:
    name = 'mpi'

    def __init__(self, world: _MpiWorld) -> None:
        from mpi4py import MPI

        self.comm, self.in_place = world.comm, MPI.IN_PLACE

    def all_reduce_async_(self, tensor: torch.Tensor) -> tuple[Any, torch.Tensor, torch.Tensor]:
        host = tensor.cpu()
        return self.comm.Iallreduce(self.in_place, host.numpy()), host, tensor

    def synchronize(self, handle: tuple[Any, torch.Tensor, torch.Tensor]) -> None:
        request, host, tensor = handle
        request.Wait()
        tensor.copy_(host)  # nothing happens where they are one


class _MpiWorld(LocalComm):
    """Several ranks started by MPI, whose tensors go through the engine called `allreduce`."""

    def __init__(self, allreduce: str) -> None:
        from mpi4py import MPI

        self.comm = MPI.COMM_WORLD
        self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()
        self.barrier()
        _forget_shared_memory()
        if self.size != launched_size():
            raise UserError(
                f'{launched_size()} ranks were started, but each sees a world of {self.size}: they'
                ' were started by the mpiexec of another MPI; put the one of this environment'
                ' first on PATH'
            )
        self.node = self.comm.Split_type(MPI.COMM_TYPE_SHARED)
        self.local_rank, self.local_size = self.node.Get_rank(), self.node.Get_size()
        if any(self.node.allgather(torch.cuda.device_count())):
            torch.cuda.set_device(self._gpu())
        elif 'OMP_NUM_THREADS' not in os.environ:
            torch.set_num_threads(self._threads())
        if allreduce == 'auto':
            hvd = _horovod()
            suits = hvd is not None and (not torch.cuda.is_available() or hvd.nccl_built())
            allreduce = 'horovod' if all(self.comm.allgather(bool(suits))) else 'torch'
        engines = {'horovod': _HorovodEngine, 'torch': _TorchEngine, 'mpi': _MpiEngine}
        self.engine: Engine = engines[allreduce](self)
        if self.rank == 0:
            print(f'{self.size} ranks, averaging by {self.engine.name}')

    def _gpu(self) -> int:
        """Number of the first visible GPU that no rank before this one on this host takes;
        UserError if there is none.

        So local rank r takes visible GPU r, or the one GPU that it alone sees, which is how Slurm
        may deal them out.
        """
        visible = [
            str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())
        ]
        taken = []
        for gpus in self.node.allgather(visible):
            taken.append(next((gpu for gpu in gpus if gpu not in taken), None))
        if None in taken:
            raise UserError(
                f'{self.local_size} ranks on {socket.gethostname()}, which has {len(visible)}'
                f' visible GPU(s): take --mpi {len(visible)}, or make more visible by'
                ' CUDA_VISIBLE_DEVICES'
            )
        return visible.index(taken[self.local_rank])

    def _threads(self) -> int:
        """This rank's share of the processors that it may use, of which MPI may have bound it to
        some."""
        processors = os.sched_getaffinity(0)
        return max(1, torch.get_num_threads() // self.node.allgather(processors).count(processors))

    def broadcast_(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite `tensors` on all ranks with those of rank 0, one after another."""
        for tensor in tensors:  # by MPI, which waits as long as it takes another rank to get here
            host = tensor.detach().cpu().contiguous()
            self.comm.Bcast(host.numpy())
            tensor.detach().copy_(host)

    def all_reduce_mean_(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor, handle in [
            (tensor, self.engine.all_reduce_async_(tensor)) for tensor in tensors
        ]:
            self.engine.synchronize(handle)
            tensor.div_(self.size)

    def average_gradients(self, parameters: Iterable[torch.Tensor]) -> Gradients:
        return OverlappedGradients(parameters, self.size, self.engine)

    def all_gather_object(self, value: T) -> list[T]:
        return self.comm.allgather(value)

    def barrier(self) -> None:
        self.comm.Barrier()


def _forget_shared_memory() -> None:
    """Take away the names of the files through which MPICH's ranks, all of which have them open
    now, share memory.

    So there is nothing that killed ranks could leave behind.
    """
    for path in set(
        re.findall(r'/dev/shm/mpich_\S+$', Path('/proc/self/maps').read_text(), re.MULTILINE)
    ):
        Path(path).unlink(missing_ok=True)


def _horovod() -> ModuleType | None:
    """The module, None where Horovod was not built for this environment."""
    try:
        import horovod.torch

        return horovod.torch
    except ImportError:
        return None


def expected_engine(allreduce: str) -> str:
    """The engine that --run.allreduce `allreduce` comes to on this machine, in words; nothing is
    started."""
    if allreduce != 'auto':
        return allreduce
    return 'horovod' if importlib.util.find_spec('horovod') else 'torch'


@functools.cache
def init_comm(allreduce: str = 'auto') -> Comm:
    """The ranks that this process belongs to: those MPI started, or it alone. UserError where that
    cannot work."""
    return LocalComm() if launched_size() == 1 else _MpiWorld(allreduce)


def abort(status: int) -> None:
    """End all ranks, wherever they are and whatever they wait for; mpiexec returns `status`."""
    from mpi4py import MPI

    MPI.COMM_WORLD.Abort(status)
