"""Connection of all ranks of a job through a key-value store, which they find by MPI or TCP."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import re
import secrets
import socket
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lm_human_preferences.distributed import launch_methods
from lm_human_preferences.distributed.launch_methods import Endpoint, Family, Launch
from lm_human_preferences.errors import UserError

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

LOOPBACK = '127.0.0.1'
CONNECT_SECONDS = 5  # timeout in seconds for a connection to an address of rank 0's host
_POLL_SECONDS = 0.05
STORE_SECONDS = 2  # seconds without an answer after which the ranks' store counts as stopped
_SIOCGIFADDR = 0x8915  # Linux's ioctl request for the IPv4 address of a network interface

_store: Store | None = None  # the key-value store that connects this rank to the others


class RankLost(Exception):
    """Another rank has ended, is stopped, or did not connect in time."""


class AllStopped(KeyboardInterrupt):
    """Interruption of the job on all ranks by a signal, raised once all agree to stop."""


def meet(seconds: int) -> Store:
    """Return the key-value store once all ranks are connected to it; RankLost after `seconds`."""
    global _store
    end = time.monotonic() + seconds
    launch = launch_methods.current()
    listener = None
    if launch.family is not None:
        place, listener = _meet_over_mpi(launch, launch.family)
    else:
        place = launch_methods.endpoint()
        torchrun_has_store = os.environ.get('TORCHELASTIC_USE_AGENT_STORE') == 'True'
        if launch.rank == 0 and not torchrun_has_store:
            listener = listen(place)
    _store = open_store(place, listener, seconds)
    choose_interface(_store, place, launch, end - time.monotonic())
    return _store


def is_reporter(*, is_lost: bool) -> bool:
    """Return whether this rank, and no other, is to report its error.

    is_lost: whether the error is that another rank is lost.
    """
    if _store is None:
        return launch_methods.local_rank() == 0  # unconnected ranks all fail with the same error
    own = str(launch_methods.current().rank)
    first = ThreadPoolExecutor(1).submit(_store.compare_set, 'failed', '', own)
    try:
        return first.result(STORE_SECONDS).decode() == own
    except TimeoutError:  # rank 0, which serves the store, is stopped
        return True
    except RuntimeError:  # rank 0 has ended; it or its launcher has reported why
        return not is_lost


def _meet_over_mpi(launch: Launch, family: Family) -> tuple[Endpoint, socket.socket | None]:
    """Broadcast the store's address by MPI; return it, and rank 0's listening socket."""
    mpi = load_mpi(family)
    _unlink_shared_memory()
    world = mpi.COMM_WORLD
    if world.Get_size() != launch.size:
        raise UserError(
            f'{launch.size} ranks were started, but mpi4py finds {world.Get_size()}, as it uses'
            f' another MPI than {family.name}: unset MPI4PY_LIBMPI and MPI4PY_MPIABI'
        )
    is_one_host = world.Split_type(mpi.COMM_TYPE_SHARED).Get_size() == launch.size
    listener = None
    message = bytearray(1 << 16)
    if launch.rank == 0:
        listener = socket.create_server((LOOPBACK if is_one_host else '', 0))
        # Other users of these hosts may reach the store, so its keys begin with a random secret.
        found = secrets.token_hex(16), listener.getsockname()[1], list(interfaces())
        message[:] = json.dumps(found).encode().ljust(len(message))
    world.Bcast(message)  # Bcast sends raw bytes; bcast, in lower case, would pickle an object
    job, port, addresses = json.loads(message)
    return Endpoint(reachable(addresses, port), port, job), listener


def load_mpi(family: Family) -> ModuleType:
    """Import mpi4py.MPI with a library of `family`, unless the user has named another library.

    By default mpi4py loads the first library that it finds. If that is of another family than the
    launcher's, a rank sees a world of one rank, or MPI ends the rank.
    """
    os.environ.setdefault('MPI4PY_LIBMPI', os.pathsep.join(_libraries(family.soname)))
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as e:
        raise UserError(
            f'{family.name} started these ranks, but mpi4py cannot load {family.soname}'
            f' ({" ".join(str(e).split())}): set MPI4PY_LIBMPI=/path/to/{family.soname}, or'
            ' start the ranks with the MPICH that `sh tools/setup.sh` installs, or with torchrun'
        ) from e
    return MPI


def _libraries(soname: str) -> list[str]:
    """Return a library's paths near the launcher and in this environment, then `soname` alone."""
    prefixes = [Path(sys.prefix)]
    with contextlib.suppress(OSError):  # the launcher may belong to another user
        prefixes.insert(0, Path(os.readlink(f'/proc/{os.getppid()}/exe')).parents[1])
    folders = ('lib', 'lib64', f'lib/{sysconfig.get_config_var("MULTIARCH")}')
    paths = [prefix / folder / soname for prefix in prefixes for folder in folders]
    return [*(str(path) for path in paths if path.exists()), soname]


