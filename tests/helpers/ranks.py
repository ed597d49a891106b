"""Ranks as threads of one process, or, under helpers/on_mpi.py, as those of WORLD."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from lm_human_preferences.distributed import comm as comms
from lm_human_preferences.distributed import torch_comm

TIMEOUT_SECONDS = 300  # after which a rank that waits for the others gives up
WORLD = None  # the Comm of this process, where MPI started it as one rank of several


class ThreadComm(comms.Comm):
    """Rank `rank` of the threads that share `slots` and `barrier`."""

    name = 'threads'

    def __init__(self, rank, slots, barrier):
        self.rank = rank
        self.size = self.local_size = len(slots)
        self._slots = slots
        self._barrier = barrier

    def all_gather_object(self, value):
        """As between processes, which send each other only some types."""
        return [torch_comm.decode(message) for message in self._exchanged(torch_comm.encode(value))]

    def _exchanged(self, value):
        self._slots[self.rank] = value
        self._barrier.wait()
        values = list(self._slots)
        self._barrier.wait()
        return values

    def average_gradients(self, parameters):
        return torch_comm.OverlappedGradients(parameters, self.size, self.begin_sum)

    def begin_sum(self, tensor):
        terms = self._exchanged(tensor.clone())
        tensor.copy_(sum(terms))
        return lambda: None  # the sum is there already

    def broadcast_(self, tensors):
        copies = [tensor.detach().clone() for tensor in tensors]
        tensors_of_rank_0 = self._exchanged(copies)[0]
        for tensor, source in zip(tensors, tensors_of_rank_0, strict=True):
            tensor.data.copy_(source)

    def close(self):
        self.barrier()


def on_ranks(size, work):
    """[work(comm) of each of `size` ranks in this process]; the first error in one is raised."""
    if WORLD:
        need(size)
        return [work(WORLD)]
    if size == 1:
        return [work(comms.Comm())]
    slots, barrier = [None] * size, threading.Barrier(size, timeout=TIMEOUT_SECONDS)

    def run(rank):
        try:
            return work(ThreadComm(rank, slots, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        ranks = [pool.submit(run, rank) for rank in range(size)]
    errors = [rank.exception() for rank in ranks if rank.exception()]
    # Ranks that waited for the one that failed have errors, too.
    for error in sorted(errors, key=lambda each: isinstance(each, threading.BrokenBarrierError)):
        raise error
    return [rank.result() for rank in ranks]


def need(size):
    """Skip a test of `size` ranks where MPI started another number."""
    if WORLD and WORLD.size != size:
        pytest.skip(f'for {size} ranks, not {WORLD.size}')


def ranks_here(size):
    return [WORLD.rank] if WORLD else range(size)


def same_for_all(path):
    return Path(WORLD.all_gather_object(str(path))[0]) if WORLD else path


def give_each_thread_its_own_numpy_random(monkeypatch):
    """Ranks are processes with a generator each; threads would share numpy's."""
    if WORLD:
        return
    local = threading.local()

    def generator():
        if not hasattr(local, 'random'):
            local.random = np.random.RandomState(0)
        return local.random

    monkeypatch.setattr(np.random, 'seed', lambda seed=None: generator().seed(seed))
    monkeypatch.setattr(np.random, 'permutation', lambda x: generator().permutation(x))


def rank_prefix(rank, size):
    """Return the prefix of what belongs to one rank in recordings of several."""
    return '' if size == 1 else f'rank{rank}/'
