"""Communication of ranks: on threads here, and on each engine in commands/test_engines.py."""

import socket
import time
import weakref
from unittest import mock

import pytest
import torch
from compare import assert_close
from experiments import resolved
from ranks import on_ranks

from lm_human_preferences.distributed import gradients, rendezvous, several_ranks
from lm_human_preferences.distributed.waiting import Timeouts
from lm_human_preferences.errors import UserError
from lm_human_preferences.machine import processors, threads

SIZES = (2, 3, 4)
SHAPES = ((), (1,), (3, 5), (2, 0), (7,), (257, 3))
on_all_sizes = pytest.mark.parametrize('size', SIZES)


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    monkeypatch.setattr(gradients, 'BUCKET_BYTES', 100)


def tensors_of(rank, *dtypes):
    generator = torch.Generator().manual_seed(rank)
    return [
        (100 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)
        for dtype in dtypes
        for shape in SHAPES
    ]


def assert_same_on_all_ranks(tensors, comm):
    content = b''.join(tensor.numpy().tobytes() for tensor in tensors)
    assert len(set(comm.all_gather_object(content))) == 1


@on_all_sizes
def test_broadcast(size):
    """Of parameters, too, and of integers that float32 cannot hold."""

    def work(comm):
        def tensors(rank):
            return [
                *tensors_of(rank, torch.float32, torch.float64, torch.int64),
                torch.tensor(2**40 + 1 + rank),
                torch.nn.Parameter(torch.full((5,), float(rank))),
            ]

        received = tensors(comm.rank)
        comm.broadcast_(received)
        for tensor, source in zip(received, tensors(0), strict=True):
            assert tensor.dtype == source.dtype and torch.equal(tensor, source)

    on_ranks(size, work)


@on_all_sizes
def test_mean_of_statistics(size):
    def work(comm):
        means = comm.all_reduce_mean({'a': comm.rank, 'b': 1.5})
        assert means == {'a': pytest.approx((size - 1) / 2), 'b': 1.5}
        # Rank 0 alone counts, three times.
        stats = {'a': 4.0} if comm.rank == 0 else {}
        assert comm.all_reduce_mean(stats, 3.0 if comm.rank == 0 else 0.0) == {'a': 4.0}

    on_ranks(size, work)


@on_all_sizes
def test_gather_is_in_the_order_of_ranks(size):
    def work(comm):
        assert comm.all_gather_object(('of', comm.rank)) == [('of', rank) for rank in range(size)]
        assert 0 <= comm.local_rank < comm.local_size <= comm.size == size

    on_ranks(size, work)


@on_all_sizes
def test_barrier(size):
    """No rank leaves before the last one has arrived."""

    def work(comm):
        if comm.rank == size - 1:
            time.sleep(0.3)
        arrived = time.time()
        comm.barrier()
        left = time.time()
        assert left >= max(comm.all_gather_object(arrived))

    on_ranks(size, work)