def _unlink_shared_memory() -> None:
    """Unlink MPICH's shared memory once all ranks have opened it, so that kills leave no files."""
    maps = Path('/proc/self/maps').read_text()
    for path in set(re.findall(r'/dev/shm/mpich_\S+$', maps, re.MULTILINE)):
        Path(path).unlink(missing_ok=True)


def leave_mpi() -> None:
    """Finalise MPI if this process has loaded it."""
    mpi = sys.modules.get('mpi4py.MPI')
    if mpi is not None:
        mpi.Finalize()


def listen(place: Endpoint) -> socket.socket:
    """Return a socket that listens at the store's address; UserError if that fails."""
    is_one_host = place.address in (LOOPBACK, 'localhost')
    try:
        return socket.create_server((LOOPBACK if is_one_host else '', place.port))
    except OSError as error:
        raise UserError(
            f'rank 0 cannot listen at {place.address}, TCP port {place.port} ({error.args[-1]}):'
            " set MASTER_PORT to a free port, and MASTER_ADDR to rank 0's host name, for all ranks"
        ) from error


def open_store(place: Endpoint, listener: socket.socket | None, seconds: int) -> Store:
    """Return the ranks' key-value store; another rank serves the store if `listener` is None."""
    import torch.distributed

    dist: Any = torch.distributed
    options: dict[str, Any] = {'timeout': datetime.timedelta(seconds=seconds)}
    if listener is not None:
        options.update(is_master=True, master_listen_fd=listener.detach())
    elif not _wait(lambda: _answers(place.address, place.port), seconds):
        raise RankLost(
            f'nothing answers at {place.address}, TCP port {place.port} within {seconds} s:'
            ' MASTER_ADDR and MASTER_PORT must name the host of rank 0 and a free port there'
            ' (with torchrun, give --local-addr on that host)'
        )
    store = dist.TCPStore(place.address, place.port, wait_for_workers=False, **options)
    return dist.PrefixStore(place.job, store)


def _wait(is_there: Callable[[], bool], seconds: float) -> bool:
    """Wait until `is_there()` is true; return False after `seconds`. Signals can interrupt it."""
    end = time.monotonic() + seconds
    while not is_there():
        if time.monotonic() > end:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def choose_interface(store: Store, place: Endpoint, launch: Launch, seconds: float) -> None:
    """Wait for all ranks, and make Gloo use the network interface that reaches them."""
    here, own = interfaces(), _address_towards(place.address)
    keys = [f'address of rank {rank}' for rank in range(launch.size)]
    store.set(keys[launch.rank], own)
    if not _wait(lambda: store.check(keys), seconds):
        raise RankLost(f'not all {launch.size} ranks have connected; see --run.allreduce_timeout')
    for key in keys:
        address = store.get(key).decode()
        if address not in here:  # on rank 0's host, choose the interface towards another host
            own = _address_towards(address)
            break
    if own in here:
        os.environ.setdefault('GLOO_SOCKET_IFNAME', here[own])


def _address_towards(address: str) -> str:
    """Return this host's own IPv4 address on the route to `address`; '' if there is no route."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 1))  # connecting a UDP socket sends nothing
        return probe.getsockname()[0]
    return ''


def interfaces() -> dict[str, str]:
    """Return {IPv4 address: interface name} of this host."""
    names = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # the interface has no IPv4 address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, name.encode().ljust(256, b'\0'))
                names[socket.inet_ntoa(answer[20:24])] = name
    return names


def reachable(addresses: Sequence[str], port: int) -> str:
    """Return the first of rank 0's addresses that accepts connections; UserError if none does."""
    own = interfaces()
    # An address that rank 0 and this host both have, such as docker0's, leads back to this host.
    foreign = [address for address in addresses if address not in own]
    for address in foreign or addresses:
        if _answers(address, port):
            return address
    raise UserError(
        f'{socket.gethostname()} does not reach the first host of this run, TCP port {port} of '
        f'{" or ".join(addresses)}: open the network between them'
    )
