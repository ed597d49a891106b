"""Where ranks meet and by which MPI, what they send each other, and which reports an error."""

import datetime
import math
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import mpi4py
import numpy as np
import pytest
import torch
import torch.distributed as dist
from launched import REPOSITORY, needs_mpi, output_of, set_launcher

from lm_human_preferences.distributed import (
    horovod,
    launch_methods,
    meeting,
    messages,
    worker,
)
from lm_human_preferences.distributed.launch_methods import MPICH, OPEN_MPI, Endpoint, Launch
from lm_human_preferences.distributed.meeting import RankLost
from lm_human_preferences.distributed.torch_comm import noticing_lost_ranks
from lm_human_preferences.errors import UserError
from lm_human_preferences.external_rewards import function
from lm_human_preferences.external_rewards.texts import joined
from lm_human_preferences.runs import reward_function

HERE = {**os.environ, 'PYTHONPATH': str(REPOSITORY)}
SLURM = {
    'SLURM_STEP_NUM_TASKS': '4',
    'SLURM_PROCID': '3',
    'SLURM_JOB_ID': '1000',
    'SLURM_STEP_ID': '2',
    'SLURM_STEP_NODELIST': 'node[07-08]',
}
TORCHRUN = {
    'RANK': '1',
    'WORLD_SIZE': '4',
    'MASTER_ADDR': 'first',
    'MASTER_PORT': '29500',
    'TORCHELASTIC_RUN_ID': 'mine',
    'TORCHELASTIC_RESTART_COUNT': '2',
}


@pytest.mark.parametrize(
    'variables, expected',
    [
        (TORCHRUN, ('first', 29500, 'mine/2')),
        (SLURM, ('node07', 10240 + (31_000 + 2) % 20480, 'slurm-1000.2.0')),
        ({**SLURM, 'MASTER_ADDR': 'a', 'MASTER_PORT': '5'}, ('a', 5, 'slurm-1000.2.0')),
        # Ranks of one host meet there, so that no other host reaches them.
        (
            {**SLURM, 'SLURM_STEP_NUM_NODES': '1', 'SLURM_RESTART_COUNT': '3'},
            ('127.0.0.1', 20762, 'slurm-1000.2.3'),
        ),
    ],
)
def test_endpoint(monkeypatch, variables, expected):
    set_launcher(monkeypatch, variables)
    assert launch_methods.endpoint() == expected


@pytest.mark.parametrize(
    'hosts, first',
    [
        ('node[07-12,30],login', 'node07'),
        ('r[1-2]n[003-004],b', 'r1n003'),
        ('host-1.example.org,host-2.example.org', 'host-1.example.org'),
    ],
)
def test_first_host(hosts, first):
    assert launch_methods.first_host(hosts) == first


@pytest.mark.parametrize(
    'variables, threads, spins',
    [
        ({**TORCHRUN, 'OMP_NUM_THREADS': '1'}, None, launch_methods.SPIN_COUNT),
        ({**TORCHRUN, 'OMP_NUM_THREADS': '4', 'OMP_WAIT_POLICY': 'active'}, '4', ''),
        ({'OMP_NUM_THREADS': '1', 'GOMP_SPINCOUNT': '7'}, '1', '7'),
    ],
)
def test_threads_are_the_users_and_wait_asleep(monkeypatch, variables, threads, spins):
    set_launcher(monkeypatch, {'OMP_WAIT_POLICY': '', 'GOMP_SPINCOUNT': '', **variables})
    launch_methods.prepare_torch()
    assert os.environ.get('OMP_NUM_THREADS') == threads
    assert os.environ['GOMP_SPINCOUNT'] == spins


