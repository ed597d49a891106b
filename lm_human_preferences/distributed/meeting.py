"""Meeting of ranks at a store: its address, the network to it, and which rank reports an error."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_human_preferences.distributed import launch_methods, mpi_library
from lm_human_preferences.distributed.launch_methods import Endpoint, Family, Launch
from lm_human_preferences.errors import UserError

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

LOOPBACK = '127.0.0.1'
# How long an attempt to reach the store may take, after which comes another one.
CONNECT_SECONDS = 5
# How long a rank that is about to end waits for the store, and for another one's report, which
# may have to look at the run's files first.
LAST_WORD_SECONDS = 2
REPORT_SECONDS = 5
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface

_store: Store | None = None  # at which this rank has met the others


class RankLost(Exception):
    """Error: another rank is gone, is stopped, or has not come in time."""


class AllStopped(KeyboardInterrupt):
    """A signal has ended the job on all ranks, which have met since."""


def meet(seconds: int) -> Store:
    """Return the store that all ranks have reached; UserError, or RankLost after `seconds`."""
    global _store
    launch = launch_methods.current()
    listener = None
    if launch.family is not None:
        place, listener = _meet_over_mpi(launch, launch.family)
    else:
        place = launch_methods.endpoint()
        if launch.rank == 0 and not launch.finds_store:
            listener = listen(place)
    store = open_store(place, listener, seconds)
    choose_interface(store, place, launch)
    _store = store
    return store


def is_reporter(*, is_lost: bool) -> bool:
    """Return whether this rank reports its error, for all: the first in the store does.

    is_lost: the error is that another rank is lost. If the store is lost with rank 0, that one has
    reported its own error, or its launcher tells why it ended. If the store does not answer in
    time, this rank reports.
    """
    launch = launch_methods.current()
    if _store is None:
        return launch.is_first_on_host  # before ranks meet, they have the same error
    own = str(launch.rank)
    try:
        return _ask(LAST_WORD_SECONDS, _store.compare_set, 'failed', '', own).decode() == own
    except TimeoutError:
        return True
    except RuntimeError:
        return not is_lost


def await_report(*, is_reporter: bool) -> None:
    """Return when the reporter has printed what it reports, of which it tells the others here."""
    if _store is None:
        time.sleep(0 if is_reporter else LAST_WORD_SECONDS)
        return
    with contextlib.suppress(TimeoutError, RuntimeError):
        if is_reporter:
            _ask(LAST_WORD_SECONDS, _store.set, 'reported', '')
        else:
            _ask(REPORT_SECONDS, _store.wait, ['reported'])


def _ask(seconds: float, question: Callable[..., Any], *arguments: Any) -> Any:
    """Return a store's answer; TimeoutError without one, as of a store that is stopped."""
    return ThreadPoolExecutor(1).submit(question, *arguments).result(seconds)


def _meet_over_mpi(launch: Launch, family: Family) -> tuple[Endpoint, socket.socket | None]:
    """Return the store's address, which MPI brings from rank 0, and there also its listener."""
    mpi = mpi_library.load_mpi(family)
    _unlink_shared_memory()
    world = mpi.COMM_WORLD
    if world.Get_size() != launch.size:
        raise UserError(
            f'{launch.size} ranks were started, but each sees a world of {world.Get_size()}: they'
            f' load another MPI than that of their launcher, {family.name}: unset'
            ' MPI4PY_LIBMPI and MPI4PY_MPIABI'
        )
    node = world.Split_type(mpi.COMM_TYPE_SHARED)
    listener = None
    message = bytearray(1 << 16)
    if launch.rank == 0:
        is_alone = node.Get_size() == world.Get_size()
        listener = socket.create_server((LOOPBACK if is_alone else '', 0))
        # The prefix of the keys is a secret, as other users of these hosts may reach the store.
        job = f'mpi-{secrets.token_hex(16)}'
        found = [job, listener.getsockname()[1], list(interfaces())]
        message[:] = json.dumps(found).encode().ljust(len(message))
    world.Bcast(message)  # no object, which would be a pickle
    job, port, addresses = json.loads(message)
    is_first_host = bytearray([launch.rank == 0])
    node.Bcast(is_first_host)
    address = LOOPBACK if is_first_host[0] else reachable(addresses, port)
    return Endpoint(address, port, job), listener


