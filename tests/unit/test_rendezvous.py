"""Ranks without MPI: where they meet, what they send each other, and how long they wait."""

import datetime
import json
import math
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from launched import eventually, set_launcher

from lm_human_preferences.distributed import channel, launch_methods, lifeline, messages, rendezvous
from lm_human_preferences.errors import UserError

SLURM = {
    'SLURM_STEP_NUM_TASKS': '4',
    'SLURM_PROCID': '3',
    'SLURM_JOB_ID': '1000',
    'SLURM_STEP_ID': '2',
    'SLURM_STEP_NODELIST': 'node[07-08]',
}
ONE_HOST = {**SLURM, 'SLURM_STEP_NUM_NODES': '1'}
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
        ({**SLURM, **TORCHRUN}, ('first', 29500, 'mine/2')),
        (SLURM, ('node07', 10240 + (31_000 + 2) % 20480, 'slurm-1000.2.0')),
        ({**SLURM, 'MASTER_PORT': '5000'}, ('node07', 5000, 'slurm-1000.2.0')),
        ({**SLURM, 'MASTER_ADDR': 'a', 'MASTER_PORT': '5'}, ('a', 5, 'slurm-1000.2.0')),
        (
            {**SLURM, 'SLURM_STEP_NUM_NODES': '1', 'SLURM_RESTART_COUNT': '3'},
            ('127.0.0.1', 20762, 'slurm-1000.2.3'),
        ),
        # Ranks of one host meet there, so that no other host reaches them.
        ({**ONE_HOST, 'MASTER_ADDR': 'a'}, ('127.0.0.1', 20762, 'slurm-1000.2.0')),
        ({**SLURM, 'SLURM_STEP_NUM_NODES': '2'}, ('node07', 20762, 'slurm-1000.2.0')),
        ({**ONE_HOST, **TORCHRUN, 'LOCAL_WORLD_SIZE': '4'}, ('127.0.0.1', 29500, 'mine/2')),
        ({**TORCHRUN, 'LOCAL_WORLD_SIZE': '1'}, ('first', 29500, 'mine/2')),
        (
            {**TORCHRUN, 'LOCAL_WORLD_SIZE': '4', 'TORCHELASTIC_USE_AGENT_STORE': 'True'},
            ('first', 29500, 'mine/2'),
        ),
    ],
)
def test_endpoint(monkeypatch, variables, expected):
    set_launcher(monkeypatch, variables)
    assert launch_methods.current().endpoint() == expected


@pytest.mark.parametrize(
    'variables, message',
    [
        ({**TORCHRUN, 'MASTER_PORT': 'http'}, "^MASTER_PORT 'http' is not a TCP port: set it to"),
        ({**TORCHRUN, 'MASTER_PORT': '70000'}, "^MASTER_PORT '70000' is not a TCP port"),
        ({**SLURM, 'SLURM_STEP_NODELIST': ''}, '^SLURM_STEP_NODELIST names no host: set MASTER'),
    ],
)
def test_endpoint_that_is_wrong(monkeypatch, variables, message):
    set_launcher(monkeypatch, variables)
    with pytest.raises(UserError, match=message):
        launch_methods.current().endpoint()


@pytest.mark.parametrize(
    'hosts, first',
    [
        ('a,b', 'a'),
        ('node[07-12,30],login', 'node07'),
        ('node[1]', 'node1'),
        ('rack[1-2]-a,b', 'rack1-a'),
        ('r[1-2]n[003-004],b', 'r1n003'),
        ('b,r[1-2]', 'b'),
        ('host-1.example.org,host-2.example.org', 'host-1.example.org'),
    ],
)
def test_first_host(hosts, first):
    assert launch_methods.first_host(hosts) == first


def test_nothing_listens_there():
    """Under srun, where rank 0 may have died before."""
    place = launch_methods.Endpoint('127.0.0.1', 1, 'job')
    with pytest.raises(lifeline.RankLost, match='^nothing answers at 127.0.0.1, TCP port 1 within'):
        rendezvous.open_store(place, is_host=False, seconds=1)