def test_a_store_of_one_host_is_open_to_that_host_alone():
    listener = meeting.listen(Endpoint('127.0.0.1', 0, 'job'))
    address, port = listener.getsockname()
    assert address == '127.0.0.1'
    place = Endpoint(address, port, 'job')
    store = meeting.open_store(place, listener, seconds=5)
    store.set('key', 'value')
    assert meeting.open_store(place, None, seconds=5).get('key') == b'value'
    others = meeting.open_store(place._replace(job='theirs'), None, seconds=5)
    assert not others.check(['key'])


def test_nothing_listens_there():
    """Under srun, where rank 0 may have died before."""
    with pytest.raises(RankLost, match='^nothing answers at 127.0.0.1, TCP port 1 within 1 s'):
        meeting.open_store(Endpoint('127.0.0.1', 1, 'job'), None, seconds=1)


def test_a_port_that_is_taken():
    with socket.create_server(('127.0.0.1', 0)) as server:
        place = Endpoint('127.0.0.1', server.getsockname()[1], 'job')
        message = f'^rank 0 cannot listen at 127.0.0.1, TCP port {place.port} .Address already in'
        with pytest.raises(UserError, match=message):
            meeting.listen(place)


def test_a_rank_that_does_not_come():
    store = dist.HashStore()
    store.set_timeout(datetime.timedelta(seconds=0.1))
    with pytest.raises(RankLost, match='^rank 1 has not come: '):
        meeting.choose_interface(store, Endpoint('127.0.0.1', 1, 'job'), Launch('srun', 2, 0))


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
    monkeypatch.setenv('GLOO_SOCKET_IFNAME', '')
    monkeypatch.delenv('GLOO_SOCKET_IFNAME')
    towards = {'127.0.0.1': '127.0.0.1', '10.0.0.2': '10.0.0.1', 'unknown': ''}
    monkeypatch.setattr(meeting, '_address_towards', towards.get)
    monkeypatch.setattr(meeting, 'interfaces', lambda: {'127.0.0.1': 'lo', '10.0.0.1': 'eth1'})
    store = dist.HashStore()
    for each, address in enumerate(addresses):
        store.set(f'address/{each}', address)
    launch = Launch('srun', len(addresses), rank)
    meeting.choose_interface(store, Endpoint(first, 1, 'job'), launch)
    assert os.environ.get('GLOO_SOCKET_IFNAME') == interface


def test_the_way_to_another_host():
    assert meeting._address_towards('127.0.0.1') == '127.0.0.1'
    assert meeting._address_towards('no such host.invalid') == ''
    assert meeting.interfaces()['127.0.0.1'] == 'lo'


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


class Store:
    """A store that answers, does not answer for a moment, or is gone."""

    def __init__(self, answer):
        self.answer = answer

    def compare_set(self, key, expected, value):
        if self.answer == 'late':
            time.sleep(0.3)
        if self.answer == 'gone':
            raise RuntimeError('Connection was likely closed.')
        return self.answer.encode()


@pytest.mark.parametrize(
    'answer, is_lost, is_reporter',
    [
        ('3', True, True),
        ('1', False, False),
        ('late', True, True),  # rank 0, which has the store, is stopped
        ('gone', True, False),  # so is rank 0, which has said why
        ('gone', False, True),
    ],
)
def test_who_reports_an_error(monkeypatch, answer, is_lost, is_reporter):
    monkeypatch.setattr(meeting, 'STORE_SECONDS', 0.1)
    monkeypatch.setattr(meeting, '_store', Store(answer))
    set_launcher(monkeypatch, {'PMI_SIZE': '4', 'PMI_RANK': '3'})
    assert meeting.is_reporter(is_lost=is_lost) is is_reporter


