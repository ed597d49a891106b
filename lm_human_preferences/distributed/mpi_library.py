"""Choice of the MPI library: one of the family that the launcher of the ranks belongs to.

There are two families. MPICH and its relatives speak PMI, as MPICH's mpiexec and `srun --mpi=pmi2`
do; Open MPI speaks PMIx, as its own mpiexec and `srun --mpi=pmix` do. A rank with a library of the
wrong family takes itself for a world of one, or is ended by MPI in MPI's words. mpi4py's wheel has
a binding for each family, and by itself takes the first library that it finds.
"""

import contextlib
import os
import re
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

from lm_human_preferences.distributed import launch_methods
from lm_human_preferences.distributed.launch_methods import MPICH, OPEN_MPI, Family
from lm_human_preferences.errors import UserError


def load_mpi(family: Family) -> ModuleType:
    """Return the module mpi4py.MPI by a library of `family`, unless the user has named another."""
    os.environ.setdefault('MPI4PY_LIBMPI', os.pathsep.join(_libraries(family.soname)))
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as e:
        reason = ' '.join(str(e).split())
        raise UserError(
            f'{family.name} started these ranks, but mpi4py loads no {family.soname} ({reason}):'
            f' name it by MPI4PY_LIBMPI=/path/to/{family.soname}, or start the ranks by the MPICH'
            ' that `sh tools/setup.sh` installs, or by torchrun'
        ) from e
    return MPI


def _libraries(soname: str) -> list[str]:
    """Return where the library may be: beside the launcher, in this environment, elsewhere."""
    prefixes = [Path(sys.prefix)]
    with contextlib.suppress(OSError):  # the launcher belongs to somebody else
        prefixes.insert(0, Path(os.readlink(f'/proc/{os.getppid()}/exe')).parents[1])
    folders = ('lib', 'lib64', f'lib/{sysconfig.get_config_var("MULTIARCH")}')
    paths = [prefix / folder / soname for prefix in prefixes for folder in folders]
    return [*(str(path) for path in paths if path.exists()), soname]


def expected_family() -> Family | None:
    """Return the MPI of this process's ranks, or of those that it would start; None without."""
    launch = launch_methods.current()
    return launch.family if launch.size > 1 else MPICH


def linked_family(path: Path) -> Family | None:
    """Return the MPI that a library is linked against, without loading it; None for none."""
    # Also by a distribution's name, such as libmpich.so.12.
    found = re.search(rb'\0(libmpi(?:ch)?\.so[.\d]*)\0', path.read_bytes())
    if found is None:
        return None
    return OPEN_MPI if found[1].decode() == OPEN_MPI.soname else MPICH


def finalize() -> None:
    """End the use of MPI, if it is in use."""
    mpi = sys.modules.get('mpi4py.MPI')
    if mpi is not None:
        mpi.Finalize()
