"""The three engines that sum tensors over ranks, `--run.allreduce`.

horovod     Horovod over MPI; NCCL for tensors on GPUs where it was built with it
torch       torch.distributed: NCCL on GPUs, Gloo on CPUs; the one engine that needs no MPI
mpi         mpi4py on host memory: slow with GPUs, works wherever MPI does
"""

from __future__ import annotations

import atexit
import datetime
import os
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

import torch

from lm_human_preferences.distributed import env, network
from lm_human_preferences.distributed.lifeline import noticing_lost_ranks
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
    """Horovod; UserError with build instructions if it is not installed.

    seconds: how long a sum may take.
    """

    def __init__(self, seconds: int) -> None:
        self.hvd: Any = _horovod()
        if self.hvd is None:
            raise UserError(
                '--run.allreduce horovod: Horovod is not installed; compile it by `sh'
                ' tools/horovod.sh`, or take auto'
            )
        # Tensors come in large buckets already.
        os.environ.setdefault('HOROVOD_FUSION_THRESHOLD', '0')
        os.environ.setdefault('HOROVOD_STALL_SHUTDOWN_TIME_SECONDS', str(seconds))
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
    """A process group of torch.distributed: NCCL on GPUs, else Gloo."""

    def __init__(self, group: Any) -> None:
        import torch.distributed

        self.dist = torch.distributed
        self.group = group
        self.name = f'torch ({self.dist.get_backend(group)})'

    def all_reduce_async_(self, tensor: torch.Tensor) -> Any:
        with noticing_lost_ranks():
            return self.dist.all_reduce(tensor, group=self.group, async_op=True)

    def synchronize(self, handle: Any) -> None:
        with noticing_lost_ranks():
            handle.wait()


def init_torch(store: Any, rank: int, size: int, **options: Any) -> None:
    """Start torch.distributed on all ranks, whose default group has these `options`."""
    import torch.distributed as dist

    with noticing_lost_ranks():
        dist.init_process_group(store=store, rank=rank, world_size=size, **options)
    atexit.register(dist.destroy_process_group)


def backend_options(seconds: int) -> dict[str, Any]:
    """Of a group that sums gradients; `seconds` is how long a sum may take."""
    options: dict[str, Any] = {'backend': 'gloo', 'timeout': datetime.timedelta(seconds=seconds)}
    if torch.cuda.is_available():
        options['backend'] = 'nccl'
        options['device_id'] = torch.device('cuda', torch.cuda.current_device())
    return options


def torch_over_mpi(comm: MpiComm, seconds: int) -> TorchEngine:
    """The engine for ranks that find each other through MPI."""
    import torch.distributed as dist

    init_torch(_rendezvous(comm), comm.rank, comm.size, **backend_options(seconds))
    return TorchEngine(dist.group.WORLD)


def _rendezvous(comm: MpiComm) -> Any:
    """A store on rank 0 that all ranks are connected to.

    Gloo is told to use the network interface of that connection.
    """
    store_address = own_address = '127.0.0.1'
    store = None
    listening = None
    if comm.rank == 0:
        store = _store(store_address, 0, is_master=True)
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
    network.use_interface(own_address)
    return store or _store(store_address, port)


def _store(address: str, port: int, *, is_master: bool = False) -> Any:
    import torch.distributed

    store_class = torch.distributed.TCPStore  # pyright: ignore[reportPrivateImportUsage]
    return store_class(address, port, is_master=is_master, wait_for_workers=False)


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


def create_engine(allreduce: str, comm: MpiComm, seconds: int) -> Engine:
    """The engine that `--run.allreduce` names; auto: Horovod if it suits all ranks, else torch.

    seconds: how long a sum may take, by Horovod or torch.
    """
    if allreduce == 'auto':
        suits_all = all(comm.all_gather_object(_horovod_suits()))
        allreduce = 'horovod' if suits_all else 'torch'
    if allreduce == 'horovod':
        return HorovodEngine(seconds)
    if allreduce == 'torch':
        return torch_over_mpi(comm, seconds)
    return MpiEngine(comm)


def expected_engine(allreduce: str) -> str:
    """The engine that `--run.allreduce` would be on this machine; nothing is started."""
    if allreduce != 'auto':
        return allreduce
    if env.launcher_kind() in env.WITHOUT_MPI:
        return 'torch'
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