def test_a_port_that_is_taken():
    with socket.create_server(('127.0.0.1', 0)) as server:
        port = server.getsockname()[1]
        place = launch_methods.Endpoint('127.0.0.1', port, 'job')
        message = rf'^rank 0 cannot listen at 127.0.0.1, TCP port {port} \(.*\): set MASTER_PORT to'
        with pytest.raises(UserError, match=message):
            rendezvous.open_store(place, is_host=True, seconds=1)


@pytest.mark.parametrize(
    'variables, left',
    [
        ({**TORCHRUN, 'OMP_NUM_THREADS': '1'}, None),
        ({**TORCHRUN, 'OMP_NUM_THREADS': '4'}, '4'),
        ({'OMP_NUM_THREADS': '1'}, '1'),
    ],
)
def test_threads_that_torchrun_sets(monkeypatch, variables, left):
    set_launcher(monkeypatch, variables)
    monkeypatch.setenv('GOMP_SPINCOUNT', '')  # which this sets
    launch_methods.current().prepare()
    assert os.environ.get('OMP_NUM_THREADS') == left


@pytest.mark.parametrize('launcher', [{}, TORCHRUN])
@pytest.mark.parametrize('given', [{}, {'OMP_WAIT_POLICY': 'active'}, {'GOMP_SPINCOUNT': '7'}])
def test_threads_wait_asleep_unless_the_user_says_how(monkeypatch, launcher, given):
    unset = {'OMP_WAIT_POLICY': '', 'GOMP_SPINCOUNT': '', 'OMP_NUM_THREADS': '2'}
    set_launcher(monkeypatch, {**launcher, **unset, **given})
    launch_methods.current().prepare()
    expected = launch_methods.SPIN_COUNT if not given else given.get('GOMP_SPINCOUNT', '')
    assert os.environ['GOMP_SPINCOUNT'] == expected


@pytest.mark.parametrize(
    'value',
    [
        *(None, True, -1, 2**70, -0.0, 0.1, math.inf, 'a"é\ud800', b'\0\xff', [], [1, [2]]),
        (1, ('a', None)),
        {'list': [{'a': (1, 2)}], 'tensor': b''},
    ],
)
def test_messages(value):
    received = messages.decode(messages.encode(value))
    assert received == value
    assert repr(received) == repr(value)


@pytest.mark.parametrize(
    'value',
    [
        np.arange(6).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.float32(0.1),
        torch.arange(6).reshape(2, 3).t(),
        torch.tensor([math.nan, -0.0]),
        torch.zeros(2, 0),
        torch.ones(3, dtype=torch.bfloat16),
        torch.nn.Parameter(torch.ones(2)),
    ],
)
def test_messages_of_numbers(value):
    """To the bit, and they can be written to."""
    (received,) = messages.decode(messages.encode([value]))
    assert received.dtype == value.dtype and received.shape == value.shape
    if isinstance(value, torch.Tensor):
        as_bytes = [x.detach().reshape(-1).view(torch.uint8).tolist() for x in (received, value)]
        assert as_bytes[0] == as_bytes[1]
        received.zero_()
    else:
        assert received.tobytes() == value.tobytes()


class LauncherName(NamedTuple):
    name: str


@pytest.mark.parametrize('value', [{1: 2}, {1, 2}, object(), np.array([None]), LauncherName('a')])
def test_what_ranks_do_not_send(value):
    with pytest.raises(TypeError):
        messages.encode(value)


def test_silence_is_counted_in_seconds_awake():
    signs = iter([1, 1, 1, 2, 2])
    silence = lifeline._Silence(lambda: next(signs))
    assert [silence.seconds() for _ in range(4)] == [1, 2, 0, 1]


def test_gloo_s_errors_are_those_of_a_rank_that_is_lost():
    """Two ranks, of which the second never comes; the messages are quite different."""
    store, late = dist.HashStore(), datetime.timedelta(milliseconds=100)

    def connect(rank):
        return dist.ProcessGroupGloo(store, rank, 2, late)

    with ThreadPoolExecutor() as ranks:
        group, other = ranks.map(connect, range(2))
    for _ in range(2):
        with (
            pytest.raises(lifeline.RankLost, match='^the connection to another rank is lost: .'),
            lifeline.noticing_lost_ranks(),
        ):
            group.allreduce([torch.ones(1)]).wait()
    assert other.rank() == 1  # until here, it was there


