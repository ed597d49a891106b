"""Choice of the MPI library of a rank, and Horovod's; nothing is loaded here."""

import ctypes
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import mpi4py
import pytest
from launched import REPOSITORY, set_launcher

from lm_human_preferences.distributed import engines, launcher
from lm_human_preferences.distributed.libraries import horovod_build, mpi_library
from lm_human_preferences.errors import UserError

LINKED = {  # libraries, as far as they are read; none: there is no file
    'mpich': b'\0libmpi.so.12\0',
    'openmpi': b'\0libmpi.so.40\0',
    'libc': b'\0libc.so.6\0',
    'none': None,
}
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
    set_launcher(monkeypatch, {})
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
    names = []
    monkeypatch.setattr(ctypes, 'CDLL', lambda name, mode: names.append(name))
    return names


@pytest.fixture
def no_library(monkeypatch):
    def fail(name, mode):
        raise OSError(f'{name}: cannot open shared object file: No such file or directory')

    monkeypatch.setattr(ctypes, 'CDLL', fail)


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
    with pytest.raises(mpi_library.NoLibrary, match=f'^{told} {choice}={value} names {other}: uns'):
        mpi_library.load_library()
    launched({choice: 'openmpi' if variables is OPEN_MPI else 'libmpich.so.12'})
    assert mpi_library.load_library() is None


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
    run = subprocess.run(
        [program, '-c', command], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == [str(tmp_path / folder), str(Path(sys.prefix, 'lib'))]


def test_where_an_open_mpi_was_moved_to(launched, loaded, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, 'prefix', str(tmp_path / 'own'))
    launched(PMIX)
    assert mpi_library.load_library() == 'libmpi.so.40'
    mpi_library.load_library.cache_clear()
    library = tmp_path / 'lib/libmpi.so.40'
    library.parent.mkdir()
    library.touch()
    launched({'OPAL_PREFIX': str(tmp_path)})
    assert mpi_library.load_library() == str(library)
    assert loaded == ['libmpi.so.40', str(library)]


@pytest.mark.parametrize(
    'variables, name, library, remedy',
    [
        (OPEN_MPI, "Open MPI's mpiexec", 'libmpi.so.40', 'MPI4PY_LIBMPI=/path/to/libmpi.so.40'),
        (PMIX, 'srun --mpi=pmix', 'libmpi.so.40', 'srun --mpi=pmi2'),
        (PMI2, 'srun --mpi=pmi2', 'libmpi.so.12', 'sh tools/setup.sh'),
        (HYDRA, "MPICH's mpiexec", 'libmpi.so.12', 'sh tools/setup.sh'),
    ],
)
def test_no_library_for_the_launcher(
    launched, no_library, monkeypatch, tmp_path, variables, name, library, remedy
):
    (tmp_path / 'lib').mkdir()
    monkeypatch.setattr(sys, 'prefix', str(tmp_path))
    launched(variables)
    told = f'^{name} started these ranks, but {library} is not in {tmp_path}/lib .*{remedy}'
    with pytest.raises(mpi_library.NoLibrary, match=told):
        mpi_library.load_library()
    if library == 'libmpi.so.40':
        (tmp_path / 'lib' / library).touch()
        with pytest.raises(UserError, match=rf'does not load \({tmp_path}/lib/.*: cannot open'):
            mpi_library.load_library()


@pytest.fixture
def package(tmp_path, monkeypatch):
    def make(path, content):
        library = tmp_path / path
        library.parent.mkdir(parents=True)
        name = path.partition('/')[0]
        (tmp_path / name / '__init__.py').touch()
        if content is not None:
            library.write_bytes(content)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, name, raising=False)

    return make


def test_a_mpi4py_that_was_compiled_for_one_mpi(launched, loaded, package):
    package('mpi4py/MPI.cpython-x86_64-linux-gnu.so', LINKED['mpich'])
    launched(PMIX)
    with pytest.raises(UserError, match='^srun --mpi=pmix started .* compiled for another MPI: '):
        mpi_library.load_library()


@pytest.fixture
def build(package):
    return lambda binding, more=b'': package(
        'horovod/torch/mpi_lib_v2.so', LINKED[binding] and LINKED[binding] + more
    )


@pytest.fixture
def mpiexec(monkeypatch):
    return lambda is_open_mpi: monkeypatch.setattr(
        launcher, 'find_mpiexec', lambda: ('mpiexec', is_open_mpi)
    )


@pytest.fixture
def mpich_in_use(monkeypatch):
    monkeypatch.setattr(mpi_library, 'soname_in_use', lambda: 'libmpi.so.12')


