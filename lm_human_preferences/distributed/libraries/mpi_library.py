"""Which MPI library this process loads: one that understands whatever started the ranks.

There are two families. MPICH and its relatives speak PMI, as MPICH's mpiexec and `srun --mpi=pmi2`
do; Open MPI speaks PMIx, as its own mpiexec and `srun --mpi=pmix` do. A rank with a library of the
wrong family takes itself for a world of one, or is ended by MPI in MPI's words. mpi4py's wheel has
a binding for each family, and by itself takes the first library that it finds.
"""

import contextlib
import ctypes
import functools
import importlib.util
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from lm_human_preferences.distributed import launch_methods, launcher
from lm_human_preferences.distributed.launch_methods import MPICH, OPEN_MPI, Family
from lm_human_preferences.distributed.libraries import shared_objects
from lm_human_preferences.errors import UserError


class NoLibrary(UserError):
    """There is no MPI library for this process; it is the same for all ranks of this host."""


# By which the user names a library; mpi4py reads them.
CHOICES = ('MPI4PY_MPIABI', 'MPI4PY_LIBMPI')
# What runs on each host as the parent of the ranks.
_LAUNCHER_PROGRAMS = (
    'hydra_pmi_proxy',
    'mpiexec',
    'mpirun',
    'orted',
    'orterun',
    'prted',
    'prterun',
)


@functools.cache
def load_mpi() -> ModuleType:
    """The module mpi4py.MPI, by the library that `load_library` finds; see there for errors."""
    library = load_library()
    with contextlib.nullcontext() if library is None else _chosen(library):
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as e:
            reason = ' '.join(str(e).split())
            raise NoLibrary(
                f'mpi4py loads no MPI library ({reason}): name one by'
                ' MPI4PY_LIBMPI=/path/to/libmpi.so, or let `sh tools/setup.sh` install one'
            ) from e
    return MPI


@functools.cache
def load_library() -> str | None:
    """Load an MPI library that understands this process's launcher, but start no MPI.

    Returns its path, or its name where the loader found it. None where mpi4py is to choose: for
    ranks without MPI, and where the user's MPI4PY_LIBMPI or MPI4PY_MPIABI says which it is.
    `NoLibrary` where there is no such library, or the user's is of the other family: MPI would end
    this process in words of its own.
    """
    family = launch_methods.current().family
    if family is None:
        return None
    for name in CHOICES:
        if os.environ.get(name):
            _check_choice(name, os.environ[name], family)
            return None
    if importlib.util.find_spec('mpi4py') is None:
        raise NoLibrary('mpi4py is not installed: `sh tools/setup.sh` installs it')
    if family is MPICH:
        # Of a step of srun in which MPICH's mpiexec was started: MPICH refuses to choose.
        os.environ.pop('PMIX_NAMESPACE', None)
    return _load_library(family)


def expected_soname() -> str:
    """What programs have to be linked against to work with the ranks' MPI; nothing is loaded.

    The ranks are those that this process is one of, or else those that it would start. UserError
    where it could not start any.
    """
    family = launch_methods.current().family
    if family is None:
        _, is_open_mpi = launcher.find_mpiexec()
        family = OPEN_MPI if is_open_mpi else MPICH
    return _binding(family) or family.soname


def soname_in_use() -> str:
    """What programs have to be linked against to work with the MPI that `load_mpi` has loaded."""
    binding = load_mpi().__file__
    assert binding is not None
    return _mpi_of(Path(binding)) or MPICH.soname


def family_of(soname: str) -> Family:
    """The family of a library's name, which may be that of one distribution: libmpich.so.12."""
    return OPEN_MPI if soname == OPEN_MPI.soname else MPICH


def announcement() -> str:
    """Which MPI is loaded, for the console; empty where it is the one of this environment."""
    maps = Path('/proc/self/maps').read_text()
    loaded = re.search(r'\S*/libmpi(ch)?\.so\S*$', maps, re.MULTILINE)
    path = Path(loaded[0]) if loaded else None
    if path is None or path.parent == _own_libraries().resolve():
        return ''
    name, version = load_mpi().get_vendor()
    return f'; MPI: {name} {".".join(map(str, version))}, {path}'


def why_worlds_differ() -> str:
    """Why ranks whose MPI is loaded do not see each other, and the fix."""
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


def _check_choice(variable: str, value: str, family: Family) -> None:
    """`NoLibrary` if the user's `value` of one of CHOICES names a library of the other family."""
    chosen = _family_by_name(value)
    if chosen is not None and chosen is not family:
        raise NoLibrary(
            f'{launch_methods.current().words} started these ranks, but {variable}={value} names'
            f' {chosen.name}: unset it, or start the ranks by the mpiexec of {chosen.name}'
        )


def _family_by_name(library: str) -> Family | None:
    """The family of a library's name or path, or of a name such as 'openmpi'; None if unknown."""
    name = os.path.basename(os.path.realpath(library))
    if name.startswith((OPEN_MPI.soname, 'openmpi')):
        return OPEN_MPI
    if name.startswith((MPICH.soname, 'libmpich.so', 'mpich')):
        return MPICH
    return None


def _load_library(family: Family) -> str:
    """Load the MPI library of a family; returns its path, or its name where the loader found it."""
    launcher_name = launch_methods.current().words
    soname = _binding(family)
    if soname is None:
        raise NoLibrary(
            f'{launcher_name} started these ranks, but mpi4py was compiled for another MPI: install'
            ' the wheel of mpi4py, as `sh tools/setup.sh` does, or start the ranks by that other'
            ' MPI'
        )
    folders = _library_folders()
    problem = f'there is no {soname} in {", ".join(map(str, folders))} or where the loader looks'
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
    """Where a library that suits the launcher may be, the likeliest first."""
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
    """Where the program is that runs as this process's launcher; there may be a shell between."""
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
    """Where pip puts the libraries of this environment."""
    return Path(sys.prefix, 'lib')


def _binding(family: Family) -> str | None:
    """The name of the library that mpi4py's binding for a family is linked against, if it has one.

    mpi4py's wheel has one for each family; a mpi4py that was compiled on this machine has only one.
    """
    spec = importlib.util.find_spec('mpi4py')
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or []:
        for path in Path(folder).glob('MPI.*.so'):
            soname = _mpi_of(path)
            if soname is not None and family_of(soname) is family:
                return soname
    return None


def _mpi_of(path: Path) -> str | None:
    """The MPI library that a shared library is linked against."""
    names = shared_objects.needed_libraries(path)
    return next((name for name in names if re.match(r'libmpi(ch)?\.so', name)), None)


@contextlib.contextmanager
def _chosen(library: str) -> Iterator[None]:
    """Within the block, mpi4py takes that library; processes that are started later do not."""
    os.environ['MPI4PY_LIBMPI'] = library
    try:
        yield
    finally:
        del os.environ['MPI4PY_LIBMPI']


def _remedy(family: Family) -> str:
    if family is MPICH:
        return (
            '`sh tools/setup.sh` installs MPICH; Open MPI is started by its own mpiexec or srun'
            ' --mpi=pmix'
        )
    return (
        f'name it by MPI4PY_LIBMPI=/path/to/{family.soname}, or take MPICH, by'
        f' {Path(sys.prefix, "bin/mpiexec")} or srun --mpi=pmi2'
    )
