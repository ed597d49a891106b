"""Averaging by Horovod over MPI, as in the original, if Horovod was built for the MPI in use."""

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

_POLL_SECONDS = 0.001  # interval of Horovod's own polling


class Horovod:
    """Sums over ranks by Horovod, which uses NCCL for tensors on GPUs."""

    def __init__(self, seconds: int) -> None:
        """Start Horovod. seconds: how long a sum over ranks may take."""
        import horovod.torch
        import torch

        self.seconds = seconds
        self.hvd: Any = horovod.torch
        os.environ.setdefault('HOROVOD_FUSION_THRESHOLD', '0')  # gradients already come in buckets
        if not torch.cuda.is_available():
            # By default, Horovod's thread wakes up every millisecond, which slows computation.
            os.environ.setdefault('HOROVOD_CYCLE_TIME', '10')
        self.hvd.init()

    def begin_sum(self, tensor: torch.Tensor) -> Callable[[], object]:
        """Start replacing `tensor` by its sum over ranks; return a function that waits for it."""
        handle = self.hvd.allreduce_async_(tensor, op=self.hvd.Sum)
        return lambda: self._wait(handle)

    def _wait(self, handle: int) -> None:
        """Wait for a sum over ranks; raise RankLost after a time limit, as Horovod has no limit."""
        until = time.monotonic() + self.seconds
        while not self.hvd.poll(handle):
            if time.monotonic() > until:
                raise RankLost(
                    f'a sum by Horovod has not ended within {self.seconds} s;'
                    ' see --run.allreduce_timeout'
                )
            time.sleep(_POLL_SECONDS)
        self.hvd.synchronize(handle)

    def close(self) -> None:
        """End Horovod's thread, which uses MPI."""
        self.hvd.shutdown()


def is_chosen(allreduce: str, family: Family | None) -> bool:
    """Return whether Horovod averages gradients; UserError if it is required but unusable."""
    if allreduce == 'torch':
        return False
    if is_usable(family):
        return True
    if allreduce == 'horovod':
        raise UserError(
            '--run.allreduce horovod needs a Horovod that was compiled for this torch, on GPUs with'
            f' NCCL, and for {family.name if family else "the MPI that starts the ranks"}. Compile'
            ' one with `sh tools/horovod.sh` for MPICH, or `MPI=openmpi sh tools/horovod.sh` for'
            " Open MPI, and use that MPI's mpiexec; or give --run.allreduce auto"
        )
    return False


def is_usable(family: Family | None) -> bool:
    """Return whether Horovod is installed for the MPI `family`; with another MPI it would crash."""
    if family is None or mpi_of_build() is not family:
        return False
    import torch

    try:
        import horovod.torch as hvd
    except ImportError:
        return False
    return not torch.cuda.is_available() or bool(hvd.nccl_built())


def mpi_of_build() -> Family | None:
    """Return the MPI for which Horovod was built; None without Horovod. Horovod is not loaded."""
    spec = importlib.util.find_spec('horovod')
    for folder in (spec and spec.submodule_search_locations) or ():
        for path in Path(folder, 'torch').glob('mpi_lib*.so'):
            # Debian names MPICH's library libmpich.so.12.
            found = re.search(rb'\0(libmpi(?:ch)?\.so[.\d]*)\0', path.read_bytes())
            if found is not None:
                return OPEN_MPI if found[1].decode() == OPEN_MPI.soname else MPICH
    return None
