"""Choice of the MPI library: one that is compatible with the launcher of the ranks.

There are two families. MPICH and its relatives speak PMI, as MPICH's mpiexec and `srun --mpi=pmi2`
do; Open MPI speaks PMIx, as its own mpiexec and `srun --mpi=pmix` do. A rank with a library of the
wrong family takes itself for a world of one, or is ended by MPI in MPI's words. mpi4py's wheel has
a binding for each family, and by itself takes the first library that it finds.
"""

import ctypes
import functools
import importlib.util
import os
import re
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

from lm_human_preferences.distributed import launch_methods, launcher
from lm_human_preferences.distributed.launch_methods import MPICH, OPEN_MPI, Family
from lm_human_preferences.errors import UserError


class NoLibrary(UserError):
    """Error: this process has no MPI library; it is the same for all ranks of this host."""


# By which the user names a library; mpi4py reads them.
CHOICES = ('MPI4PY_MPIABI', 'MPI4PY_LIBMPI')
# Parents of the ranks on each host.
_LAUNCHER_PROGRAMS = 'hydra_pmi_proxy mpiexec mpirun orted orterun prted prterun'.split()


@functools.cache
def load_mpi() -> ModuleType:
    """Return the module mpi4py.MPI, by the library that `load_library` finds."""
    library = load_library()
    if library is not None:
        os.environ['MPI4PY_LIBMPI'] = library
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as e:
        reason = ' '.join(str(e).split())
        raise NoLibrary(
            f'mpi4py loads no MPI library ({reason}): name one by'
            ' MPI4PY_LIBMPI=/path/to/libmpi.so, or let `sh tools/setup.sh` install one'
        ) from e
    finally:
        if library is not None:  # processes that are started later may need another one
            del os.environ['MPI4PY_LIBMPI']
    return MPI


@functools.cache
def load_library() -> str | None:
    """Load the launcher's MPI without starting it: its path or name; None: mpi4py chooses."""
    family = launch_methods.current().family
    if family is None:
        return None
    for name in CHOICES:
        if os.environ.get(name):
            chosen = _family_by_name(os.environ[name])
            if chosen not in (None, family):
                raise NoLibrary(
                    f'{launch_methods.current().words} started these ranks, but'
                    f' {name}={os.environ[name]} names {chosen.name}: unset it, or start the ranks'
                    f' by the mpiexec of {chosen.name}'
                )
            return None
    if importlib.util.find_spec('mpi4py') is None:
        raise NoLibrary('mpi4py is not installed: `sh tools/setup.sh` installs it')
    if family is MPICH:
        # Of a step of srun in which MPICH's mpiexec was started: MPICH refuses to choose.
        os.environ.pop('PMIX_NAMESPACE', None)
    return _load_library(family)


def expected_soname() -> str:
    """Return the soname of the MPI of this process's ranks, or of those that it would start."""
    family = launch_methods.current().family
    if family is None:
        _, is_open_mpi = launcher.find_mpiexec()
        family = OPEN_MPI if is_open_mpi else MPICH
    return _binding(family) or family.soname


def soname_in_use() -> str:
    """Return the soname of the MPI library that `load_mpi` has loaded."""
    binding = load_mpi().__file__
    assert binding is not None
    return linked_mpi(Path(binding)) or MPICH.soname


def linked_mpi(path: Path) -> str | None:
    """Return the soname of the MPI that a library is linked against, without loading it."""
    found = re.search(rb'\0(libmpi(?:ch)?\.so[.\d]*)\0', path.read_bytes())
    return found[1].decode() if found else None


def family_of(soname: str) -> Family:
    """Return the family of an MPI library, also by a distribution's name such as libmpich.so.12."""
    return OPEN_MPI if soname == OPEN_MPI.soname else MPICH


def announcement() -> str:
    """Return the name of the loaded MPI for the console; empty for that of this environment."""
    maps = Path('/proc/self/maps').read_text()
    loaded = re.search(r'\S*/libmpi(ch)?\.so\S*$', maps, re.MULTILINE)
    path = Path(loaded[0]) if loaded else None
    if path is None or path.parent == _own_libraries().resolve():
        return ''
    name, version = load_mpi().get_vendor()
    return f'; MPI: {name} {".".join(map(str, version))}, {path}'


