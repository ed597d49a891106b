"""Others who can reach the store of ranks: another user of this host, or a host on the network."""

import datetime
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from launched import eventually
from page_proxy import free_port

from lm_human_preferences.distributed import launch_methods, launcher, lifeline, rendezvous

SOON = datetime.timedelta(seconds=5)


def listening_at(port):
    """The addresses at which a TCP port of this host is open, in the kernel's spelling."""
    found = []
    for family in ('tcp', 'tcp6'):
        with open(f'/proc/net/{family}', encoding='ascii') as table:
            rows = [line.split() for line in table]
        found += [
            row[1][:-5] for row in rows[1:] if row[1].endswith(f':{port:04X}') and row[3] == '0A'
        ]
    return found


class Mpi:
    """Ranks of MPI as threads, `here` of them on this host."""

    def __init__(self, size, here):
        self.size, self.here = size, here
        self.barrier, self.sent = threading.Barrier(size), {}

    def of(self, rank):
        def bcast(value):
            if rank == 0:
                self.sent['bcast'] = value
            self.barrier.wait()
            return self.sent['bcast']

        def allgather(value):
            self.sent[rank] = value
            self.barrier.wait()
            return [self.sent[each] for each in range(self.size)]

        world = SimpleNamespace(
            Get_rank=lambda: rank, Get_size=lambda: self.size, bcast=bcast, allgather=allgather
        )
        node = SimpleNamespace(bcast=lambda value: 0, Get_size=lambda: self.here)
        return world, node


@pytest.fixture(autouse=True)
def no_interface(monkeypatch):
    monkeypatch.setenv('GLOO_SOCKET_IFNAME', 'lo')


@pytest.mark.parametrize('here, addresses', [(2, ['0100007F']), (1, None)])
def test_ranks_of_one_host_have_a_store_of_that_host(here, addresses):
    mpi = Mpi(2, here)
    with ThreadPoolExecutor(2) as pool:
        work = [pool.submit(rendezvous.meet_over_mpi, *mpi.of(rank)) for rank in range(2)]
        (store, place), (other, other_place) = (each.result() for each in work)
    assert place == other_place and len(place.job) > 30
    store.set('key', 'value')
    assert other.get('key') == b'value'
    assert addresses is None or listening_at(place.port) == addresses
    foreign = dist.PrefixStore('mpi', dist.TCPStore('127.0.0.1', place.port, timeout=SOON))
    assert not foreign.check(['key']) and not foreign.delete_key('key')


LISTENING = """
import os
from mpi4py import MPI
MPI.COMM_WORLD.allgather(os.getpid())
sockets = {os.readlink(f'/proc/self/fd/{each}') for each in os.listdir('/proc/self/fd')
           if os.path.exists(f'/proc/self/fd/{each}')}
rows = [line.split() for line in [*open('/proc/net/tcp'), *open('/proc/net/tcp6')]]
found = [row[1][:-5] for row in rows if row[3] == '0A' and f'socket:[{row[9]}]' in sockets]
os.write(1, ''.join(f'{each}\\n' for each in found).encode())  # at once: two ranks do
"""


def test_mpi_listens_for_this_host_alone(tmp_path, monkeypatch):
    """But for the port of mpiexec, which ranks inherit."""
    mpiexec, is_open_mpi = launcher.find_mpiexec()
    if is_open_mpi:
        pytest.skip('MPICH is not installed')
    monkeypatch.delenv('UCX_NET_DEVICES', raising=False)
    done = subprocess.run(
        [mpiexec, *launcher.mpiexec_options(False, 2, None), sys.executable, '-c', LISTENING],
        env=launcher.rank_environment(str(tmp_path), 2, False),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    addresses = done.stdout.split()
    assert len(addresses) > 2 and set(addresses) <= {'00000000', '0100007F'}


def test_the_store_of_ranks_without_mpi_too():
    port = free_port()
    place = launch_methods.Endpoint('127.0.0.1', port, 'job')
    store = rendezvous.open_store(place, is_host=True, seconds=5)
    assert listening_at(port) == ['0100007F']
    store.set('key', 'value')
    assert rendezvous.open_store(place, is_host=False, seconds=5).get('key') == b'value'


def stopped(*command):
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    process.send_signal(signal.SIGSTOP)
    eventually(lambda: lifeline._state_of(process.pid) == 'T')
    return process


def test_only_a_rank_of_ours_is_killed(monkeypatch):
    """Whatever the store says of the next rank."""
    line = object.__new__(lifeline.Lifeline)
    other = stopped(sys.executable, '-c', 'import time; time.sleep(60)')
    own = stopped(sys.executable, '-c', 'import time; time.sleep(60)')
    space = lifeline._process_space()
    for said in (other.pid, -other.pid, 0, 1, -1, str(other.pid), 1e400, None, [other.pid], 'x'):
        line.next_sign = json.dumps([said, 'host', space, 1])
        line._kill_next_rank_if_stopped()
    for sign in ('', 'x', '{}', '[]', '[1]', 'null', '[' * 5000):
        line.next_sign = sign
        assert line._place_of_next_rank() == (0, '', '')
        line._kill_next_rank_if_stopped()
    time.sleep(0.2)
    assert other.poll() is None and lifeline._state_of(other.pid) == 'T'
    line.next_sign = json.dumps([own.pid, 'host', space, 1])
    monkeypatch.setattr(lifeline, '_is_rank', lambda process: process == own.pid)
    line._kill_next_rank_if_stopped()
    assert own.wait(10) == -signal.SIGKILL
    other.kill()
    other.communicate()
    own.communicate()


def test_a_rank_is_known_by_its_command():
    assert lifeline._is_rank(os.getpid())
    assert not lifeline._is_rank(os.getppid())
    with pytest.raises(OSError):
        lifeline._is_rank(2**22 + secrets.randbelow(1000))


def test_a_route_that_is_none_is_a_line(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(rendezvous, 'ends', lambda address, port: ('127.0.0.1', '127.0.0.1'))
    place = launch_methods.Endpoint('127.0.0.1', 1, 'job')
    for said in ('x', '3', '[]', '[1]', '{"a": 1}'):
        store.set('route/1', said)
        with pytest.raises(lifeline.RankLost, match='rank 1 has not come'):
            rendezvous.choose_interface(store, place, 0, 2)
    store.set('route/1', '[true, [1, 2]]')
    rendezvous.choose_interface(store, place, 0, 2)
