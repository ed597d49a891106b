"""Which MPI a rank loads, and whether Horovod was built for it. Nothing is loaded here.

Ranks that do load it: tests/commands/test_launchers.py.
"""

import ctypes
import os
import shutil
import struct
import subprocess
import sys
import types
from pathlib import Path

import mpi4py
import pytest
from launched import forget_launcher

from lm_human_preferences.distributed import engines, launch_methods, launcher
from lm_human_preferences.distributed.libraries import horovod_build, mpi_library, shared_objects
from lm_human_preferences.errors import UserError

BINDINGS = Path(mpi4py.__file__).parent
OPEN_MPI = {'OMPI_COMM_WORLD_SIZE': '2', 'OMPI_COMM_WORLD_RANK': '1', 'PMIX_RANK': '1'}
HYDRA = {'PMI_SIZE': '2', 'PMI_RANK': '1'}
SRUN = {'SLURM_STEP_NUM_TASKS': '2', 'SLURM_PROCID': '1'}
PMI2 = {**SRUN, **HYDRA, 'SLURM_MPI_TYPE': 'pmi2'}
PMIX = {**SRUN, 'PMIX_RANK': '1', 'PMIX_NAMESPACE': 'slurm.pmix.1.0', 'SLURM_MPI_TYPE': 'pmix'}
TORCHRUN = {
    'RANK': '1',
    'WORLD_SIZE': '2',
    'MASTER_ADDR': 'localhost',
    'MASTER_PORT': '29500',
    'TORCHELASTIC_RUN_ID': 'none',
}


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """Function that makes this process look like one that was started with these variables."""
    forget_launcher(monkeypatch)
    for name in (*mpi_library.CHOICES, 'OPAL_PREFIX'):
        monkeypatch.delenv(name, raising=False)
    mpi_library.load_library.cache_clear()

    def set_variables(variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    yield set_variables
    mpi_library.load_library.cache_clear()


@pytest.fixture
def loaded(monkeypatch):
    """The libraries that were to be loaded; none of them is."""
    names = []
    monkeypatch.setattr(ctypes, 'CDLL', lambda name, mode: names.append(name))
    return names


@pytest.fixture
def no_library(monkeypatch):
    """A loader that finds nothing."""

    def fail(name, mode):
        raise OSError(f'{name}: cannot open shared object file: No such file or directory')

    monkeypatch.setattr(ctypes, 'CDLL', fail)


# ---------------------------------------------------------------- which family


@pytest.mark.parametrize(
    'variables, family',
    [
        ({}, None),
        (OPEN_MPI, mpi_library.OPEN_MPI),
        (HYDRA, mpi_library.MPICH),
        (PMI2, mpi_library.MPICH),
        (PMIX, mpi_library.OPEN_MPI),
        (SRUN, None),
        (TORCHRUN, None),
        ({**PMI2, **TORCHRUN}, None),  # srun starts torchrun on each host
        ({**PMIX, **HYDRA, 'LMHP_RANKS': '2'}, mpi_library.MPICH),  # mpiexec inside a step of srun
    ],
)
def test_family(launched, variables, family):
    launched(variables)
    assert launch_methods.current().family is family


def test_a_step_of_slurm_around_mpiexec_is_forgotten(launched, loaded):
    launched({**PMIX, **HYDRA})
    mpi_library.load_library()
    assert 'PMIX_NAMESPACE' not in os.environ


@pytest.mark.parametrize('variables', [OPEN_MPI, HYDRA, PMIX])
@pytest.mark.parametrize('choice', mpi_library.CHOICES)
def test_the_users_choice_counts(launched, loaded, variables, choice):
    launched({**variables, choice: 'mine'})
    assert mpi_library.load_library() is None
    assert loaded == []
    assert mpi_library.why_worlds_differ().startswith(f'{choice} names another MPI than ')


@pytest.mark.parametrize(
    'variables, choice, value, told',
    [
        (HYDRA, 'MPI4PY_MPIABI', 'openmpi', "MPICH's mpiexec started these ranks, but"),
        (OPEN_MPI, 'MPI4PY_LIBMPI', 'libmpi.so.12', "Open MPI's mpiexec started these ranks, but"),
        (HYDRA, 'MPI4PY_LIBMPI', '{}/libmpi.so', "MPICH's mpiexec started these ranks, but"),
    ],
)
def test_a_choice_of_the_other_mpi_is_one_line(launched, tmp_path, variables, choice, value, told):
    """Also where a path leads to the library by links, as Debian's does."""
    (tmp_path / 'libmpi.so.40.30.4').touch()
    (tmp_path / 'libmpi.so').symlink_to('libmpi.so.40.30.4')
    value = value.format(tmp_path)
    launched({**variables, choice: value})
    other = 'MPICH' if variables is OPEN_MPI else 'Open MPI'
    with pytest.raises(mpi_library.NoLibrary) as e:
        mpi_library.load_library()
    assert str(e.value) == (
        f'{told} {choice}={value} names {other}: unset it, or start the ranks by the mpiexec of'
        f' {other}'
    )
    launched({choice: 'openmpi' if variables is OPEN_MPI else 'libmpich.so.12'})
    assert mpi_library.load_library() is None


# ---------------------------------------------------------------- which library


@pytest.mark.parametrize('folder', ['lib', 'lib64'])
def test_the_library_beside_the_launcher_comes_first(launched, tmp_path, folder):
    """Also where a shell is between the launcher and this process."""
    program = tmp_path / 'bin/mpiexec'
    program.parent.mkdir()
    shutil.copy(shutil.which('sh'), program)
    (tmp_path / folder).mkdir()
    code = (
        'from lm_human_preferences.distributed.libraries import mpi_library;'
        'print(*mpi_library._library_folders())'
    )
    command = f'sh -c \'{sys.executable} -c "{code}"; true\'; true'
    run = subprocess.run([program, '-c', command], capture_output=True, text=True, check=True)
    assert run.stdout.split() == [str(tmp_path / folder), str(Path(sys.prefix, 'lib'))]


def test_where_an_open_mpi_was_moved_to(launched, loaded, tmp_path):
    library = tmp_path / 'lib/libmpi.so.40'
    library.parent.mkdir()
    library.touch()
    launched({**PMIX, 'OPAL_PREFIX': str(tmp_path)})
    assert mpi_library.load_library() == str(library)
    assert loaded == [str(library)]


def test_the_loader_is_asked_last(launched, loaded, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, 'prefix', str(tmp_path))
    launched(PMIX)
    assert mpi_library.load_library() == 'libmpi.so.40'


def test_no_open_mpi_for_its_launcher(launched, no_library, monkeypatch, tmp_path):
    (tmp_path / 'lib').mkdir()
    monkeypatch.setattr(sys, 'prefix', str(tmp_path))
    launched(OPEN_MPI)
    with pytest.raises(mpi_library.NoLibrary) as refused:
        mpi_library.load_library()
    assert str(refused.value) == (
        f"Open MPI's mpiexec started these ranks, but there is no libmpi.so.40 in {tmp_path}/lib or"
        ' where the loader looks: name it by MPI4PY_LIBMPI=/path/to/libmpi.so.40, or take MPICH,'
        f' by {tmp_path}/bin/mpiexec or srun --mpi=pmi2'
    )


@pytest.mark.parametrize(
    'variables, begin, end',
    [
        (PMIX, 'srun --mpi=pmix started', 'or srun --mpi=pmi2'),
        (PMI2, 'srun --mpi=pmi2 started', 'its own mpiexec or srun --mpi=pmix'),
        (HYDRA, "MPICH's mpiexec started", 'its own mpiexec or srun --mpi=pmix'),
    ],
)
def test_no_library_for_the_launcher(launched, no_library, variables, begin, end):
    launched(variables)
    with pytest.raises(UserError) as refused:
        mpi_library.load_library()
    assert str(refused.value).startswith(begin)
    assert str(refused.value).endswith(end)


def test_a_library_that_does_not_load(launched, no_library, tmp_path):
    library = tmp_path / 'lib/libmpi.so.40'
    library.parent.mkdir()
    library.touch()
    launched({**PMIX, 'OPAL_PREFIX': str(tmp_path)})
    with pytest.raises(UserError, match=rf'their library does not load \({library}: cannot open'):
        mpi_library.load_library()


def test_a_mpi4py_that_was_compiled_for_one_mpi(launched, loaded, monkeypatch, tmp_path):
    package = tmp_path / 'mpi4py'
    package.mkdir()
    (package / '__init__.py').touch()
    shutil.copy(next(BINDINGS.glob('MPI.mpich.*')), package / 'MPI.cpython-x86_64-linux-gnu.so')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, 'mpi4py', raising=False)
    launched(PMIX)
    with pytest.raises(UserError, match='^srun --mpi=pmix started .* compiled for another MPI: '):
        mpi_library.load_library()