def why_worlds_differ() -> str:
    """Return why ranks whose MPI is loaded do not see each other, and the fix."""
    for name in CHOICES:
        if os.environ.get(name):
            return f'{name} names another MPI than the one that started them; unset it'
    return (
        'they were started by the mpiexec of another MPI; put the one of this environment first on'
        ' PATH'
    )


def abort(status: int) -> None:
    """End all ranks by MPI, which then returns `status`; do nothing if MPI is not loaded."""
    mpi = sys.modules.get('mpi4py.MPI')
    if mpi is not None:
        mpi.COMM_WORLD.Abort(status)


def _family_by_name(library: str) -> Family | None:
    """Return the family of a library's name or path, or of 'openmpi'; None if unknown."""
    name = os.path.basename(os.path.realpath(library))
    if name.startswith((OPEN_MPI.soname, 'openmpi')):
        return OPEN_MPI
    if name.startswith((MPICH.soname, 'libmpich.so', 'mpich')):
        return MPICH
    return None


def _load_library(family: Family) -> str:
    """Load the MPI library of a family; return its path, or its name where the loader found it."""
    launcher_name = launch_methods.current().words
    soname = _binding(family)
    if soname is None:
        raise NoLibrary(
            f'{launcher_name} started these ranks, but mpi4py was compiled for another MPI: install'
            ' the wheel of mpi4py, as `sh tools/setup.sh` does, or start the ranks by that other'
            ' MPI'
        )
    folders = _library_folders()
    problem = f'{soname} is not in {", ".join(map(str, folders))} or where the loader looks'
    paths = [folder / soname for folder in folders if (folder / soname).exists()]
    for library in [*map(str, paths), soname]:
        try:
            ctypes.CDLL(library, os.RTLD_LAZY | os.RTLD_LOCAL)
            return library
        except OSError as e:
            if library != soname:
                problem = f'their library does not load ({e})'
    raise NoLibrary(f'{launcher_name} started these ranks, but {problem}: {_remedy(family)}')


def _library_folders() -> list[Path]:
    """Return the folders that may hold the launcher's library, the likeliest first."""
    prefixes = []
    launcher_folder = _launcher_folder()
    if launcher_folder is not None:
        prefixes.append(launcher_folder.parent)
    if 'OPAL_PREFIX' in os.environ:  # where an Open MPI is that was moved after its installation
        prefixes.append(Path(os.environ['OPAL_PREFIX']))
    names = ('lib', 'lib64', f'lib/{sysconfig.get_config_var("MULTIARCH")}')
    folders = [prefix / name for prefix in prefixes for name in names]
    folders.append(_own_libraries())
    return list(dict.fromkeys(folder for folder in folders if folder.is_dir()))


def _launcher_folder() -> Path | None:
    """Return the folder of this process's launcher; there may be a shell in between."""
    process = os.getppid()
    while process > 1:
        try:
            program = Path(os.readlink(f'/proc/{process}/exe'))
            status = Path(f'/proc/{process}/status').read_text()
        except OSError:  # it belongs to somebody else
            return None
        if program.name.partition('.')[0] in _LAUNCHER_PROGRAMS:
            return program.parent
        parent = re.search(r'^PPid:\s*(\d+)', status, re.MULTILINE)
        process = int(parent[1]) if parent else 0
    return None


def _own_libraries() -> Path:
    """Return the folder of this environment into which pip installs libraries."""
    return Path(sys.prefix, 'lib')


def _binding(family: Family) -> str | None:
    """Return the soname that mpi4py's binding for a family is linked against; None without one."""
    spec = importlib.util.find_spec('mpi4py')
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or []:
        for path in Path(folder).glob('MPI.*.so'):
            soname = linked_mpi(path)
            if soname is not None and family_of(soname) is family:
                return soname
    return None


def _remedy(family: Family) -> str:
    if family is MPICH:
        return (
            '`sh tools/setup.sh` installs MPICH; Open MPI is started by its own mpiexec or srun'
            ' --mpi=pmix'
        )
    return (
        f'name it by MPI4PY_LIBMPI=/path/to/{family.soname}, or use MPICH, by'
        f' {Path(sys.prefix, "bin/mpiexec")} or srun --mpi=pmi2'
    )
