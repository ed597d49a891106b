"""Processors and memory of this machine, read from Linux's system files, without torch."""

import contextlib
import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

CPUINFO = Path('/proc/cpuinfo')
MEMBERSHIPS = Path('/proc/self/cgroup')
CGROUPS = Path('/sys/fs/cgroup')
SIBLINGS = '/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list'

AMD, INTEL = 'AuthenticAMD', 'GenuineIntel'
# Linux's names of the processor features that decide how fast matrices are multiplied.
# The features of x86 come first, then those of ARM.
FEATURES = ('avx2', 'avx512f', 'avx512_vnni', 'avx512_bf16', 'amx_bf16', 'asimd', 'sve', 'bf16')


@dataclass(frozen=True)
class Processor:
    """Processor model. features: the FEATURES that it has."""

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
    except OSError:  # not on Linux
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
            # In a container, the group's name may be a path on the host, and its folder the root.
            group = cgroups / line.removeprefix('0::').lstrip('/')
            yield from (each for each in (group, *group.parents) if each.is_relative_to(cgroups))


def cpu_quota(cgroups: Path = CGROUPS, memberships: Path = MEMBERSHIPS) -> float | None:
    """Return the number of processors that this process's control groups allow; None: no limit."""
    quotas = []
    for group in control_groups(cgroups, memberships):
        with contextlib.suppress(OSError, ValueError):  # not a number, such as 'max'
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
        with contextlib.suppress(OSError, ValueError):  # not a number, such as 'max'
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