# ---------------------------------------------------------------- Horovod


@pytest.fixture
def build(tmp_path, monkeypatch):
    """Function that makes a Horovod which is linked against the MPI of one of mpi4py's bindings."""

    def make(binding, content=b''):
        folder = tmp_path / 'horovod/torch'
        folder.mkdir(parents=True)
        (tmp_path / 'horovod/__init__.py').touch()
        library = folder / 'mpi_lib_v2.so'
        shutil.copy(next(BINDINGS.glob(f'MPI.{binding}.*')), library)
        with library.open('ab') as file:
            file.write(content)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, 'horovod', raising=False)

    return make


@pytest.fixture
def no_horovod(monkeypatch, tmp_path):
    (tmp_path / 'horovod').mkdir()
    (tmp_path / 'horovod/__init__.py').touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, 'horovod', raising=False)


@pytest.fixture
def mpiexec(monkeypatch):
    """Function that says whether the mpiexec of this machine is Open MPI's."""
    return lambda is_open_mpi: monkeypatch.setattr(
        launcher, 'find_mpiexec', lambda: ('mpiexec', is_open_mpi)
    )


@pytest.mark.parametrize('binding, is_open_mpi', [('mpich', False), ('openmpi', True)])
def test_horovod_for_the_mpi_in_use(build, mpiexec, binding, is_open_mpi):
    build(binding)
    mpiexec(is_open_mpi)
    assert engines.expected_engine('auto') == 'horovod'
    assert engines.expected_engine('horovod') == 'horovod'