@pytest.mark.parametrize(
    'error, is_lost',
    [
        (dist.DistNetworkError, True),
        (dist.DistBackendError, True),
        (torch.OutOfMemoryError, False),
        (torch.AcceleratorError, False),
        (ValueError, False),
    ],
)
def test_other_errors_are_told_by_their_class(error, is_lost):
    with pytest.raises(lifeline.RankLost if is_lost else error), lifeline.noticing_lost_ranks():
        raise error('text')


def test_what_a_rank_tells_its_launcher(tmp_path):
    with pytest.raises(OSError):
        channel.StatusPipe(str(tmp_path), 1)  # nobody listens
    status, life = channel.open_for_launcher(str(tmp_path), 1)
    pipe = channel.StatusPipe(str(tmp_path), 1)
    assert os.get_blocking(pipe.fd)  # a report waits for room, rather than fail
    pipe.report()
    pipe.report(done=True)
    lines = [json.loads(line) for line in os.read(status, 1000).splitlines()]
    assert lines == [{'process': os.getpid()}, {}, {'done': True}]
    with pytest.raises(BlockingIOError):
        os.read(life, 1)  # empty, and open
    os.close(pipe.life)
    assert os.read(life, 1) == b''
    os.close(status)
    pipe.report(done=True)  # the launcher is gone
    os.close(pipe.fd)
    os.close(life)


class SlowStore:
    signs = 0

    def set(self, key, value):
        self.signs += 1
        time.sleep(0.5)

    def check(self, keys):
        time.sleep(0.5)
        return False


def test_a_rank_gives_a_sign_of_life_before_it_does_anything_else():
    """So that the others can name it, however soon it is stopped."""
    store = SlowStore()
    line = lifeline.Lifeline(store, rank=0, size=2, timeout=600)
    assert store.signs == 1
    line.close()


class Answering:
    def __init__(self, answer):
        self.answer = answer

    def compare_set(self, key, expected, value):
        if self.answer is None:
            time.sleep(1)
        return self.answer or value.encode()


@pytest.mark.parametrize('answer, is_first', [(b'3', True), (b'1', False), (None, True)])
def test_the_first_rank_that_fails_reports_it_also_where_no_store_answers(
    monkeypatch, answer, is_first
):
    monkeypatch.setattr(lifeline, 'LAST_WORD_SECONDS', 0.1)
    line = object.__new__(lifeline.Lifeline)
    line.rank, line.store = 3, Answering(answer)
    before = set(threading.enumerate())
    assert line.claim_failure() is is_first
    new = set(threading.enumerate()) - before
    asking = [thread for thread in new if 'claim' in thread.name]  # others may still be at work
    assert len(asking) == (answer is None)
    assert all(thread.daemon for thread in asking)  # so that this process can end


def test_a_closed_lifeline_asks_nothing_more(monkeypatch):
    """Python aborts when it ends while a thread is inside the store, which is written in C++."""
    monkeypatch.setattr(lifeline, 'BEAT_SECONDS', 0)
    store = SlowStore()
    line = lifeline.Lifeline(store, rank=0, size=2, timeout=600)
    eventually(lambda: store.signs > 1)
    line.close()
    assert not any(thread.is_alive() for thread in line.threads)


def test_a_host_without_any_network(monkeypatch):
    """Not even lo, as in `unshare --net`; connecting would be tried again and again."""
    monkeypatch.setattr(rendezvous, 'interfaces', dict)
    with pytest.raises(UserError, match='no network .* not even lo'):
        rendezvous.open_store(
            launch_methods.Endpoint('127.0.0.1', 1, 'test'), is_host=True, seconds=1
        )
    with pytest.raises(UserError, match='use --mpi 1'):
        rendezvous.meet_over_mpi(None, None)
