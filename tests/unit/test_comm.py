"""Communication of ranks: by threads here, and by each engine in commands/test_engines.py."""

import math
import socket
import time
import weakref
from unittest import mock

import numpy as np
import pytest
import torch
from compare import assert_close
from ranks import on_ranks

from lm_human_preferences.distributed import comm as comms
from lm_human_preferences.distributed import torch_comm
from lm_human_preferences.distributed.torch_comm import (
    OverlappedGradients,
    TorchComm,
    decode,
    encode,
)
from lm_human_preferences.errors import UserError
from lm_human_preferences.machine import hardware

SHAPES = ((), (1,), (3, 5), (2, 0), (7,), (257, 3))


def on_two_and_three_ranks(work):
    """Make a test that calls work(comm) on each rank."""

    @pytest.mark.parametrize('size', (2, 3))
    def test(size):
        on_ranks(size, work)

    return test


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(torch_comm, 'BUCKET_BYTES', 100)
    monkeypatch.setattr(comms, 'MEETING_SECONDS', 0.02)


def tensors_of(rank):
    """Return a parameter, tensors of several types, and an integer that float32 cannot hold."""
    generator = torch.Generator().manual_seed(rank)
    tensors = [torch.tensor(2**40 + 1 + rank), torch.nn.Parameter(torch.full((5,), float(rank)))]
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for shape in SHAPES:
            tensors.append((100 * torch.randn(shape, generator=generator)).to(dtype))
    return tensors


@on_two_and_three_ranks
def test_broadcast(comm):
    received = tensors_of(comm.rank)
    comm.broadcast_(received)
    for tensor, source in zip(received, tensors_of(0), strict=True):
        assert tensor.dtype == source.dtype and torch.equal(tensor, source)


@on_two_and_three_ranks
def test_values_of_all_ranks(comm):
    ranks = range(comm.size)
    assert comm.all_gather_object(['of', comm.rank]) == [['of', rank] for rank in ranks]
    assert 0 < comm.local_size <= comm.size
    means = comm.all_reduce_mean({'a': comm.rank, 'b': 1.5})
    assert means == {'a': pytest.approx((comm.size - 1) / 2), 'b': 1.5}
    # Rank 0 alone counts, three times.
    stats = {'a': 4.0} if comm.rank == 0 else {}
    assert comm.all_reduce_mean(stats, 3.0 if comm.rank == 0 else 0.0) == {'a': 4.0}


@on_two_and_three_ranks
def test_ranks_wait_for_the_last_one(comm):
    if comm.rank == comm.size - 1:
        time.sleep(0.1)
    arrived = time.time()
    comm.barrier()
    left = time.time()
    assert left >= max(comm.all_gather_object(arrived))


@on_two_and_three_ranks
def test_work_of_rank_0_alone(comm):
    gather, gathered = comm.all_gather_object, []
    with mock.patch.object(comm, 'all_gather_object', lambda x: gathered.append(x) or gather(x)):
        assert comm.on_rank_0(lambda: time.sleep(0.1) or ['found', comm.rank]) == ['found', 0]
    assert len(gathered) > 2
    assert gather(comm.rank) == list(range(comm.size))  # nothing is left over


def parameters_like(shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def loss_of(parameters, rank, part):
    """Only rank 0's reaches the last parameter but one; no rank's reaches the last."""
    reached = parameters[:-1] if rank == 0 else parameters[:-2]
    return sum(((rank + part + 1) * (p**2).sum() + (p * part).sum()) for p in reached)


@on_two_and_three_ranks
def test_gradients_are_averaged(comm):
    """Like plain averaging, over several updates of 1 and of 3 backward passes; alike on all."""
    for parts in (1, 3):
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
    first = comm.all_gather_object(averages)[0]
    assert all(map(torch.equal, averages, first))  # to the bit


def test_buckets_are_sent_during_the_backward_pass():
    sent_tensors, waited, sent_before = [], [], []

    def begin_sum(tensor):
        sent_tensors.append(tensor.clone())
        return lambda: waited.append(tensor)

    parameters = parameters_like([(30,)] * 3)
    averaged = OverlappedGradients(parameters, 2, begin_sum)
    parameters[0].register_hook(lambda gradient: sent_before.append(len(sent_tensors)))
    for last in (False, True):
        if last:
            averaged.require_sync()
        h = parameters[0].sum()
        for p in parameters[1:]:
            h = (h * p).sum()
        h.backward(retain_graph=True)
    assert sent_before == [0, 2]
    averaged.synchronize()
    assert [id(each) for each in waited] == [id(bucket) for bucket in averaged.buckets]
    plain = torch.autograd.grad(h, parameters)  # of either pass
    for sent, bucket, parameter, gradient in zip(
        sent_tensors, averaged.buckets, reversed(parameters), reversed(plain), strict=True
    ):
        assert sent.abs().sum() > 0
        assert_close(sent, 2 * gradient / 2, rtol=1e-6, atol=1e-5)  # two passes, two ranks
        assert parameter.grad.data_ptr() == bucket.data_ptr()


def test_gradients_are_freed_with_their_parameters():
    """So that the reward model's do not stay while the policy is trained."""
    parameters = parameters_like(SHAPES)
    averaged = OverlappedGradients(parameters, 2, lambda tensor: None)
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
    assert [hardware.choose_gpu(visible, rank) for rank in range(len(visible))] == chosen
    message = r'^3 ranks on \S+, which has 2 visible GPU\(s\): use --mpi 2, .* CUDA_VISIBLE_DEV'
    with pytest.raises(UserError, match=message):
        hardware.choose_gpu([['a', 'b']] * 3, 1)


@pytest.mark.parametrize('value', [None, 2**70, -0.0, math.inf, 'a"é\ud800', {'a': [True, {}]}])
def test_messages(value):
    assert repr(decode(encode(value))) == repr(value)


@pytest.mark.parametrize(
    'value',
    [
        torch.arange(6).reshape(2, 3).t(),
        torch.tensor([math.nan, -0.0]),
        torch.zeros(2, 0),
        torch.tensor(3, dtype=torch.bfloat16),
        torch.nn.Parameter(torch.ones(2)),
    ],
)
def test_messages_of_numbers(value):
    received, one = decode(encode({'a': (value, np.int64(1))}))['a']
    assert received.dtype == value.dtype and received.shape == value.shape and one == 1
    as_bytes = []
    for each in map(torch.as_tensor, (received, value)):
        as_bytes.append(each.detach().contiguous().reshape(-1).view(torch.uint8).tolist())
    assert as_bytes[0] == as_bytes[1]
    received[...] = 0


@pytest.mark.parametrize('value', [{1, 2}, b'', object(), np.arange(2)])
def test_what_ranks_do_not_send(value):
    with pytest.raises(TypeError):
        encode(value)


def test_containers_of_one_host_are_hosts_of_their_own(monkeypatch):
    """They have the same boot id, but quotas of processors and memory of their own."""
    limits, sent = [], []
    monkeypatch.setattr(hardware, 'limit_threads', lambda *limit: limits.append(limit))
    for rank, name in enumerate(['pod-0', 'pod-1']):
        monkeypatch.setattr(socket, 'gethostname', lambda name=name: name)
        comm = TorchComm.__new__(TorchComm)
        comm.rank = rank
        comm.all_gather_object = lambda own: sent.append(own) or [*sent]
        comm._share_host()
        assert comm.local_size == 1
    assert [len(of_ranks) for of_ranks, _ in limits] == [1, 1]