def parameters_like(shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def loss_of(parameters, rank, part):
    """Only rank 0's reaches the last parameter but one; no rank's reaches the last."""
    reached = parameters[:-1] if rank == 0 else parameters[:-2]
    return sum(((rank + part + 1) * (p**2).sum() + (p * part).sum()) for p in reached)


@pytest.mark.parametrize('parts', (1, 3))
@on_all_sizes
def test_gradients_are_averaged(size, parts):
    """Like plain averaging, over several updates of several backward passes; alike on all ranks."""

    def work(comm):
        parameters = parameters_like(SHAPES)
        averaged = comm.average_gradients(parameters)
        for update in range(3):
            averaged.zero_grad()
            for part in range(parts):
                if part == parts - 1:
                    averaged.require_sync()
                loss_of(parameters, comm.rank, update + part).backward()
            averaged.synchronize()
            check_average(parameters, comm, range(update, update + parts))

    on_ranks(size, work)


def check_average(parameters, comm, parts):
    averages = [p.grad.clone() for p in parameters]
    plain = parameters_like(SHAPES)
    for part in parts:
        loss_of(plain, comm.rank, part).backward()
    own = [torch.zeros_like(p) if p.grad is None else p.grad for p in plain]
    for gradient, *terms in zip(averages, *comm.all_gather_object(own), strict=True):
        assert_close(gradient, sum(terms) / comm.size, rtol=1e-6, atol=1e-6)
    assert averages[-2].abs().sum() > 0
    assert averages[-1].abs().sum() == 0
    assert_same_on_all_ranks(averages, comm)


class RecordingEngine:
    name = 'recording'

    def __init__(self):
        self.sent, self.waited = [], []

    def begin_sum(self, tensor):
        number = len(self.sent)
        self.sent.append(tensor.clone())
        return lambda: self.waited.append(number)


def test_buckets_are_sent_during_the_backward_pass():
    """In the last pass, those of the last parameters before the first ones have gradients."""
    engine = RecordingEngine()
    parameters = parameters_like([(30,)] * 3)
    averaged = gradients.OverlappedGradients(parameters, 2, engine)
    sent_before = []
    parameters[0].register_hook(lambda gradient: sent_before.append(len(engine.sent)))
    for last in (False, True):
        if last:
            averaged.require_sync()
        h = parameters[0].sum()
        for p in parameters[1:]:
            h = (h * p).sum()
        h.backward(retain_graph=True)
    assert sent_before == [0, 2]
    averaged.synchronize()
    assert engine.waited == [0, 1, 2]
    plain = torch.autograd.grad(h, parameters)  # of either pass
    for sent, parameter, gradient in zip(
        engine.sent, reversed(parameters), reversed(plain), strict=True
    ):
        assert sent.abs().sum() > 0
        assert_close(sent, 2 * gradient / 2, rtol=1e-6, atol=1e-5)  # two passes, two ranks
        assert parameter.grad.data_ptr() == averaged.bucket_views[parameter][1].data_ptr()


def test_gradients_are_freed_with_their_parameters():
    """So that the reward model's do not stay while the policy is trained."""
    parameters = parameters_like(SHAPES)
    averaged = gradients.OverlappedGradients(parameters, 2, RecordingEngine())
    freed = [weakref.ref(x) for x in (averaged, averaged.buckets[0], parameters[0])]
    loss_of(parameters, 0, 1).backward()
    del averaged, parameters
    assert [ref() for ref in freed] == [None] * 3


@pytest.mark.parametrize(
    'visible, chosen',
    [
        ([['a', 'b', 'c', 'd']] * 3, [0, 1, 2]),
        ([['a'], ['b'], ['c']], [0, 0, 0]),  # as Slurm deals them out with --gpus-per-task
        ([['a', 'b'], ['b', 'c']], [0, 0]),
    ],
)
def test_each_rank_takes_a_gpu_of_its_own(visible, chosen):
    assert [several_ranks.choose_gpu(visible, rank) for rank in range(len(visible))] == chosen


@pytest.mark.parametrize('visible', [[['a', 'b']] * 3, [['a', 'b'], ['b', 'a'], []]])
def test_more_ranks_than_gpus_are_refused(visible):
    message = r'^3 ranks on \S+, which has 2 visible GPU\(s\): use --mpi 2, .* CUDA_VISIBLE_DEV'
    for rank in range(2):
        with pytest.raises(UserError, match=message):
            several_ranks.choose_gpu(visible, rank)
        assert several_ranks.choose_gpu(visible, rank, shares=True) == rank


V1 = 'cpu/cpu.cfs_'  # as the files of version 1 of cgroups begin
HYPERTHREADS = {processor: f'{processor % 4},{processor % 4 + 4}' for processor in range(8)}


@pytest.mark.parametrize(
    'affinities, core_of, quota, threads',
    [
        pytest.param([range(8)], {}, None, 8, id='alone'),
        pytest.param([range(8)], HYPERTHREADS, None, 4, id='hyperthreads'),
        pytest.param([{0, 4}], HYPERTHREADS, None, 1, id='bound to a core'),
        pytest.param([{0}, {4}], HYPERTHREADS, None, 1, id='bound to hyperthreads'),
        pytest.param([{0, 1}, {2, 3}], {}, None, 2, id='two ranks, bound'),
        pytest.param([{0}] * 9, {}, None, 1, id='more ranks than processors'),
        pytest.param([range(64)], {}, 4, 4, id='container'),
        pytest.param([range(64)], {}, 0.2, 1, id='container with little'),
        pytest.param([range(2)], {}, 4, 2, id='container with more than there is'),
        pytest.param([range(64)] * 2, {}, 4, 2, id='ranks share their container'),
    ],
)
def test_threads_are_the_cores_of_a_share(affinities, core_of, quota, threads):
    assert processors.thread_count(affinities, 0, core_of, quota) == threads


@pytest.mark.parametrize(
    'memberships, files, quota',
    [
        ('0::/', {'cpu.max': 'max 100000'}, None),
        ('0::/a/b', {'a/b/cpu.max': 'max 100000', 'a/cpu.max': '400000 100000'}, 4),
        ('0::/a', {'a/cpu.max': '400000 100000', 'cpu.max': '200000 100000'}, 2),
        ('0::/docker/1f', {'cpu.max': '300000 100000'}, 3),  # its name is the host's
        ('5:cpu,cpuacct:/d\n0::/', {f'{V1}quota_us': '50000', f'{V1}period_us': '100000'}, 0.5),
        ('1:cpu:/', {f'{V1}quota_us': '-1', f'{V1}period_us': '100000'}, None),
        ('1:cpuset:/', {f'{V1}quota_us': '7', f'{V1}period_us': '1'}, None),
        ('0::/', {}, None),
    ],
)
def test_quota_of_a_container(tmp_path, memberships, files, quota):
    for name, text in files.items():
        path = tmp_path / 'cgroup' / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + '\n')
    listed = tmp_path / 'memberships'
    listed.write_text(memberships + '\n')
    assert processors.cpu_quota(tmp_path / 'cgroup', listed) == quota


