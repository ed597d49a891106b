"""What the ranks of a run say to each other: the only module that knows MPI, Horovod and torch.distributed.

MPI starts the ranks and carries small objects. Tensors go through one of three engines, `--run.allreduce`:

    horovod     Horovod over MPI; NCCL for tensors on GPUs where it was built with it
    torch       torch.distributed: NCCL on GPUs, Gloo on CPUs; the ranks find each other through MPI
    mpi         mpi4py on host memory: slow with GPUs, works wherever MPI does
"""
import functools
import importlib.util
import os
import socket

import torch

from lm_human_preferences.utils.errors import UserError

BUCKET_BYTES = 64 << 20  # gradients are averaged in buckets of about this size
# How the launchers of MPICH, Open MPI and Slurm, and ours, say how many ranks they started.
SIZE_VARIABLES = ('LMHP_RANKS', 'PMI_SIZE', 'OMPI_COMM_WORLD_SIZE', 'SLURM_STEP_NUM_TASKS')


class SingleProcess:
    """A world of one rank: everything it would say to others is already known."""
    rank = local_rank = 0
    size = local_size = 1

    def broadcast_(self, tensors):
        """Overwrite `tensors` on all ranks with those of rank 0."""

    def mean_(self, tensors):
        """Overwrite `tensors` with their mean over ranks."""

    def average_gradients(self, parameters):
        """A `Gradients` for `parameters`, which averages what backward passes leave in them."""
        return Gradients(parameters, self)

    def mean(self, stats):
        """The mean over ranks of each of `stats`, a dict of numbers."""
        return stats

    def gather(self, value):
        """`value` of every rank, as a list, on all ranks."""
        return [value]

    def barrier(self):
        """Wait until every rank is here."""


class Gradients:
    """Averages gradients over the ranks of `comm` once they are all there."""

    def __init__(self, parameters, comm):
        self.parameters, self.comm = list(parameters), comm

    def clear(self):
        """Forget the gradients, before the first backward pass of an update."""
        for parameter in self.parameters:
            parameter.grad = None

    def expect_last(self):
        """Say that nothing is added after the next backward pass: averaging may overlap with it."""

    def wait(self):
        """Return when every gradient is the mean over ranks."""
        self.comm.mean_([parameter.grad for parameter in self.parameters])


class OverlappedGradients(Gradients):
    """Averages gradients in a few large buckets, each sent as soon as the last backward pass has filled it.

    A parameter's `grad` is a view into its bucket, so nothing is copied. Buckets are filled, and sent on every rank,
    in the order in which a backward pass reaches the parameters: the last ones first.
    """

    def __init__(self, parameters, comm, engine):
        super().__init__(parameters, comm)
        self.engine = engine
        self.flats, self.bucket_of, self.handles = [], {}, []
        self.sending, self.missing = False, []
        for members in _buckets(self.parameters[::-1]):
            flat = torch.zeros(sum(p.numel() for p in members), dtype=members[0].dtype, device=members[0].device)
            for parameter, view in zip(members, flat.split([p.numel() for p in members])):
                parameter.grad = view.view(parameter.shape)
                self.bucket_of[parameter] = len(self.flats)
                parameter.register_post_accumulate_grad_hook(self._arrived)
            self.flats.append(flat)

    def clear(self):
        for flat in self.flats:
            flat.zero_()

    def expect_last(self):
        self.sending, self.handles = True, []
        self.missing = [0] * len(self.flats)
        for bucket in self.bucket_of.values():
            self.missing[bucket] += 1

    def _arrived(self, parameter):
        if self.sending:
            self.missing[self.bucket_of[parameter]] -= 1
            self._send_filled()

    def _send_filled(self):
        while len(self.handles) < len(self.flats) and self.missing[len(self.handles)] == 0:
            self.handles.append(self.engine.start_sum_(self.flats[len(self.handles)]))

    def wait(self):
        self.missing = [0] * len(self.flats)  # a parameter that the loss did not reach has gradient zero
        self._send_filled()
        self.sending = False
        for handle, flat in zip(self.handles, self.flats):
            self.engine.wait(handle)
            flat.div_(self.comm.size)


class _HorovodEngine:
    name = 'horovod'

    def __init__(self, mpi_comm):
        import horovod.torch
        self.hvd = horovod.torch
        self.hvd.init(mpi_comm)
        self.started = 0

    def start_sum_(self, tensor):
        self.started += 1  # ranks recognise each other's tensors by name
        return self.hvd.allreduce_async_(tensor, op=self.hvd.Sum, name=f'sum.{self.started}')

    def wait(self, handle):
        self.hvd.synchronize(handle)

    def broadcast_(self, tensor):
        self.hvd.broadcast_(tensor, root_rank=0)