@pytest.mark.parametrize('rank', [0, 1])
def test_what_happens_before_ranks_meet_is_told_by_the_first(monkeypatch, rank):
    """The others wait meanwhile, as their end would be that of all."""
    waits, statuses, told = [], [], []
    monkeypatch.setattr(time, 'sleep', waits.append)
    monkeypatch.setattr(signal, 'signal', lambda number, handler: None)
    monkeypatch.setattr(worker, '_exit', statuses.append)
    set_launcher(
        monkeypatch, {'PMI_SIZE': '2', 'PMI_RANK': str(rank), 'MPI_LOCALRANKID': str(rank)}
    )
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
    pooled = SimpleNamespace(terminate=lambda: ended.append('child'))
    monkeypatch.setattr(multiprocessing, 'active_children', lambda: [pooled])
    monkeypatch.setattr(os, '_exit', lambda status: ended.append(status))
    ended = []
    worker._exit(3)
    assert ended == ['child', 3] and [*tmp_path.iterdir()] == [path]


def test_gloo_s_errors_are_those_of_a_rank_that_is_lost():
    """Two ranks, of which the second never comes; the messages are quite different."""
    store, late = dist.HashStore(), datetime.timedelta(milliseconds=100)

    def connect(rank):
        return dist.ProcessGroupGloo(store, rank, 2, late)

    with ThreadPoolExecutor() as ranks:
        group, other = ranks.map(connect, range(2))
    for _ in range(2):
        with (
            pytest.raises(RankLost, match='^(Timed out|Application timeout)'),
            noticing_lost_ranks(),
        ):
            group.allreduce([torch.ones(1)]).wait()
    assert other.rank() == 1  # until here, it was there


@pytest.mark.parametrize(
    'error, is_lost',
    [
        (dist.DistBackendError, True),
        (torch.OutOfMemoryError, False),
        (torch.AcceleratorError, False),
    ],
)
def test_other_errors_are_told_by_their_class(error, is_lost):
    with pytest.raises(RankLost if is_lost else error), noticing_lost_ranks():
        raise error('text')


@pytest.mark.parametrize('value', [None, 2**70, -0.0, math.inf, 'a"é\ud800', {'a': [True, {}]}])
def test_messages(value):
    assert repr(messages.decode(messages.encode(value))) == repr(value)


@pytest.mark.parametrize(
    'value',
    [
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array([2**40, -1]),
        torch.arange(6).reshape(2, 3).t(),
        torch.tensor([math.nan, -0.0]),
        torch.zeros(2, 0),
        torch.tensor(3, dtype=torch.bfloat16),
        torch.nn.Parameter(torch.ones(2)),
    ],
)
def test_messages_of_numbers(value):
    """To the bit, and they can be written to."""
    received = messages.decode(messages.encode({'a': (value, 1)}))['a'][0]
    assert isinstance(received, torch.Tensor) == isinstance(value, torch.Tensor)
    assert received.dtype == value.dtype and received.shape == value.shape
    as_bytes = []
    for each in map(torch.as_tensor, (received, value)):
        as_bytes.append(each.detach().contiguous().reshape(-1).view(torch.uint8).tolist())
    assert as_bytes[0] == as_bytes[1]
    received[...] = 0


@pytest.mark.parametrize('value', [{1, 2}, b'', object(), np.array([None])])
def test_what_ranks_do_not_send(value):
    with pytest.raises(TypeError):
        messages.encode(value)


def test_a_number_of_numpy_is_sent_as_one_of_python():
    assert messages.decode(messages.encode([np.float32(0.5), np.int64(3)])) == [0.5, 3]


def test_the_mpi_beside_the_launcher_comes_first(tmp_path):
    program = tmp_path / 'bin/mpiexec'
    program.parent.mkdir()
    shutil.copy(shutil.which('sh'), program)
    library = tmp_path / 'lib64' / MPICH.soname
    library.parent.mkdir()
    library.touch()
    code = (
        'from lm_human_preferences.distributed import meeting;'
        f'print(*meeting._libraries("{MPICH.soname}"))'
    )
    command = [program, '-c', f"{sys.executable} -c '{code}'; true"]
    found = output_of(command, HERE).split()
    assert found[0] == str(library)
    assert found[-1] == MPICH.soname
    assert all(path.startswith(sys.prefix) for path in found[1:-1])


