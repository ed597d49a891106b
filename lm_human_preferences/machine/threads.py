"""Threads of the CPU: how many a process takes, and how they wait for each other."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from lm_human_preferences.machine import processors

# By which a user decides how OpenMP's threads wait.
WAITING_VARIABLES = ('OMP_WAIT_POLICY', 'GOMP_SPINCOUNT')
WATCH_SECONDS = 0.5
# Share of its time that a process waits for a processor.
CROWDED, FREE = 0.1, 0.03


def limit_alone() -> None:
    """Limit torch's threads to this process's processors, unless OMP_NUM_THREADS is set."""
    limit_threads([os.sched_getaffinity(0)], local_rank=0)


def limit_threads(affinities: Sequence[Collection[int]], local_rank: int) -> None:
    """Limit torch's threads to this rank's share, unless OMP_NUM_THREADS is set."""
    if not is_set_by_user():
        cores = processors.core_of_each(set().union(*affinities))
        share = processors.thread_count(affinities, local_rank, cores, processors.cpu_quota())
        torch.set_num_threads(min(share, torch.get_num_threads()))
    if torch.get_num_threads() > 1 and not any(map(os.environ.get, WAITING_VARIABLES)):
        spin_less_where_crowded()


def is_set_by_user() -> bool:
    return 'OMP_NUM_THREADS' in os.environ


@functools.cache
def spin_less_where_crowded() -> None:
    """Let OpenMP spin less while the main thread waits for CPUs (benchmarks/README.md)."""
    try:
        openmp = ctypes.CDLL('libgomp.so.1')  # torch has loaded it
        seconds_waited()
    except OSError:  # another OpenMP, or another system
        return
    threading.Thread(target=_watch, args=(openmp,), daemon=True).start()


def _watch(openmp: ctypes.CDLL) -> None:
    spare = SpareTeam(openmp)
    waited, checked = seconds_waited(), time.monotonic()
    while True:
        time.sleep(WATCH_SECONDS)
        waited_before, checked_before = waited, checked
        waited, checked = seconds_waited(), time.monotonic()
        _adjust(spare, (waited - waited_before) / (checked - checked_before))


def _adjust(spare: SpareTeam, share: float) -> None:
    """Spin less where the main thread has waited for this share of its time, else as before."""
    if share > CROWDED:
        spare.open()
    elif share < FREE:
        spare.close()


def seconds_waited() -> float:
    """Return how long the main thread has waited for a processor since the process began."""
    _, waited, _ = Path('/proc/self/schedstat').read_text(encoding='ascii').split()
    return int(waited) / 1e9


class SpareTeam:
    """Idle threads of OpenMP, more than processors, with which libgomp spins less."""

    def __init__(self, openmp: ctypes.CDLL) -> None:
        self.openmp = openmp
        self.closing: threading.Event | None = None

    def open(self) -> None:
        if self.closing is None:
            self.closing = threading.Event()
            threading.Thread(target=self._hold, args=(self.closing,), daemon=True).start()

    def close(self) -> None:
        if self.closing is not None:
            self.closing.set()
            self.closing = None

    def _hold(self, closing: threading.Event) -> None:
        # Any function does that each thread of the team may call.
        work = self.openmp.omp_get_thread_num
        self.openmp.GOMP_parallel(work, None, self.openmp.omp_get_num_procs(), 0)
        closing.wait()