@pytest.mark.parametrize(
    'binding, is_open_mpi, built, spoken, command',
    [
        ('mpich', True, 'MPICH (libmpi.so.12)', 'Open MPI', 'MPI=openmpi sh tools/horovod.sh'),
        ('openmpi', False, 'Open MPI (libmpi.so.40)', 'MPICH', 'sh tools/horovod.sh'),
    ],
)
def test_horovod_for_another_mpi(build, mpiexec, binding, is_open_mpi, built, spoken, command):
    build(binding)
    mpiexec(is_open_mpi)
    assert engines.expected_engine('auto') == f'torch, as Horovod was built against {built}'
    with pytest.raises(UserError) as refused:
        engines.expected_engine('horovod')
    assert str(refused.value) == (
        f'--run.allreduce horovod: Horovod was built against {built}, and the ranks speak {spoken}:'
        f' compile it by `{command}`, or take auto'
    )


def test_horovod_counts_for_the_ranks_that_are_there(build, launched, mpiexec):
    """Not for those that this machine's own mpiexec would start."""
    build('openmpi')
    mpiexec(False)
    launched(PMIX)
    assert engines.expected_engine('auto') == 'horovod'


def test_one_rank_without_horovod_is_enough_for_another_engine(monkeypatch):
    asked = []

    def torch_over_mpi(comm, seconds):
        asked.append((comm, seconds))
        return types.SimpleNamespace(name='torch')

    monkeypatch.setattr(engines, 'torch_over_mpi', torch_over_mpi)
    monkeypatch.setattr(mpi_library, 'soname_in_use', lambda: 'libmpi.so.12')
    monkeypatch.setattr(horovod_build, 'why_not', lambda soname, has_gpu: 'it is old')
    ranks = types.SimpleNamespace(all_gather_object=lambda reason: [None, reason])
    assert engines.create_engine('auto', ranks, 60).name == 'torch, as it is old'
    assert asked == [(ranks, 60)]