@needs_mpi
def test_no_mpi_library_is_one_line(tmp_path):
    code = 'from lm_human_preferences.distributed.meeting import *; load_mpi(launch_methods.MPICH)'
    variables = {**HERE, 'MPI4PY_LIBMPI': f'{tmp_path}/libmpi.so.12'}
    run = subprocess.run(
        [sys.executable, '-c', code], env=variables, capture_output=True, text=True
    )
    told = run.stderr.splitlines()[-1]
    assert 'MPICH started these ranks, but mpi4py loads no libmpi.so.12 (' in told


def test_ranks_of_another_mpi_are_recognised(monkeypatch):
    """Whose mpiexec starts worlds of one rank each."""
    world = SimpleNamespace(Get_size=lambda: 1)
    monkeypatch.setattr(meeting, 'load_mpi', lambda family: SimpleNamespace(COMM_WORLD=world))
    set_launcher(monkeypatch, {'PMI_SIZE': '2', 'PMI_RANK': '0'})
    with pytest.raises(UserError, match='^2 ranks were started, but each sees a world of 1: '):
        meeting.meet(1)


@pytest.mark.parametrize(
    'content, expected',
    [
        (b'\0libc.so.6\0libmpi.so.40\0', OPEN_MPI),
        (b'\0libmpi_cxx.so.40\0libmpich.so.12\0', MPICH),
        (b'\0no libmpi.so.12\0libmpi.so.12', None),
    ],
)
def test_the_mpi_that_a_library_is_linked_against(tmp_path, content, expected):
    path = tmp_path / 'library.so'
    path.write_bytes(content)
    assert horovod.linked_family(path) == expected


@pytest.mark.parametrize('name, family', [('mpich', MPICH), ('openmpi', OPEN_MPI)])
def test_the_mpi_of_a_real_library(name, family):
    (binding,) = Path(mpi4py.__file__).parent.glob(f'MPI.{name}.*')
    assert horovod.linked_family(binding) == family


OF_MPICH = b'\0libmpi.so.12\0'


@pytest.mark.parametrize(
    'content, family, has_gpu, reason',
    [
        (OF_MPICH, MPICH, False, ''),
        (OF_MPICH, OPEN_MPI, False, 'Horovod was built against MPICH, and the ranks speak Open'),
        (OF_MPICH, None, False, 'Horovod was built against MPICH, and the ranks speak no MPI'),
        (b'', MPICH, False, 'Horovod is not installed, or was built without MPI'),
        (OF_MPICH, MPICH, True, 'Horovod was built without NCCL'),
    ],
)
def test_horovod_that_suits_the_ranks(tmp_path, monkeypatch, content, family, has_gpu, reason):
    folder = tmp_path / 'horovod/torch'
    folder.mkdir(parents=True)
    (tmp_path / 'horovod/__init__.py').touch()
    (folder / 'mpi_lib_v2.so').write_bytes(content)
    (folder / '__init__.py').write_text('def nccl_built(): return 0')
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split('.')[0] == 'horovod']:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: has_gpu)
    assert horovod.why_not(family).startswith(reason)
    assert horovod.is_chosen('auto', family) == (not reason)
    assert not horovod.is_chosen('torch', family)
    if reason:
        message = f'^--run.allreduce horovod: {reason}.*: compile it by `sh tools/horovod.sh` '
        with pytest.raises(UserError, match=message):
            horovod.is_chosen('horovod', family)
    if not reason:  # as one that was compiled for another torch
        monkeypatch.setitem(sys.modules, 'horovod.torch', None)
        assert horovod.why_not(family).startswith('Horovod does not load (')


def test_horovod_does_not_wait_for_ever():
    engine = object.__new__(horovod.Horovod)
    engine.hvd, engine.seconds = SimpleNamespace(poll=lambda handle: False), 0.1
    with pytest.raises(RankLost, match='a sum by Horovod has not ended within 0.1 s'):
        engine._wait(5)
