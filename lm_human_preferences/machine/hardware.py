"""Processors, memory and GPUs of this machine, and settings of this process that depend on them."""

import contextlib
import ctypes
import functools
import itertools
import math
import os
import re
import socket
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from lm_human_preferences.errors import UserError

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # constants of malloc.h
CPUINFO = Path('/proc/cpuinfo')
MEMBERSHIPS = Path('/proc/self/cgroup')
CGROUPS = Path('/sys/fs/cgroup')
SIBLINGS = '/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list'

AMD, INTEL = 'AuthenticAMD', 'GenuineIntel'
# Linux uses these names for the features that decide how fast a processor multiplies matrices.
FEATURES = ('avx2', 'avx512f', 'avx512_vnni', 'avx512_bf16', 'amx_bf16', 'asimd', 'sve', 'bf16')


@dataclass(frozen=True)
class Processor:
    """Model of a processor. features: names from FEATURES that the processor has."""

    vendor: str
    model: str
    features: tuple[str, ...]

    def __str__(self) -> str:
        return f'{self.model} ({" ".join(self.features)})'


def parse_cpuinfo(text: str) -> Processor:
    """Return the first processor in the text of /proc/cpuinfo; missing fields are no error."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition(':')
        fields.setdefault(name.strip(), value.strip())
    vendor = fields.get('vendor_id') or fields.get('CPU implementer', 'unknown')
    model = fields.get('model name') or f'{vendor} {fields.get("CPU part", "processor")}'
    flags = (fields.get('flags') or fields.get('Features', '')).split()
    return Processor(vendor, model, tuple(name for name in FEATURES if name in flags))


@functools.cache
def this_processor() -> Processor:
    """Return the model of the processor that this process runs on."""
    try:
        return parse_cpuinfo(CPUINFO.read_text(encoding='utf-8'))
    except OSError:  # Only Linux has /proc/cpuinfo.
        return parse_cpuinfo('')


def core_of_each(processors: Collection[int]) -> dict[int, str]:
    """Return {logical processor: its physical core}, without processors whose core is unknown."""
    cores = {}
    for processor in processors:
        path = Path(SIBLINGS.format(processor))
        if path.exists():
            cores[processor] = path.read_text(encoding='ascii').strip()
    return cores


def control_groups(cgroups: Path = CGROUPS, memberships: Path = MEMBERSHIPS) -> Iterator[Path]:
    """Yield the folders of this process's control group (version 2) and of the group's parents."""
    lines = memberships.read_text(encoding='utf-8').splitlines() if memberships.exists() else []
    for line in lines:
        if line.startswith('0::'):
            # In a container, the files of the process's control group may be in `cgroups` itself.
            group = cgroups / line.removeprefix('0::').lstrip('/')
            yield from (each for each in (group, *group.parents) if each.is_relative_to(cgroups))


def cpu_quota(cgroups: Path = CGROUPS, memberships: Path = MEMBERSHIPS) -> float | None:
    """Return the number of processors that this process's control groups allow; None: no limit."""
    quotas = []
    for group in control_groups(cgroups, memberships):
        with contextlib.suppress(OSError, ValueError):  # A limit of 'max' is no number.
            quota, period = (group / 'cpu.max').read_text(encoding='ascii').split()
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def available_memory(proc: Path = Path('/proc'), cgroups: Path = CGROUPS) -> int:
    """Return the bytes that processes may still take: free memory, or a control group's limit."""
    meminfo = (proc / 'meminfo').read_text(encoding='ascii')
    available = re.search(r'MemAvailable: +(\d+)', meminfo)
    assert available is not None, 'meminfo has no MemAvailable'
    limits = [int(available[1]) << 10]
    for group in control_groups(cgroups, proc / 'self/cgroup'):
        with contextlib.suppress(OSError, ValueError):  # A limit of 'max' is no number.
            limits.append(int((group / 'memory.max').read_text(encoding='ascii')))
    return min(limits)


def thread_count(
    affinities: Sequence[Collection[int]],
    local_rank: int,
    core_of: Mapping[int, str],
    quota: float | None,
) -> int:
    """Return the number of threads for `local_rank`. quota: cores for all ranks of the host."""
    # Count physical cores, as ranks may be bound to different hyperthreads of the same core.
    cores = [{core_of.get(each, str(each)) for each in affinity} for affinity in affinities]
    ranks_on = Counter(itertools.chain.from_iterable(cores))
    share = math.floor(sum(Fraction(1, ranks_on[core]) for core in cores[local_rank]))
    if quota is not None:
        share = min(share, math.ceil(quota / len(affinities)))
    return max(1, share)


def limit_alone() -> None:
    """Limit torch's threads to this process's processors, unless OMP_NUM_THREADS is set."""
    limit_threads([os.sched_getaffinity(0)], local_rank=0)


def limit_threads(affinities: Sequence[Collection[int]], local_rank: int) -> None:
    """Limit torch's threads to this rank's part of the cores, unless OMP_NUM_THREADS is set."""
    if not threads_are_set():
        cores = core_of_each(set().union(*affinities))
        share = thread_count(affinities, local_rank, cores, cpu_quota())
        torch.set_num_threads(min(share, torch.get_num_threads()))


def threads_are_set() -> bool:
    """Return whether the user has set the number of threads."""
    return 'OMP_NUM_THREADS' in os.environ


def default_device() -> torch.device:
    return torch.device('cuda' if torch.cuda.is_available() else 'cpu')


def choose_gpu(visible: Sequence[Sequence[str]], local_rank: int) -> int:
    """Return the index of the first GPU that no lower rank takes; UserError for too few GPUs."""
    taken = []
    for gpus in visible:
        taken.append(next((gpu for gpu in gpus if gpu not in taken), None))
    own = visible[local_rank]
    if None in taken:
        raise UserError(
            f'{len(visible)} ranks on {socket.gethostname()}, which has {len(own)} visible'
            f' GPU(s): use --mpi {len(own)}, or make more GPUs visible by CUDA_VISIBLE_DEVICES'
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
    """Return a rank's free bytes: on its GPU, or, without a GPU, its share of the host's memory."""
    if not torch.cuda.is_available():
        return available_memory() // ranks
    # Empty PyTorch's cache, which may hold memory from an earlier training of a reward model.
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def description() -> dict[str, Any]:
    """Return {name: value} for a run's record: processor, threads, GPU (None without one)."""
    is_gpu = torch.cuda.is_available()
    return {
        'processor': str(this_processor()),
        'threads': torch.get_num_threads(),
        'gpu': torch.cuda.get_device_name() if is_gpu else None,
    }