class _TorchEngine:
    name = 'torch'

    def __init__(self, mpi_comm):
        import torch.distributed
        self.dist = torch.distributed
        with socket.socket() as free:
            free.bind(('', 0))
            address = mpi_comm.bcast((socket.gethostname(), free.getsockname()[1]))
        self.dist.init_process_group(
            'nccl' if torch.cuda.is_available() else 'gloo', init_method='tcp://{}:{}'.format(*address),
            rank=mpi_comm.rank, world_size=mpi_comm.size)

    def start_sum_(self, tensor):
        return self.dist.all_reduce(tensor, async_op=True)

    def wait(self, handle):
        handle.wait()

    def broadcast_(self, tensor):
        self.dist.broadcast(tensor, src=0)


class _MpiEngine:
    name = 'mpi'

    def __init__(self, mpi_comm):
        from mpi4py import MPI
        self.comm, self.in_place = mpi_comm, MPI.IN_PLACE

    def start_sum_(self, tensor):
        host = tensor.cpu()
        return self.comm.Iallreduce(self.in_place, host.numpy()), host, tensor

    def wait(self, handle):
        request, host, tensor = handle
        request.Wait()
        if host is not tensor:
            tensor.copy_(host)

    def broadcast_(self, tensor):
        host = tensor.cpu()
        self.comm.Bcast(host.numpy())
        tensor.copy_(host)


class _MpiWorld(SingleProcess):
    """Several ranks started by MPI, whose tensors go through the engine called `allreduce`."""

    def __init__(self, allreduce):
        from mpi4py import MPI
        self.comm = MPI.COMM_WORLD
        self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()
        if self.size != launched_size():
            raise UserError(f'{launched_size()} ranks were started, but each sees a world of {self.size}: they were '
                            'started by the mpiexec of another MPI; put the one of this environment first on PATH')
        node = self.comm.Split_type(MPI.COMM_TYPE_SHARED)
        self.local_rank, self.local_size = node.Get_rank(), node.Get_size()
        self._take_device()
        name = resolve(allreduce)
        self.engine = {'horovod': _HorovodEngine, 'torch': _TorchEngine, 'mpi': _MpiEngine}[name](self.comm)
        if self.rank == 0:
            print(f'{self.size} ranks, tensors averaged by {name}')

    def _take_device(self):
        """Local rank r computes on visible GPU r, or on its share of the host's processors."""
        gpus = torch.cuda.device_count()
        if not gpus:
            if 'OMP_NUM_THREADS' not in os.environ:
                torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // self.local_size))
        elif gpus < self.local_size:
            raise UserError(f'{self.local_size} ranks on {socket.gethostname()}, which has {gpus} visible GPUs: '
                            f'take --mpi {gpus} per host, or make more visible in CUDA_VISIBLE_DEVICES')
        else:
            torch.cuda.set_device(self.local_rank)

    def broadcast_(self, tensors):
        for tensor in tensors:
            self.engine.broadcast_(tensor.data)

    def mean_(self, tensors):
        for bucket in _buckets(tensors):
            flat = torch.cat([t.data.flatten() for t in bucket])
            self.engine.wait(self.engine.start_sum_(flat))
            for tensor, mean in zip(bucket, flat.div_(self.size).split([t.numel() for t in bucket])):
                tensor.data.copy_(mean.view(tensor.shape))

    def average_gradients(self, parameters):
        return OverlappedGradients(parameters, self, self.engine)

    def mean(self, stats):
        every = self.comm.allgather(stats)
        return {name: sum(s[name] for s in every) / self.size for name in stats}

    def gather(self, value):
        return self.comm.allgather(value)

    def barrier(self):
        self.comm.Barrier()


def _buckets(tensors):
    """Split a list of tensors into runs of about BUCKET_BYTES and of one type."""
    buckets, room = [], 0
    for tensor in tensors:
        if room <= 0 or buckets[-1][0].dtype != tensor.dtype:
            buckets.append([])
            room = BUCKET_BYTES
        buckets[-1].append(tensor)
        room -= tensor.numel() * tensor.element_size()
    return buckets


def launched_size():
    """How many ranks the launcher of this process says it started; 1 outside of MPI."""
    return next((int(os.environ[name]) for name in SIZE_VARIABLES if os.environ.get(name, '').isdecimal()), 1)


def resolve(allreduce):
    """The engine meant by `--run.allreduce`: `auto` is Horovod where it is installed, else torch.distributed."""
    if allreduce == 'auto':
        return 'horovod' if importlib.util.find_spec('horovod') else 'torch'
    if allreduce == 'horovod' and not importlib.util.find_spec('horovod'):
        raise UserError('--run.allreduce horovod: Horovod is not installed; compile it with `pipenv run horovod`, '
                        'or take auto')
    return allreduce


@functools.cache
def world(allreduce='auto'):
    """The ranks that this process belongs to: those MPI started, or it alone."""
    return SingleProcess() if launched_size() == 1 else _MpiWorld(allreduce)
