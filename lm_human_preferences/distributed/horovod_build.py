"""How the Horovod of this environment was built, read from its library without loading it.

Horovod loads the MPI that it was linked against. Beside another MPI that ends in a segmentation
fault.
"""

import importlib.util
from pathlib import Path

from lm_human_preferences.distributed import mpi_library
from lm_human_preferences.errors import UserError
from lm_human_preferences.utils import shared_objects

# NCCL's function, which messages of a Horovod with NCCL name.
_NCCL = b'ncclAllReduce'


def why_not(soname: str, has_gpu: bool) -> str | None:
    """Why `auto` takes no Horovod beside the MPI library `soname`; None if it does.

    Empty where there is no Horovod, which needs no reason. has_gpu: whether tensors are on GPUs.
    """
    path = _find()
    if path is None:
        return ''
    reason = _wrong_mpi(path, soname)
    if reason is None and has_gpu and not shared_objects.contains(path, _NCCL):
        return 'Horovod was built without NCCL'
    return reason


def check(soname: str) -> None:
    """UserError if there is no Horovod that can be loaded beside the MPI library `soname`."""
    path = _find()
    reason = 'Horovod is not installed' if path is None else _wrong_mpi(path, soname)
    if reason is None:
        return
    family = mpi_library.family_of(soname)
    build = 'sh tools/horovod.sh'
    if family is mpi_library.OPEN_MPI:
        build = f'MPI=openmpi {build}'
    raise UserError(
        f'--run.allreduce horovod: {reason}, and the ranks speak {family.name}: compile it by'
        f' `{build}`, or take auto'
    )


def _find() -> Path | None:
    """Horovod's library for PyTorch; None if there is none."""
    spec = importlib.util.find_spec('horovod')
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or []:
        for path in Path(folder, 'torch').glob('mpi_lib*.so'):
            return path
    return None


def _wrong_mpi(path: Path, soname: str) -> str | None:
    """What is wrong with the MPI that the Horovod at `path` was built against, if it is not
    `soname`."""
    try:
        needed = shared_objects.needed_libraries(path)
    except ValueError as e:
        return f'Horovod is damaged: {e}'
    if soname in needed:
        return None
    other = next((name for name in needed if name.startswith('libmpi')), None)
    if other is None:
        return 'Horovod was built without MPI'
    return f'Horovod was built against {mpi_library.family_of(other).name} ({other})'
