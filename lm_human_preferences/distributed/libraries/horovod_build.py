"""Build of Horovod, read without loading it: beside another MPI it would crash."""

import importlib.util
from pathlib import Path

from lm_human_preferences.distributed.libraries import mpi_library
from lm_human_preferences.errors import UserError

# NCCL's function, which messages of a Horovod with NCCL name.
_NCCL = b'ncclAllReduce'


def why_not(soname: str, has_gpu: bool) -> str | None:
    """Return why `auto` takes no Horovod; '' where there is none, None if it does."""
    path = _find()
    if path is None:
        return ''
    reason = _wrong_mpi(path, soname)
    if reason is None and has_gpu and _NCCL not in path.read_bytes():
        return 'Horovod was built without NCCL'
    return reason


def require(soname: str) -> None:
    """Raise UserError if no Horovod can be loaded beside the MPI library `soname`."""
    path = _find()
    reason = _wrong_mpi(path, soname) if path else 'Horovod is not installed'
    if reason is None:
        return
    family = mpi_library.family_of(soname)
    build = 'sh tools/horovod.sh'
    if family is mpi_library.OPEN_MPI:
        build = f'MPI=openmpi {build}'
    raise UserError(
        f'--run.allreduce horovod: {reason}, and the ranks speak {family.name}: compile it by'
        f' `{build}`, or use auto'
    )


def mpi_of_build() -> str | None:
    """Return the name of the MPI library that Horovod was built against, for `tools/horovod.sh`."""
    path = _find()
    return mpi_library.linked_mpi(path) if path else None


def _find() -> Path | None:
    spec = importlib.util.find_spec('horovod')
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or []:
        for path in Path(folder, 'torch').glob('mpi_lib*.so'):
            return path
    return None


def _wrong_mpi(path: Path, soname: str) -> str | None:
    """Return the problem of a Horovod that was built against another MPI than `soname`."""
    built = mpi_library.linked_mpi(path)
    if built is None:
        return 'Horovod was built without MPI'
    if built != soname:
        return f'Horovod was built against {mpi_library.family_of(built).name} ({built})'
    return None
