"""How the Horovod of this environment was built, read from its library without loading it.

Horovod loads the MPI that it was linked against. Beside another MPI that ends in a segmentation
fault.
"""

import importlib.util
from pathlib import Path

from lm_human_preferences.distributed.libraries import mpi_library, shared_objects
from lm_human_preferences.errors import UserError

# NCCL's function, which messages of a Horovod with NCCL name.
_NCCL = b'ncclAllReduce'


def why_not(soname: str, has_gpu: bool) -> str | None:
    """Why `auto` takes no Horovod beside the MPI library `soname`; None if it does.

    Empty where there is no Horovod, which needs no reason. has_gpu: whether tensors are on GPUs.
    """
    path = _find()
    if path is None:
        return ''
    reason = _wrong_mpi(soname)
    if reason is None and has_gpu and not shared_objects.contains(path, _NCCL):
        return 'Horovod was built without NCCL'
    return reason


def check(soname: str) -> None:
    """UserError if there is no Horovod that can be loaded beside the MPI library `soname`."""
    reason = _wrong_mpi(soname) if _find() else 'Horovod is not installed'
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


def mpi_of_build() -> str | None:
    """The MPI library that Horovod was built against; None if there is no Horovod, or one without.

    ValueError if its library is damaged.
    """
    path = _find()
    needed = shared_objects.needed_libraries(path) if path else []
    return next((name for name in needed if name.startswith('libmpi')), None)


def _find() -> Path | None:
    """Horovod's library for PyTorch; None if there is none."""
    spec = importlib.util.find_spec('horovod')
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or []:
        for path in Path(folder, 'torch').glob('mpi_lib*.so'):
            return path
    return None


def _wrong_mpi(soname: str) -> str | None:
    """What is wrong with the MPI that Horovod was built against, if it is not `soname`."""
    try:
        built = mpi_of_build()
    except ValueError as e:
        return f'Horovod is damaged: {e}'
    if built is None:
        return 'Horovod was built without MPI'
    if built != soname:
        return f'Horovod was built against {mpi_library.family_of(built).name} ({built})'
    return None
