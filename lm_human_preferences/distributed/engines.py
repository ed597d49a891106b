"""The three engines that sum tensors over ranks, `--run.allreduce`.

horovod     Horovod over MPI; NCCL for tensors on GPUs where it was built with it
torch       torch.distributed: NCCL on GPUs, Gloo on CPUs; the ranks find each other through MPI
mpi         mpi4py on host memory: slow with GPUs, works wherever MPI does
"""

from __future__ import annotations

import atexit
import os
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

import torch

from lm_human_preferences.distributed import env, network
from lm_human_preferences.errors import UserError

if TYPE_CHECKING:
    from lm_human_preferences.distributed.comm import MpiComm


class Engine(Protocol):
    """Sums tensors over ranks. All ranks have to pass the same tensors in the same order."""

    name: str  # what the console calls it

    def all_reduce_async_(self, tensor: torch.Tensor) -> Any:
        """Begin to overwrite `tensor` with its sum over ranks; a handle for `synchronize`."""

    def synchronize(self, handle: Any) -> None:
        """Return when the sum that `handle` stands for is there."""


class HorovodEngine:
    """Horovod; UserError with build instructions if it is not installed."""

    def __init__(self) -> None:
        self.hvd: Any = _horovod()
        if self.hvd is None:
            raise UserError(
                '--run.allreduce horovod: Horovod is not installed; compile it by `sh'
                ' tools/horovod.sh`, or take auto'
            )
        # Tensors come in large buckets already.
        os.environ.setdefault('HOROVOD_FUSION_THRESHOLD', '0')
        has_gpu = torch.cuda.is_available()
        if not has_gpu:
            # In milliseconds. Horovod's thread wakes up every millisecond by default, on a
            # processor that has better things to do.
            os.environ.setdefault('HOROVOD_CYCLE_TIME', '10')
        self.hvd.init()
        backend = 'NCCL' if has_gpu and self.hvd.nccl_built() else 'MPI'
        self.name = f'horovod ({backend})'

    def all_reduce_async_(self, tensor: torch.Tensor) -> Any:
        return self.hvd.allreduce_async_(tensor, op=self.hvd.Sum)

    def synchronize(self, handle: Any) -> None:
        self.hvd.synchronize(handle)


class TorchEngine:
    """A process group of torch.distributed, whose ranks find each other through MPI."""

    def __init__(self, comm: MpiComm) -> None:
        import torch.distributed

        self.dist = torch.distributed
        backend = 'gloo'
        device = None
        if torch.cuda.is_available():
            backend = 'nccl'
            device = torch.device('cuda', torch.cuda.current_device())
        self.name = f'torch ({backend})'
        self.dist.init_process_group(
            backend,
            store=self._rendezvous(comm),
            rank=comm.rank,
            world_size=comm.size,
            device_id=device,
        )
        atexit.register(self.dist.destroy_process_group)

    def _rendezvous(self, comm: MpiComm) -> Any:
        """A store on rank 0 that all ranks are connected to.

        Gloo is told to use the network interface of that connection.
        """
        store_address = own_address = '127.0.0.1'
        store = None
        listening = None
        if comm.rank == 0:
            store = self._store(store_address, 0, is_master=True)
            listening = store.port, list(network.interfaces())
        port, addresses = comm.world.bcast(listening)
        if comm.local_size < comm.size:
            is_first_host = comm.node.bcast(comm.rank) == 0
            route = None if is_first_host else network.route(addresses, port)
            routes = comm.world.allgather(route)
            if route is None:
                # Rank 0's host: other hosts reach it at the address that the first of them found.
                own_address = next(each[0] for each in routes if each is not None)
            else:
                store_address, own_address = route
        interface = network.interfaces().get(own_address)
        if interface:  # else Gloo resolves the name of the host
            os.environ.setdefault('GLOO_SOCKET_IFNAME', interface)
        if store is None:
            store = self._store(store_address, port)
        return store

    def _store(self, address: str, port: int, *, is_master: bool = False) -> Any:
        store_class = self.dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]
        return store_class(address, port, is_master=is_master, wait_for_workers=False)

    def all_reduce_async_(self, tensor: torch.Tensor) -> Any:
        return self.dist.all_reduce(tensor, async_op=True)

    def synchronize(self, handle: Any) -> None:
        handle.wait()


class MpiEngine:
    """MPI's own sum, of a copy in host memory where a tensor is on a GPU."""

    name = 'mpi'

    def __init__(self, comm: MpiComm) -> None:
        from mpi4py import MPI

        self.world = comm.world
        self.in_place = MPI.IN_PLACE

    def all_reduce_async_(self, tensor: torch.Tensor) -> tuple[Any, torch.Tensor, torch.Tensor]:
        host = tensor.cpu()
        request = self.world.Iallreduce(self.in_place, host.numpy())
        return request, host, tensor

    def synchronize(self, handle: tuple[Any, torch.Tensor, torch.Tensor]) -> None:
        request, host, tensor = handle
        request.Wait()
        tensor.copy_(host)  # does nothing where they share their memory


def create_engine(allreduce: str, comm: MpiComm) -> Engine:
    """The engine that `--run.allreduce` names; auto: Horovod if it suits all ranks, else torch."""
    if allreduce == 'auto':
        suits_all = all(comm.all_gather_object(_horovod_suits()))
        allreduce = 'horovod' if suits_all else 'torch'
    if allreduce == 'horovod':
        return HorovodEngine()
    if allreduce == 'torch':
        return TorchEngine(comm)
    return MpiEngine(comm)


def expected_engine(allreduce: str) -> str:
    """The engine that `--run.allreduce` would be on this machine; nothing is started."""
    if allreduce != 'auto':
        return allreduce
    return 'horovod' if env.has_horovod() else 'torch'


def _horovod_suits() -> bool:
    """Whether Horovod can be loaded and, where this rank has a GPU, was built with NCCL."""
    hvd: Any = _horovod()
    if hvd is None:
        return False
    return not torch.cuda.is_available() or bool(hvd.nccl_built())


def _horovod() -> ModuleType | None:
    """The module, None where Horovod was not built for this environment."""
    try:
        import horovod.torch

        return horovod.torch
    except ImportError:
        return None
