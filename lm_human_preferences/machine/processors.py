"""The processors of this machine: what they can compute, and how many threads suit them.

Reads Linux's files about them; imports nothing heavy.
"""

import functools
import math
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
# Of a processor's many features, those that matter to products of matrices, under Linux's names:
# first those of x86, then those of ARM.
FEATURES = ('avx2', 'avx512f', 'avx512_vnni', 'avx512_bf16', 'amx_bf16', 'asimd', 'sve', 'bf16')
BF16_FEATURES = {'avx512_bf16', 'amx_bf16', 'bf16'}


@dataclass(frozen=True)
class Processor:
    """A kind of processor. features: those of FEATURES that it has."""

    vendor: str
    model: str
    features: tuple[str, ...]

    @property
    def has_bf16(self) -> bool:
        """Whether it has instructions that multiply numbers of bfloat16."""
        return not BF16_FEATURES.isdisjoint(self.features)

    def __str__(self) -> str:
        return f'{self.model} ({" ".join(self.features)})'


def parse_cpuinfo(text: str) -> Processor:
    """The first processor that /proc/cpuinfo lists; what is not there is unknown, not an error."""
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
    """The kind of processor that this process runs on."""
    try:
        return parse_cpuinfo(CPUINFO.read_text(encoding='utf-8'))
    except OSError:  # it is not Linux
        return parse_cpuinfo('')


def core_of_each(processors: Collection[int]) -> dict[int, str]:
    """{processor: its core}: the hyperthreads of a core are processors of their own.

    Those are left out whose core is unknown.
    """
    cores = {}
    for processor in processors:
        path = Path(SIBLINGS.format(processor))
        if path.exists():
            cores[processor] = path.read_text(encoding='ascii').strip()
    return cores


def cpu_quota(cgroups: Path = CGROUPS, memberships: Path = MEMBERSHIPS) -> float | None:
    """How many processors' time this process's container may take; None if it has no limit.

    cgroups: where control groups of version 1, 2 or both are mounted. memberships: the file that
    lists those of this process. A limit of any group above its own holds for it, too.
    """
    try:
        lines = memberships.read_text(encoding='utf-8').splitlines()
    except OSError:
        return None
    quotas = []
    for line in lines:
        _, controllers, path = line.split(':', 2)
        mounts = []
        if controllers == '':
            mounts = [cgroups, cgroups / 'unified']
        elif 'cpu' in controllers.split(','):
            mounts = [cgroups / 'cpu', cgroups / controllers]
        for mount in mounts:
            # A container may see its own group as the root, and its path on the host as its name.
            group = mount / path.lstrip('/')
            for folder in (group, *group.parents):
                if folder.is_relative_to(mount):
                    quotas += _quotas_in(folder)
    return min(quotas, default=None)


def _quotas_in(group: Path) -> Iterator[float]:
    """The limit of one control group, if it has one."""
    try:
        if (group / 'cpu.max').exists():
            quota, period = (group / 'cpu.max').read_text(encoding='ascii').split()
        else:
            quota = (group / 'cpu.cfs_quota_us').read_text(encoding='ascii')
            period = (group / 'cpu.cfs_period_us').read_text(encoding='ascii')
        if quota != 'max' and int(quota) > 0:
            yield int(quota) / int(period)
    except (OSError, ValueError):
        return


def thread_count(
    affinities: Sequence[Collection[int]],
    local_rank: int,
    core_of: Mapping[int, str],
    quota: float | None,
) -> int:
    """How many threads `local_rank` takes: one for each core of its share of this host.

    affinities: the processors that each rank of this host may use; MPI may bind ranks to some.
    core_of: of the processors of all ranks, see core_of_each. quota: of all ranks of this host
    together, see cpu_quota. A share of 1.5 is two threads, which rest a quarter of the time.
    """
    cores_of_ranks = []
    # By core: ranks may be bound to different hyperthreads of the same one.
    ranks_on: Counter[str] = Counter()
    for affinity in affinities:
        cores = {core_of.get(processor, str(processor)) for processor in affinity}
        cores_of_ranks.append(cores)
        ranks_on.update(cores)
    own = Fraction()
    for core in cores_of_ranks[local_rank]:
        own += Fraction(1, ranks_on[core])
    share = math.floor(own)
    if quota is not None:
        share = min(share, math.ceil(quota / len(affinities)))
    return max(1, share)