def _unlink_shared_memory() -> None:
    """Unlink MPICH's shared memory, which all ranks have open: killed ranks leave none behind."""
    maps = Path('/proc/self/maps').read_text()
    for path in set(re.findall(r'/dev/shm/mpich_\S+$', maps, re.MULTILINE)):
        Path(path).unlink(missing_ok=True)


def listen(place: Endpoint) -> socket.socket:
    """Listen where the store will be; UserError if the port is taken."""
    # For this host alone, if all ranks are here.
    address = LOOPBACK if place.address in (LOOPBACK, 'localhost') else ''
    try:
        return socket.create_server((address, place.port))
    except OSError as error:
        raise UserError(
            f'rank 0 cannot listen at {place.address}, TCP port {place.port} ({error.strerror}):'
            " set MASTER_PORT to a free port, and MASTER_ADDR to its host's name, for all ranks"
        ) from error


def open_store(place: Endpoint, listener: socket.socket | None, seconds: int) -> Store:
    """Connect to the store, which this process keeps if it has the `listener`; or RankLost."""
    from torch.distributed import (
        PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
        TCPStore,  # pyright: ignore[reportPrivateImportUsage]
    )

    options: dict[str, Any] = {'wait_for_workers': False}
    if listener is not None:
        options.update(is_master=True, master_listen_fd=listener.detach())
    timeout = datetime.timedelta(seconds=seconds)
    try:
        store = TCPStore(place.address, place.port, timeout=timeout, **options)
    except (OSError, RuntimeError, ValueError) as error:
        raise RankLost(
            f'nothing answers at {place.address}, TCP port {place.port} within {seconds} s, where'
            ' rank 0 should be: MASTER_ADDR and MASTER_PORT must name its host and a free port'
            ' there; torchrun sets them to what its option --local-addr says on the first host, or'
            ' to the name of that host'
        ) from error
    return PrefixStore(place.job, store)


def choose_interface(store: Store, place: Endpoint, launch: Launch) -> None:
    """Let Gloo use the interface to the other ranks; RankLost if a rank is missing."""
    own = _address_towards(place.address)
    store.set(f'address/{launch.rank}', own)
    here = interfaces()
    for rank in range(launch.size):
        try:
            address = store.get(f'address/{rank}').decode(errors='replace')
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise RankLost(f'rank {rank} has not come: {reason}') from error
        if address not in here:  # the store's host does not see the way to others by its own
            own = _address_towards(address)
            break
    if own in here:
        os.environ.setdefault('GLOO_SOCKET_IFNAME', here[own])


def _address_towards(address: str) -> str:
    """Return the IPv4 address of this host on the way to another; '' if there is no way."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 1))  # which sends nothing
        return probe.getsockname()[0]
    return ''


def interfaces() -> dict[str, str]:
    """Return this host's interfaces that have an IPv4 address: {address: name}."""
    names = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no IPv4 address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, name.encode().ljust(256, b'\0'))
                names[socket.inet_ntoa(answer[20:24])] = name
    return names


def reachable(addresses: Sequence[str], port: int) -> str:
    """Return the first of another host's `addresses` that answers; UserError if none."""
    own = interfaces()
    for address in addresses:
        if address in own:  # such as a container bridge's: it leads nowhere
            continue
        with (
            contextlib.suppress(OSError),
            socket.create_connection((address, port), CONNECT_SECONDS),
        ):
            return address
    raise UserError(
        f'{socket.gethostname()} does not reach the first host of this run, TCP port {port} of '
        f'{" or ".join(addresses)}: open the network between them'
    )
