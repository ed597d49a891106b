"""Several ranks as threads of one process: what each rank computes, without the machinery that
starts ranks.

Under `mpiexec`, tests/helpers/on_mpi.py sets WORLD, and the same tests run on the ranks of MPI.
"""

import threading

import numpy as np
import pytest

from lm_human_preferences.distributed import comm as comms
from lm_human_preferences.distributed.gradients import OverlappedGradients

PATIENCE = 300  # seconds until a rank that waits for the others gives up
WORLD = None


class ThreadComm(comms.Comm):
    """The interface of utils.comm for rank `rank` of the threads that share `slots` and
    `barrier_`."""

    def __init__(self, rank, slots, barrier_):
        self.rank = self.local_rank = rank
        self.size = self.local_size = len(slots)
        self._slots, self._barrier = slots, barrier_

    def all_gather_object(self, value):
        self._slots[self.rank] = value
        self._barrier.wait()
        values = list(self._slots)
        self._barrier.wait()
        return values

    def all_reduce_mean_(self, tensors):
        everyone = self.all_gather_object([tensor.clone() for tensor in tensors])
        for tensor, *others in zip(tensors, *everyone, strict=True):
            tensor.copy_(sum(others) / self.size)

    def average_gradients(self, parameters):
        return OverlappedGradients(parameters, self.size, self)

    def all_reduce_async_(self, tensor):
        everyone = self.all_gather_object(tensor.clone())
        tensor.copy_(sum(everyone))

    def synchronize(self, handle):
        """The sum is there already."""

    def broadcast_(self, tensors):
        for tensor, first in zip(
            tensors, self.all_gather_object([t.detach().clone() for t in tensors])[0], strict=True
        ):
            tensor.data.copy_(first)

    def barrier(self):
        self.all_gather_object(None)


def on_ranks(size, work):
    """[work(comm) of every rank that is in this process]; the first error of any of them is raised
    here."""
    if WORLD:
        need(size)
        return [work(WORLD)]
    if size == 1:
        return [work(comms.LocalComm())]
    slots, barrier = [None] * size, threading.Barrier(size, timeout=PATIENCE)
    results, errors = [None] * size, []

    def run(rank):
        try:
            results[rank] = work(ThreadComm(rank, slots, barrier))
        except Exception as e:
            errors.append(e)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next(
            (e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0]
        )
    return results


def need(size):
    """Skip a test of `size` ranks where there are others."""
    if WORLD and WORLD.size != size:
        pytest.skip(f'is about {size} ranks, not {WORLD.size}')


def ranks_here(size):
    """Which of `size` ranks are in this process."""
    return [WORLD.rank] if WORLD else range(size)


def same_for_all(value):
    """`value` of rank 0."""
    return WORLD.all_gather_object(value)[0] if WORLD else value


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
    """How recordings of several ranks name what belongs to one."""
    return '' if size == 1 else f'rank{rank}/'
