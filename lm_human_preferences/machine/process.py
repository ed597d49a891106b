"""Settings of this process that depend on the hardware: CPU threads, GPU, freed memory."""

import ctypes
import os
import socket
from collections.abc import Collection, Sequence
from typing import Any

import torch

from lm_human_preferences.errors import UserError
from lm_human_preferences.machine import processors

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # constants of malloc.h


def limit_alone() -> None:
    """Limit torch's threads to this process's processors, unless OMP_NUM_THREADS is set."""
    limit_threads([os.sched_getaffinity(0)], local_rank=0)


def limit_threads(affinities: Sequence[Collection[int]], local_rank: int) -> None:
    """Limit torch's threads to this rank's part of the cores, unless OMP_NUM_THREADS is set."""
    if not threads_are_set():
        cores = processors.core_of_each(set().union(*affinities))
        share = processors.thread_count(affinities, local_rank, cores, processors.cpu_quota())
        torch.set_num_threads(min(share, torch.get_num_threads()))


def threads_are_set() -> bool:
    """Return whether the user has set the number of threads."""
    return 'OMP_NUM_THREADS' in os.environ


def choose_gpu(visible: Sequence[Sequence[str]], local_rank: int) -> int:
    """Return this rank's GPU: index of the first visible one no lower rank takes; or UserError."""
    taken = []
    for gpus in visible:
        taken.append(next((gpu for gpu in gpus if gpu not in taken), None))
    own = visible[local_rank]
    if None in taken:
        raise UserError(
            f'{len(visible)} ranks on {socket.gethostname()}, which has {len(own)}'
            f' visible GPU(s): use --mpi {len(own)}, or make more visible by CUDA_VISIBLE_DEVICES'
        )
    return own.index(taken[local_rank])


def keep_freed_memory() -> None:
    """Make glibc keep up to 2 GB of freed memory, since reusing it is faster than new pages."""
    mallopt = getattr(ctypes.CDLL(None), 'mallopt', None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def release_freed_memory() -> None:
    """Make glibc return freed memory to the system, before a phase with other tensor sizes."""
    malloc_trim = getattr(ctypes.CDLL(None), 'malloc_trim', None)
    if malloc_trim is not None:
        malloc_trim(0)


def free_bytes(ranks: int) -> int:
    """Return the bytes free on this process's GPU, or in the host's memory for each of `ranks`."""
    if not torch.cuda.is_available():
        return processors.available_memory() // ranks
    # Empty PyTorch's cache, where an earlier training of a reward model has left its memory.
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def hardware() -> dict[str, Any]:
    """Return {name: value} for a run's record: processor, threads, GPU (None without one)."""
    is_gpu = torch.cuda.is_available()
    return {
        'processor': str(processors.this_processor()),
        'threads': torch.get_num_threads(),
        'gpu': torch.cuda.get_device_name() if is_gpu else None,
    }
