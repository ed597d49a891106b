"""Horovod over MPI, by which the original averaged; its build is read before it is loaded."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_human_preferences.distributed import mpi_library
from lm_human_preferences.distributed.launch_methods import Family
from lm_human_preferences.distributed.meeting import RankLost
from lm_human_preferences.errors import UserError

if TYPE_CHECKING:
    import torch

_POLL_SECONDS = 0.001  # as in Horovod
_NCCL = b'ncclAllReduce'  # NCCL's function, which messages of a Horovod with NCCL name


class Horovod:
    """Sums by Horovod, which uses NCCL for tensors on GPUs."""

    def __init__(self, seconds: int) -> None:
        """seconds: how long a sum may take."""
        import horovod.torch
        import torch

        self.seconds = seconds
        self.hvd: Any = horovod.torch
        # Tensors come in large buckets already.
        os.environ.setdefault('HOROVOD_FUSION_THRESHOLD', '0')
        if not torch.cuda.is_available():
            # In milliseconds. Horovod's thread wakes up every millisecond by default, on a
            # processor that has better things to do.
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
                raise RankLost(
                    f'a sum by Horovod has not ended within {self.seconds} s; see'
                    ' --run.allreduce_timeout'
                )
            time.sleep(_POLL_SECONDS)
        self.hvd.synchronize(handle)

    def close(self) -> None:
        """End its thread, which uses MPI."""
        self.hvd.shutdown()


def is_chosen(allreduce: str, family: Family | None) -> bool:
    """Return whether ranks that speak this MPI average by Horovod; UserError if they cannot."""
    reason = 'torch is chosen' if allreduce == 'torch' else why_not(family)
    if reason and allreduce == 'horovod':
        raise UserError(
            f'--run.allreduce horovod: {reason}: compile it by `sh tools/horovod.sh` for MPICH, or'
            ' `MPI=openmpi sh tools/horovod.sh`, and start the ranks by that mpiexec; or use auto'
        )
    return not reason


def why_not(family: Family | None) -> str:
    """Return why ranks that speak this MPI cannot average by Horovod; '' if they can."""
    import torch

    path = _library()
    if path is None:
        return 'Horovod is not installed'
    built = mpi_library.linked_family(path)
    if family is None or built is not family:  # it would crash
        builder, speaker = (each.name if each else 'no MPI' for each in (built, family))
        return f'Horovod was built against {builder}, and the ranks speak {speaker}'
    if torch.cuda.is_available() and _NCCL not in path.read_bytes():
        return 'Horovod was built without NCCL'
    try:
        import horovod.torch  # noqa: F401
    except ImportError as e:
        return f'Horovod does not load ({" ".join(str(e).split())})'
    return ''


def mpi_of_build() -> str | None:
    """Return the soname of the MPI that Horovod was built against, for `tools/horovod.sh`."""
    path = _library()
    built = mpi_library.linked_family(path) if path else None
    return built and built.soname


def _library() -> Path | None:
    spec = importlib.util.find_spec('horovod')
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or []:
        for path in Path(folder, 'torch').glob('mpi_lib*.so'):
            return path
    return None
