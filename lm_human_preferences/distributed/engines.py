"""Engines that sum tensors over ranks, `--run.allreduce`.

horovod     Horovod over MPI, the one it was built against; NCCL for tensors on GPUs where it was
            built with it
torch       torch.distributed: NCCL on GPUs, Gloo on CPUs; the one engine that needs no MPI
mpi         mpi4py on host memory: slow with GPUs, works wherever MPI does
gloo        torch.distributed without NCCL, which refuses ranks that share a GPU
"""

import atexit
import datetime
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

import torch

from lm_human_preferences.distributed import launch_methods
from lm_human_preferences.distributed.libraries import horovod_build, mpi_library
from lm_human_preferences.distributed.lifeline import noticing_lost_ranks
from lm_human_preferences.errors import UserError


class Engine(Protocol):
    """Sum of tensors over ranks, which all pass the same tensors in the same order."""

    name: str  # on the console

    def begin_sum(self, tensor: torch.Tensor) -> Callable[[], object]:
        """Begin to overwrite `tensor` with its sum over ranks; return a function that waits."""
        ...


class HorovodEngine:
    """Horovod; UserError with build instructions if it was not built for these ranks."""

    def __init__(self, seconds: int) -> None:
        """seconds: how long a sum may take."""
        horovod_build.require(mpi_library.soname_in_use())
        self.hvd: Any = _load_horovod()
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

    def begin_sum(self, tensor: torch.Tensor) -> Callable[[], object]:
        handle = self.hvd.allreduce_async_(tensor, op=self.hvd.Sum)
        return lambda: self.hvd.synchronize(handle)


class TorchEngine:
    """Process group of torch.distributed: NCCL on GPUs, else Gloo."""

    def __init__(self, group: Any) -> None:
        import torch.distributed

        self.dist = torch.distributed
        self.group = group
        self.name = f'torch ({self.dist.get_backend(group)})'

    def begin_sum(self, tensor: torch.Tensor) -> Callable[[], object]:
        with noticing_lost_ranks():
            work: Any = self.dist.all_reduce(tensor, group=self.group, async_op=True)
        return noticing_lost_ranks()(work.wait)


def init_torch(store: Any, rank: int, size: int, **options: Any) -> None:
    """Start torch.distributed on all ranks, whose default group has these `options`."""
    import torch.distributed as dist

    with noticing_lost_ranks():
        dist.init_process_group(store=store, rank=rank, world_size=size, **options)
    atexit.register(dist.destroy_process_group)


def backend_options(allreduce: str, seconds: int) -> dict[str, Any]:
    """Return the options of a group that sums gradients, each within `seconds`."""
    options: dict[str, Any] = {'backend': 'gloo', 'timeout': datetime.timedelta(seconds=seconds)}
    if torch.cuda.is_available() and allreduce != 'gloo':
        options['backend'] = 'nccl'
        options['device_id'] = torch.device('cuda', torch.cuda.current_device())
    return options


class MpiEngine:
    """MPI's own sum, of a copy in host memory where a tensor is on a GPU."""

    name = 'mpi'

    def __init__(self, world: Any) -> None:
        self.world = world
        self.in_place = mpi_library.load_mpi().IN_PLACE

    def begin_sum(self, tensor: torch.Tensor) -> Callable[[], object]:
        """Begin to sum a copy in host memory; return a function that waits."""
        host = tensor.cpu()
        request = self.world.Iallreduce(self.in_place, host.numpy())

        def wait() -> None:
            request.Wait()
            tensor.copy_(host)  # does nothing where they share their memory

        return wait


def create_engine(allreduce: str, comm: Any, seconds: int) -> Engine:
    """Return the engine of an MpiComm; auto: Horovod if it suits all ranks, else torch."""
    reason = None
    if allreduce == 'auto':
        reasons = comm.all_gather_object(_why_no_horovod_loads())
        reason = next((reason for reason in reasons if reason is not None), None)
        allreduce = 'horovod' if reason is None else 'torch'
    if allreduce == 'horovod':
        return HorovodEngine(seconds)
    if allreduce == 'mpi':
        return MpiEngine(comm.world)
    import torch.distributed as dist

    store, _ = comm.meeting
    init_torch(store, comm.rank, comm.size, **backend_options(allreduce, seconds))
    engine = TorchEngine(dist.group.WORLD)
    engine.name += _because(reason)
    return engine


def expected_engine(allreduce: str) -> str:
    """Return the engine that `--run.allreduce` would give here, and why; UserError if none."""
    if allreduce in ('torch', 'mpi', 'gloo'):
        return allreduce
    if allreduce == 'auto' and not launch_methods.current().has_mpi:
        return 'torch'
    soname = mpi_library.expected_soname()
    if allreduce == 'horovod':
        horovod_build.require(soname)
        return allreduce
    reason = horovod_build.why_not(soname, torch.cuda.is_available())
    return 'horovod' if reason is None else f'torch{_because(reason)}'


def _why_no_horovod_loads() -> str | None:
    """Return the same as `horovod_build.why_not`, but load Horovod to be sure."""
    reason = horovod_build.why_not(mpi_library.soname_in_use(), torch.cuda.is_available())
    if reason is None:
        try:
            _load_horovod()
        except UserError:
            reason = 'Horovod does not load: compile it anew'
    return reason


def _because(reason: str | None) -> str:
    return f', as {reason}' if reason else ''


def _load_horovod() -> ModuleType:
    try:
        import horovod.torch
    except ImportError as e:
        reason = ' '.join(str(e).split())
        raise UserError(
            f'Horovod does not load ({reason}): compile it anew by `sh tools/horovod.sh`, or use'
            ' --run.allreduce torch'
        ) from e
    return horovod.torch
