"""How ranks are started, where they meet, by which MPI, and which of them reports an error."""

import datetime
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from launched import REPOSITORY, needs_mpi, output_of, set_launcher

from lm_human_preferences.distributed import horovod, launch_methods, meeting, worker
from lm_human_preferences.distributed.launch_methods import MPICH, OPEN_MPI, Endpoint, Launch
from lm_human_preferences.distributed.meeting import RankLost
from lm_human_preferences.distributed.torch_comm import noticing_lost_ranks
from lm_human_preferences.errors import UserError
from lm_human_preferences.machine import environment
from lm_human_preferences.reward_sources import function
from lm_human_preferences.reward_sources.texts import joined
from lm_human_preferences.runs import reward_function

BY_MPICH = 'PMI_SIZE=4 PMI_RANK=3 '
BY_OPEN_MPI = 'OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_RANK=3 '
BY_SRUN = 'SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=1 SLURM_JOB_ID=1000 SLURM_STEP_ID=2 '
BY_SRUN += 'SLURM_STEP_NODELIST=node[07-08] '
BY_AZURE = 'WORLD_SIZE=6 RANK=5 MASTER_ADDR=first MASTER_PORT=29500 '
BY_TORCHRUN = BY_AZURE + 'TORCHELASTIC_RUN_ID=mine TORCHELASTIC_RESTART_COUNT=2 '


def started_with(monkeypatch, variables):
    set_launcher(monkeypatch, dict(each.split('=') for each in variables.split()))


@pytest.mark.parametrize(
    'variables, launch, endpoint',
    [
        ('', ('none', 1, 0), None),
        (BY_OPEN_MPI, ('mpiexec of Open MPI', 4, 3), None),
        (BY_SRUN + BY_MPICH, ('mpiexec of MPICH', 4, 3), None),  # or srun by PMI2
        (BY_AZURE + BY_MPICH, ('mpiexec of MPICH', 4, 3), None),
        # torchrun on each host by mpiexec
        (BY_TORCHRUN + BY_SRUN + BY_MPICH, ('torchrun', 6, 5), ('first', 29500, 'mine/2')),
        (BY_AZURE + 'WORLD_SIZE=1 RANK=0', ('torchrun', 1, 0), ('first', 29500, 'job/0')),
        ('WORLD_SIZE=6 RANK=5', ('none', 1, 0), None),  # nobody says where rank 0 is
        (BY_SRUN, ('srun', 2, 1), ('node07', 10240 + (31_000 + 2) % 20480, 'slurm-1000.2.0')),
        (BY_SRUN + 'MASTER_ADDR=a MASTER_PORT=5', ('srun', 2, 1), ('a', 5, 'slurm-1000.2.0')),
        (
            BY_SRUN + 'SLURM_STEP_NUM_NODES=1 SLURM_RESTART_COUNT=3',
            ('srun', 2, 1),
            ('127.0.0.1', 20762, 'slurm-1000.2.3'),
        ),
    ],
)
def test_launch(monkeypatch, variables, launch, endpoint):
    started_with(monkeypatch, variables)
    assert launch_methods.current()[:3] == launch
    assert endpoint is None or launch_methods.endpoint() == endpoint


@pytest.mark.parametrize(
    'variables, told',
    [
        ('RANK=6', 'RANK is 6, but must be below WORLD_SIZE, 6'),
        ('WORLD_SIZE=two', "WORLD_SIZE must be a whole number, not 'two'"),
        ('MASTER_PORT=99999', 'MASTER_PORT must be from 1 to 65535, not 99999'),
        ('MASTER_PORT=http', "MASTER_PORT must be a whole number, not 'http'"),
    ],
)
def test_wrong_variables(monkeypatch, variables, told):
    started_with(monkeypatch, BY_AZURE + variables)
    with pytest.raises(UserError, match=f'^{told}$'):
        launch_methods.endpoint()


def test_first_host():
    first = launch_methods.first_host
    assert first('node[07-12,30],login') == 'node07'
    assert first('r[1-2]n[003-004],b') == 'r1n003'
    assert first('host-1.example.org,host-2.example.org') == 'host-1.example.org'


