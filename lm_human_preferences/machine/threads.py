"""How many threads of the CPU a process takes: its share of those that it may use."""

import os
from collections.abc import Collection, Sequence

import torch

from lm_human_preferences.machine import processors


def limit_alone() -> None:
    """Have torch take at most the processors that one process on this host may take.

    OMP_NUM_THREADS prevails.
    """
    if not is_set_by_user():
        limit_threads([os.sched_getaffinity(0)], local_rank=0)


def limit_threads(affinities: Sequence[Collection[int]], local_rank: int) -> None:
    """Have torch take this rank's share of the processors, or fewer if it would by itself.

    affinities: the processors that each rank of this host may use; MPI may bind ranks to some.
    """
    cores = processors.core_of_each(set().union(*affinities))
    share = processors.thread_count(affinities, local_rank, cores, processors.cpu_quota())
    torch.set_num_threads(min(share, torch.get_num_threads()))


def is_set_by_user() -> bool:
    """Whether OMP_NUM_THREADS says how many threads there are."""
    return 'OMP_NUM_THREADS' in os.environ