def test_hyperthreads_are_of_one_core(monkeypatch, tmp_path):
    monkeypatch.setattr(processors, 'SIBLINGS', f'{tmp_path}/{{}}')
    for processor, siblings in {0: '0,4', 4: '0,4', 1: '1,5', 5: '1,5'}.items():
        (tmp_path / str(processor)).write_text(f'{siblings}\n')
    cores = processors.core_of_each([0, 1, 4, 7])
    assert cores == {0: '0,4', 1: '1,5', 4: '0,4'}
    assert processors.thread_count([{0, 1, 4, 7}], 0, cores, None) == 3
    counts = []
    monkeypatch.delenv('OMP_NUM_THREADS')
    monkeypatch.setattr(torch, 'get_num_threads', lambda: 2)
    monkeypatch.setattr(torch, 'set_num_threads', counts.append)
    monkeypatch.setattr(processors, 'cpu_quota', lambda: None)
    threads.limit_threads([[0, 1], [4, 5]], 0)
    assert counts == [1]  # two ranks share both cores


class OnTwoHosts(several_ranks.EngineComm):
    """The first of four ranks, which is alone on its host."""

    rank = local_rank = 0
    size = 4
    all_gather_object = all_gather_on_host = None
    _broadcast = barrier = None


def test_processors_are_shared_with_the_ranks_of_this_host_alone(monkeypatch):
    monkeypatch.delenv('OMP_NUM_THREADS')
    asked = []
    monkeypatch.setattr(threads, 'limit_threads', lambda affinities, rank: asked.append(affinities))
    comm = OnTwoHosts()
    comm.all_gather_on_host = lambda value: [value]
    comm.all_gather_object = lambda value: [value] * 4
    comm._share_host()
    (affinities,) = asked
    assert len(affinities) == 1
    monkeypatch.setenv('OMP_NUM_THREADS', '4')
    comm._share_host()
    assert asked == [affinities, affinities]  # which leaves the threads as they are
    without_mpi = several_ranks.TorchComm.__new__(several_ranks.TorchComm)
    without_mpi.ranks_here = [1, 3]
    without_mpi.all_gather_object = lambda value: ['a', 'b', 'c', 'd']
    assert without_mpi.all_gather_on_host('b') == ['b', 'd']


def test_ranks_without_mpi_wait_for_each_other_as_long_as_it_takes(monkeypatch):
    """The group of objects and broadcasts has no timeout: a reward model is trained meanwhile."""

    class Started(Exception):
        pass

    def init_torch(store, rank, size, *, backend, timeout):
        assert backend == 'gloo'
        raise Started(timeout.days)

    for name in ('launch_methods', 'rendezvous', 'Lifeline'):
        monkeypatch.setattr(several_ranks, name, mock.Mock())
    monkeypatch.setattr(several_ranks, 'init_torch', init_torch)
    with pytest.raises(Started) as e:
        several_ranks.TorchComm('torch', Timeouts(rank=60, allreduce=60))
    assert e.value.args[0] >= 100


def test_an_engine_that_needs_mpi_is_refused_without_it(monkeypatch):
    for name in ('launch_methods', 'rendezvous', 'Lifeline'):
        monkeypatch.setattr(several_ranks, name, mock.Mock())
    message = '^--run.allreduce horovod needs MPI, which these ranks were started without: use au'
    with pytest.raises(UserError, match=message):
        several_ranks.TorchComm('horovod', Timeouts(rank=60, allreduce=60))


def test_addresses_of_the_first_host(monkeypatch):
    """The first that answers; those that this host has itself are not another's."""
    monkeypatch.setattr(rendezvous, 'interfaces', lambda: {'127.0.0.2': 'bridge'})
    with socket.create_server(('127.0.0.1', 0)) as server:
        port = server.getsockname()[1]
        addresses = ['127.0.0.2', '127.0.0.3', '127.0.0.1']
        assert rendezvous.reachable(addresses, port) == '127.0.0.1'
        message = f'does not reach the first host of this run, TCP port {port} of 127.0.0.2: open'
        with pytest.raises(UserError, match=message):
            rendezvous.reachable(['127.0.0.2'], port)


def test_how_long_ranks_wait_are_options():
    timeouts = {'run.rank_timeout': 11, 'run.allreduce_timeout': 12, 'run.stop_timeout': 13}
    hparams = resolved('train_reward', 'test', timeouts)
    assert hparams.run.timeouts == Timeouts(rank=11, allreduce=12, stop=13)