@pytest.mark.parametrize(
    'variables, threads, spins',
    [
        (BY_TORCHRUN + 'OMP_NUM_THREADS=1', None, environment.SPIN_COUNT),
        ('OMP_NUM_THREADS=1 OMP_WAIT_POLICY=active GOMP_SPINCOUNT=7', '1', '7'),
    ],
)
def test_threads_are_the_users_and_wait_asleep(monkeypatch, variables, threads, spins):
    started_with(monkeypatch, 'OMP_WAIT_POLICY= GOMP_SPINCOUNT= ' + variables)
    environment.prepare(launch_methods.current().launcher)
    assert os.environ.get('OMP_NUM_THREADS') == threads
    assert os.environ['GOMP_SPINCOUNT'] == spins


def test_ranks_are_started_by_the_environments_own_mpiexec(tmp_path, monkeypatch):
    """Whatever launcher has started this process."""
    started_with(monkeypatch, BY_MPICH + BY_OPEN_MPI + 'PMIX_RANK=3')
    variables = launch_methods.rank_environment()
    assert not [name for name in variables if name.startswith(('PMI', 'OMPI_COMM'))]
    monkeypatch.setattr(sys, 'executable', str(tmp_path / 'python'))
    with pytest.raises(UserError, match='no mpiexec to start ranks with: .* or use --mpi 1$'):
        launch_methods.become_mpiexec(2)


def test_a_store_of_one_host_is_open_to_that_host_alone():
    listener = meeting.listen(Endpoint('127.0.0.1', 0, 'job'))
    address, port = listener.getsockname()
    assert address == '127.0.0.1'
    place = Endpoint(address, port, 'job')
    told = rf'^rank 0 cannot listen at {address}, TCP port {port} \(Address.*\): set MASTER_PORT to'
    with pytest.raises(UserError, match=told):
        meeting.listen(place)
    store = meeting.open_store(place, listener, seconds=5)
    store.set('key', 'value')
    assert meeting.open_store(place, None, seconds=5).get('key') == b'value'
    others = meeting.open_store(place._replace(job='theirs'), None, seconds=5)
    assert not others.check(['key'])


@pytest.fixture
def nowhere():
    with socket.socket() as taken:  # nothing listens there
        taken.bind(('127.0.0.1', 0))
        yield Endpoint(*taken.getsockname(), 'job')


WAITS = {
    'store': lambda nowhere, seconds: meeting.open_store(nowhere, None, seconds),
    'others': lambda nowhere, seconds: meeting.choose_interface(
        dist.HashStore(), nowhere, Launch('srun', 2, 0), seconds
    ),
}


