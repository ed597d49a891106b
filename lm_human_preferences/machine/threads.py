"""Number of CPU threads of a process."""

import os
from collections.abc import Collection, Sequence

import torch

from lm_human_preferences.machine import processors


def limit_alone() -> None:
    """Limit torch's threads to this process's processors, unless OMP_NUM_THREADS is set."""
    limit_threads([os.sched_getaffinity(0)], local_rank=0)


def limit_threads(affinities: Sequence[Collection[int]], local_rank: int) -> None:
    """Limit torch's threads to this rank's share, unless OMP_NUM_THREADS is set."""
    if not is_set_by_user():
        cores = processors.core_of_each(set().union(*affinities))
        share = processors.thread_count(affinities, local_rank, cores, processors.cpu_quota())
        torch.set_num_threads(min(share, torch.get_num_threads()))


def is_set_by_user() -> bool:
    return 'OMP_NUM_THREADS' in os.environ
