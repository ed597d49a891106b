"""Averaging by Horovod over MPI, as in the original; its build is checked before loading."""

from __future__ import annotations

import importlib.util
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_human_preferences.distributed.launch_methods import MPICH, OPEN_MPI, Family
from lm_human_preferences.distributed.meeting import RankLost
from lm_human_preferences.errors import UserError

if TYPE_CHECKING:
    import torch

_POLL_SECONDS = 0.001  # as in Horovod


class Horovod:
    """Sums over ranks by Horovod, which uses NCCL for tensors on GPUs."""

    def __init__(self, seconds: int) -> None:
        """seconds: how long a sum may take."""
        import horovod.torch
        import torch

        self.seconds = seconds
        self.hvd: Any = horovod.torch
        os.environ.setdefault('HOROVOD_FUSION_THRESHOLD', '0')  # tensors come in large buckets
        if not torch.cuda.is_available():
            # By default Horovod's thread wakes up each millisecond and slows the computation.
            os.environ.setdefault('HOROVOD_CYCLE_TIME', '10')
        self.hvd.init()

    def begin_sum(self, tensor: torch.Tensor) -> Callable[[], object]:
        """Begin to overwrite `tensor` with its sum over ranks; return a function that waits."""
        handle = self.hvd.allreduce_async_(tensor, op=self.hvd.Sum)
        return lambda: self._wait(handle)

    def _wait(self, handle: int) -> None:
        """Wait for a sum; Horovod itself would wait for ever for a rank that is stopped."""
        until = time.monotonic() + self.seconds
        while not self.hvd.poll(handle):
            if time.monotonic() > until:
                late = f'a sum by Horovod has not ended within {self.seconds} s'
                raise RankLost(f'{late}; see --run.allreduce_timeout')
            time.sleep(_POLL_SECONDS)
        self.hvd.synchronize(handle)

    def close(self) -> None:
        """End Horovod's thread, which uses MPI."""
        self.hvd.shutdown()


def is_chosen(allreduce: str, family: Family | None) -> bool:
    """Return whether ranks under this MPI average by Horovod; UserError if they must but cannot."""
    reason = 'torch is chosen' if allreduce == 'torch' else why_not(family)
    if reason and allreduce == 'horovod':
        raise UserError(
            f'--run.allreduce horovod: {reason}: compile it by `sh tools/horovod.sh` for MPICH, or'
            ' `MPI=openmpi sh tools/horovod.sh`, and start the ranks by that mpiexec; or use auto'
        )
    return not reason


def why_not(family: Family | None) -> str:
    """Return why ranks under this MPI cannot average by Horovod; '' if they can."""
    import torch

    built = mpi_of_build()
    if built is None:
        return 'Horovod is not installed, or was built without MPI'
    if built is not family:  # Horovod would crash
        speaker = family.name if family else 'no MPI'
        return f'Horovod was built against {built.name}, and the ranks speak {speaker}'
    try:
        import horovod.torch as hvd
    except ImportError as e:
        return f'Horovod does not load ({" ".join(str(e).split())})'
    if torch.cuda.is_available() and not hvd.nccl_built():
        return 'Horovod was built without NCCL'
    return ''


def mpi_of_build() -> Family | None:
    """Return the MPI that Horovod was built against, without loading it."""
    spec = importlib.util.find_spec('horovod')
    for folder in (spec and spec.submodule_search_locations) or ():
        for library in Path(folder, 'torch').glob('mpi_lib*.so'):
            return linked_family(library)
    return None


def linked_family(path: Path) -> Family | None:
    """Return the MPI that a library is linked against; None if there is none."""
    # Debian names MPICH's library libmpich.so.12.
    found = re.search(rb'\0(libmpi(?:ch)?\.so[.\d]*)\0', path.read_bytes())
    if found is None:
        return None
    return OPEN_MPI if found[1].decode() == OPEN_MPI.soname else MPICH