@pytest.mark.parametrize(
    'what, told',
    [
        ('store', '^nothing answers at 127.0.0.1, TCP port .* within 0 s: MASTER_ADDR and'),
        ('others', '^not all 2 ranks have connected; see --run.allreduce_timeout'),
    ],
)
def test_a_rank_that_waits(nowhere, monkeypatch, what, told):
    """It ends in one line; until then it hears signals."""
    with pytest.raises(RankLost, match=told):
        WAITS[what](nowhere, 0)
    monkeypatch.setattr(time, 'sleep', lambda seconds: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        WAITS[what](nowhere, 60)


@pytest.mark.parametrize(
    'rank, first, addresses, interface',
    [
        (0, '127.0.0.1', ['127.0.0.1', '127.0.0.1'], 'lo'),  # all on one host
        (0, '127.0.0.1', ['127.0.0.1', '10.0.0.2'], 'eth1'),
        (1, '10.0.0.2', ['127.0.0.1', '10.0.0.1'], 'eth1'),
        (0, 'unknown', ['', ''], None),
    ],
)
def test_the_interface_to_the_other_ranks(monkeypatch, rank, first, addresses, interface):
    """The store's host takes the one at which it reaches another host."""
    assert meeting._address_towards('127.0.0.1') == '127.0.0.1'
    assert meeting._address_towards('no such host.invalid') == ''
    assert meeting.interfaces()['127.0.0.1'] == 'lo'
    monkeypatch.setenv('GLOO_SOCKET_IFNAME', '')
    monkeypatch.delenv('GLOO_SOCKET_IFNAME')
    towards = {'127.0.0.1': '127.0.0.1', '10.0.0.2': '10.0.0.1', 'unknown': ''}
    monkeypatch.setattr(meeting, '_address_towards', towards.get)
    monkeypatch.setattr(meeting, 'interfaces', lambda: {'127.0.0.1': 'lo', '10.0.0.1': 'eth1'})
    store = dist.HashStore()
    for each, address in enumerate(addresses):
        store.set(f'address of rank {each}', address)
    launch = Launch('srun', len(addresses), rank)
    meeting.choose_interface(store, Endpoint(first, 1, 'job'), launch, 0)
    assert os.environ.get('GLOO_SOCKET_IFNAME') == interface


def test_addresses_of_the_first_host(monkeypatch):
    """The first that answers; what this host has, too, leads nowhere, unless it is the first."""
    monkeypatch.setattr(meeting, 'interfaces', lambda: {'127.0.0.2': 'bridge'})
    with socket.create_server(('127.0.0.2', 0)) as server:
        port = server.getsockname()[1]
        assert meeting.reachable(['127.0.0.2'], port) == '127.0.0.2'
        with socket.create_server(('127.0.0.1', port)):
            addresses = ['127.0.0.2', '127.0.0.3', '127.0.0.1']
            assert meeting.reachable(addresses, port) == '127.0.0.1'
    message = f'does not reach the first host of this run, TCP port {port} of 127.0.0.2: open'
    with pytest.raises(UserError, match=message):
        meeting.reachable(['127.0.0.2'], port)


@pytest.mark.parametrize(
    'answer, is_lost, is_reporter',
    [
        ('3', False, True),
        ('1', False, False),
        ('late', True, True),  # rank 0, which has the store, is stopped
        ('gone', True, False),  # so is rank 0, which has said why
        ('gone', False, True),
    ],
)
def test_who_reports_an_error(monkeypatch, answer, is_lost, is_reporter):
    def compare_set(key, expected, value):
        if answer == 'gone':
            raise RuntimeError('Connection was likely closed.')
        time.sleep(0.3 if answer == 'late' else 0)
        return answer.encode()

    monkeypatch.setattr(meeting, 'STORE_SECONDS', 0.1)
    monkeypatch.setattr(meeting, '_store', SimpleNamespace(compare_set=compare_set))
    started_with(monkeypatch, BY_MPICH)
    assert meeting.is_reporter(is_lost=is_lost) is is_reporter


@pytest.mark.parametrize('rank', [0, 1])
def test_what_happens_before_ranks_meet_is_told_by_the_first(monkeypatch, rank):
    waits, statuses, told = [], [], []
    monkeypatch.setattr(time, 'sleep', waits.append)
    monkeypatch.setattr(signal, 'signal', lambda number, handler: None)
    monkeypatch.setattr(worker, '_exit', statuses.append)
    started_with(monkeypatch, f'PMI_SIZE=2 PMI_RANK={rank} MPI_LOCALRANKID={rank}')
    worker._end_all_ranks(KeyboardInterrupt(), lambda: told.append(rank))
    assert statuses == [130] and told == ([0] if rank == 0 else [])
    assert waits == [worker.REPORT_SECONDS if rank else worker.PRINT_SECONDS]
    assert meeting.is_reporter(is_lost=False) == (rank == 0)


def test_a_rank_ends_the_processes_of_a_reward_function_and_leaves_no_file(monkeypatch, tmp_path):
    """Processes of a pool have the launcher's pipes, for whose end it waits."""
    new_folder = function._folder_of_modules.__wrapped__  # an earlier test may have made one
    monkeypatch.setattr(function, '_folder_of_modules', new_folder)
    monkeypatch.setattr(sys, 'path', [*sys.path])
    monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
    monkeypatch.setattr(worker, '_clean_ups', [])
    path = tmp_path / 'reward.py'
    path.write_text('def score(queries, responses):\n    return [1 for _ in responses]\n')
    function.FunctionScorer(reward_function.read(f'{path}:score')).score([joined('a', 'b')])
    assert [*tmp_path.iterdir()] != [path]
    ended = []
    pooled = SimpleNamespace(terminate=lambda: ended.append('child'))
    monkeypatch.setattr(multiprocessing, 'active_children', lambda: [pooled])
    monkeypatch.setattr(os, '_exit', ended.append)
    worker._exit(3)
    assert ended == ['child', 3] and [*tmp_path.iterdir()] == [path]


def test_errors_of_a_rank_that_is_lost():
    store, late = dist.HashStore(), datetime.timedelta(milliseconds=100)
    with ThreadPoolExecutor() as ranks:
        groups = ranks.map(lambda rank: dist.ProcessGroupGloo(store, rank, 2, late), range(2))
        group, _second = groups
    for _ in range(2):  # the messages are quite different
        with (
            pytest.raises(RankLost, match='^communication failed: (Timed out|Application timeout)'),
            noticing_lost_ranks(),
        ):
            group.allreduce([torch.ones(1)]).wait()
    for error, told in ((dist.DistBackendError, RankLost), (torch.OutOfMemoryError,) * 2):
        with pytest.raises(told), noticing_lost_ranks():
            raise error('text')


def test_the_mpi_beside_the_launcher_comes_first(tmp_path):
    program, library = tmp_path / 'bin/mpiexec', tmp_path / 'lib64' / MPICH.soname
    program.parent.mkdir()
    shutil.copy(shutil.which('sh'), program)
    library.parent.mkdir()
    library.touch()
    code = 'from lm_human_preferences.distributed import meeting; '
    code += f'print(*meeting._libraries("{MPICH.soname}"))'
    command = [program, '-c', f"{sys.executable} -c '{code}'; true"]
    found = output_of(command, {**os.environ, 'PYTHONPATH': str(REPOSITORY)}).split()
    assert found[0] == str(library) and found[-1] == MPICH.soname
    assert all(path.startswith(sys.prefix) for path in found[1:-1])


@needs_mpi
def test_no_mpi_library_is_one_line(tmp_path):
    code = 'from lm_human_preferences.distributed.meeting import *\n'
    code += 'try: load_mpi(launch_methods.MPICH)\nexcept UserError as error: print(error)'
    variables = {'PYTHONPATH': str(REPOSITORY), 'MPI4PY_LIBMPI': f'{tmp_path}/libmpi.so.12'}
    told = output_of([sys.executable, '-c', code], {**os.environ, **variables})
    assert told.startswith('MPICH started these ranks, but mpi4py cannot load libmpi.so.12 (')


def test_ranks_of_another_mpi_are_recognised(monkeypatch):
    world = SimpleNamespace(Get_size=lambda: 1)
    monkeypatch.setattr(meeting, 'load_mpi', lambda family: SimpleNamespace(COMM_WORLD=world))
    started_with(monkeypatch, BY_MPICH)
    with pytest.raises(UserError, match='^4 ranks were started, but mpi4py finds 1, as it'):
        meeting.meet(1)


OF_MPICH = b'\0libmpi.so.12\0'
BY_DEBIAN = b'\0libmpi_cxx.so.40\0libmpich.so.12\0'


@pytest.mark.parametrize(
    'content, family, has_gpu, is_usable',
    [
        (OF_MPICH, MPICH, False, True),
        (BY_DEBIAN, MPICH, False, True),
        (b'\0libmpi.so.40\0', OPEN_MPI, False, True),
        (OF_MPICH, OPEN_MPI, False, False),
        (OF_MPICH, None, False, False),
        (b'', MPICH, False, False),
        (OF_MPICH, MPICH, True, False),  # it was built without NCCL
    ],
)
def test_horovod_that_suits_the_ranks(tmp_path, monkeypatch, content, family, has_gpu, is_usable):
    folder = tmp_path / 'horovod/torch'
    folder.mkdir(parents=True)
    (tmp_path / 'horovod/__init__.py').touch()
    (folder / 'mpi_lib_v2.so').write_bytes(content)
    (folder / '__init__.py').write_text('def nccl_built(): return 0')
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split('.')[0] == 'horovod']:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: has_gpu)
    assert horovod.is_chosen('auto', family) == is_usable
    assert not horovod.is_chosen('torch', family)
    monkeypatch.setitem(sys.modules, 'horovod.torch', None)  # compiled for another torch
    told = '^--run.allreduce horovod needs a Horovod that was compiled .*. Compile one with `sh '
    with pytest.raises(UserError, match=told):
        horovod.is_chosen('horovod', family)


def test_horovod_does_not_wait_for_ever():
    engine = object.__new__(horovod.Horovod)
    engine.hvd, engine.seconds = SimpleNamespace(poll=lambda handle: False), 0.1
    with pytest.raises(RankLost, match='a sum by Horovod has not ended within 0.1 s'):
        engine._wait(5)