@pytest.mark.parametrize(
    'binding, is_open_mpi, reason, build_command',
    [
        ('mpich', False, None, None),
        ('openmpi', True, None, None),
        ('mpich', True, 'built against MPICH (libmpi.so.12)', 'MPI=openmpi sh tools/horovod.sh'),
        ('openmpi', False, 'built against Open MPI (libmpi.so.40)', 'sh tools/horovod.sh'),
        ('libc', False, 'built without MPI', 'sh tools/horovod.sh'),
    ],
)
def test_horovod_and_the_mpi_in_use(build, mpiexec, binding, is_open_mpi, reason, build_command):
    build(binding)
    mpiexec(is_open_mpi)
    if reason is None:
        assert engines.expected_engine('auto') == engines.expected_engine('horovod') == 'horovod'
        return
    assert engines.expected_engine('auto') == f'torch, as Horovod was {reason}'
    with pytest.raises(UserError) as refused:
        engines.expected_engine('horovod')
    spoken = 'Open MPI' if is_open_mpi else 'MPICH'
    told = f'Horovod was {reason}, and the ranks speak {spoken}: compile it by `{build_command}`'
    assert told in str(refused.value)


def test_horovod_counts_for_the_ranks_that_are_there(build, launched, mpiexec):
    """Not for those that this machine's own mpiexec would start."""
    build('openmpi')
    mpiexec(False)
    launched(PMIX)
    assert engines.expected_engine('auto') == 'horovod'


def test_one_rank_without_horovod_is_enough_for_another_engine(monkeypatch, mpich_in_use):
    begun = []
    monkeypatch.setattr(engines, 'init_torch', lambda *given, **more: begun.append((given, more)))
    monkeypatch.setattr(engines, 'TorchEngine', lambda _: types.SimpleNamespace(name='torch'))
    monkeypatch.setattr(horovod_build, 'why_not', lambda soname, has_gpu: 'it is old')
    ranks = types.SimpleNamespace(rank=0, size=2, meeting=('store', None))
    ranks.all_gather_object = lambda reason: [None, reason]
    assert engines.create_engine('auto', ranks, 60).name == 'torch, as it is old'
    ((given, options),) = begun
    assert given == ('store', 0, 2) and options['timeout'].seconds == 60


def test_no_horovod(build, mpiexec, mpich_in_use):
    build('none')
    mpiexec(False)
    assert engines.expected_engine('auto') == 'torch'
    message = '^--run.allreduce horovod: Horovod is not installed, .* `sh tools/horovod.sh`, or '
    with pytest.raises(UserError, match=message):
        engines.HorovodEngine(60)


@pytest.mark.parametrize(
    'more, has_gpu, reason',
    [
        (b'', False, None),
        (b'', True, 'Horovod was built without NCCL'),
        (b'ncclAllReduce', True, None),
    ],
)
def test_horovod_on_gpus(build, more, has_gpu, reason):
    build('mpich', more)
    assert horovod_build.why_not('libmpi.so.12', has_gpu) == reason
    horovod_build.require('libmpi.so.12')  # who names it gets it


def test_auto_does_without_a_horovod_that_does_not_load(build, monkeypatch, mpich_in_use):
    """As one that was compiled for another torch."""
    build('mpich')
    monkeypatch.setitem(sys.modules, 'horovod.torch', None)
    assert engines._why_no_horovod_loads() == 'Horovod does not load: compile it anew'
    with pytest.raises(UserError, match=r'^Horovod does not load \(.*\): compile it anew by '):
        engines.HorovodEngine(60)


def test_abort_ends_all_ranks_where_mpi_is_loaded(monkeypatch):
    statuses = []
    world = types.SimpleNamespace(Abort=statuses.append)
    monkeypatch.setitem(sys.modules, 'mpi4py.MPI', types.SimpleNamespace(COMM_WORLD=world))
    mpi_library.abort(2)
    monkeypatch.delitem(sys.modules, 'mpi4py.MPI')
    mpi_library.abort(1)
    assert statuses == [2]


@pytest.mark.parametrize(
    'content, expected',
    [
        (b'\0libc.so.6\0libmpi.so.40\0', 'libmpi.so.40'),
        (b'\0libmpi_cxx.so.40\0libmpich.so.12\0', 'libmpich.so.12'),
        (b'\0no libmpi.so.12\0libmpi.so.12', None),
        (b'', None),
    ],
)
def test_the_mpi_that_a_library_is_linked_against(tmp_path, content, expected):
    path = tmp_path / 'library.so'
    path.write_bytes(content)
    assert mpi_library.linked_mpi(path) == expected


@pytest.mark.parametrize('name, soname', [('mpich', 'libmpi.so.12'), ('openmpi', 'libmpi.so.40')])
def test_the_mpi_of_a_real_library(name, soname):
    (binding,) = Path(mpi4py.__file__).parent.glob(f'MPI.{name}.*')
    assert mpi_library.linked_mpi(binding) == soname