def test_no_horovod(no_horovod, mpiexec, monkeypatch):
    mpiexec(False)
    assert engines.expected_engine('auto') == 'torch'
    monkeypatch.setattr(mpi_library, 'soname_in_use', lambda: 'libmpi.so.12')
    message = '^--run.allreduce horovod: Horovod is not installed, .* `sh tools/horovod.sh`, or '
    with pytest.raises(UserError, match=message):
        engines.HorovodEngine(60)


@pytest.mark.parametrize(
    'content, has_gpu, reason',
    [
        (b'', False, None),
        (b'', True, 'Horovod was built without NCCL'),
        (b'ncclAllReduce', True, None),
    ],
)
def test_horovod_on_gpus(build, content, has_gpu, reason):
    build('mpich', content)
    assert horovod_build.why_not('libmpi.so.12', has_gpu) == reason
    horovod_build.check('libmpi.so.12')  # who names it gets it


def test_auto_does_without_a_horovod_that_does_not_load(build, monkeypatch):
    """As one that was compiled for another torch."""
    build('mpich')
    monkeypatch.setattr(mpi_library, 'soname_in_use', lambda: 'libmpi.so.12')
    monkeypatch.setitem(sys.modules, 'horovod.torch', None)
    assert engines._why_no_horovod_loads() == 'Horovod does not load: compile it anew'
    with pytest.raises(UserError, match=r'^Horovod does not load \(.*\): compile it anew by '):
        engines.HorovodEngine(60)


def test_a_damaged_horovod(build):
    build('mpich')
    horovod_build._find().write_bytes(b'')
    assert horovod_build.why_not('libmpi.so.12', False).startswith('Horovod is damaged: ')


def test_abort_ends_all_ranks_where_mpi_is_loaded(monkeypatch):
    statuses = []
    world = types.SimpleNamespace(Abort=statuses.append)
    monkeypatch.setitem(sys.modules, 'mpi4py.MPI', types.SimpleNamespace(COMM_WORLD=world))
    mpi_library.abort(2)
    monkeypatch.delitem(sys.modules, 'mpi4py.MPI')
    mpi_library.abort(1)
    assert statuses == [2]


# ---------------------------------------------------------------- shared libraries as files


def test_needed_libraries():
    (binding,) = BINDINGS.glob('MPI.openmpi.*')
    assert {'libmpi.so.40', 'libc.so.6'} <= set(shared_objects.needed_libraries(binding))


def test_a_library_that_is_loaded_elsewhere_than_its_file_says(tmp_path):
    """Tables are named by addresses, which only a segment that is loaded translates."""
    loaded, dynamic, notes = 1, 2, 4
    names = b'\0libmpi.so.12\0libc.so.6\0'
    needed, end, strings = 1, 0, 5
    entries = struct.pack('<8q', needed, 1, strings, 5020, needed, 14, end, 0)
    begin = 64 + 4 * 56
    segments = [  # kind, offset, address, size
        (notes, 0, 5000, 1000),
        (loaded, 0, 1000, 1000),
        (loaded, begin, 5020 - len(entries), len(entries) + len(names)),
        (dynamic, begin, 5020 - len(entries), len(entries)),
    ]
    header = struct.pack('<6s26xQ16xH6x', b'\x7fELF\x02\x01', 64, len(segments))
    table = [struct.pack('<I4xQQ8xQ16x', *segment) for segment in segments]
    path = tmp_path / 'library.so'
    path.write_bytes(b''.join([header, *table, entries, names]))
    assert shared_objects.needed_libraries(path) == ['libmpi.so.12', 'libc.so.6']


@pytest.mark.parametrize('size', [0, 4, 60, 200, 5000])
def test_a_damaged_library(tmp_path, size):
    (binding,) = BINDINGS.glob('MPI.openmpi.*')
    damaged = tmp_path / 'damaged.so'
    damaged.write_bytes(binding.read_bytes()[:size])
    with pytest.raises(ValueError):
        shared_objects.needed_libraries(damaged)


def test_what_is_no_library(tmp_path):
    text = tmp_path / 'text.so'
    text.write_text('INPUT(libmpi.so.40)\n' * 100)
    with pytest.raises(ValueError, match='text.so is no shared library of a 64-bit machine'):
        shared_objects.needed_libraries(text)
