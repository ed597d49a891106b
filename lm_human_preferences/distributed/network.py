"""How ranks find each other: addresses of hosts, and the store that all ranks are connected to.

With MPI rank 0 keeps the store, and MPI tells where it is. torchrun says where it is, and keeps it
itself. Under an srun without MPI rank 0 keeps it, on the first host.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import ipaddress
import json
import os
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from lm_human_preferences.distributed import launch_methods
from lm_human_preferences.distributed.launch_methods import Endpoint
from lm_human_preferences.distributed.lifeline import RankLost
from lm_human_preferences.distributed.waiting import CONNECT_SECONDS, TORCHRUN_STORE_SECONDS
from lm_human_preferences.errors import UserError

if TYPE_CHECKING:
    from torch.distributed import (
        Store,  # pyright: ignore[reportPrivateImportUsage]
        TCPStore,  # pyright: ignore[reportPrivateImportUsage]
    )

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface

T = TypeVar('T')


def interfaces() -> dict[str, str]:
    """This host's network interfaces with an IPv4 address, loopback included: {address: name}."""
    names = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no IPv4 address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, name.encode().ljust(256, b'\0'))
                names[socket.inet_ntoa(answer[20:24])] = name
    return names


def ends(address: str, port: int) -> tuple[str, str]:
    """The addresses at both ends of a connection to another process: (this host's own, the other).

    They are equal where both processes are on this host. OSError where nothing listens.
    """
    with socket.create_connection((address, port), CONNECT_SECONDS) as connection:
        own = connection.getsockname()[0]
        peer = connection.getpeername()[0]
    is_here = ipaddress.ip_address(peer).is_loopback or peer in interfaces()
    return (peer, peer) if is_here else (own, peer)


def route(addresses: Sequence[str], port: int) -> tuple[str, str]:
    """How to reach another host: (its first address that answers, this host's own on the way).

    addresses: all that the other host has; it listens at TCP `port`. Those that this host has too,
    such as the loopback's or a container bridge's, lead nowhere. UserError if none answers.
    """
    own = interfaces()
    for address in addresses:
        if address in own:
            continue
        with (
            contextlib.suppress(OSError),
            socket.create_connection((address, port), CONNECT_SECONDS) as connection,
        ):
            return address, connection.getsockname()[0]
    raise UserError(
        f'{socket.gethostname()} does not reach the first host of this run, TCP port {port} of '
        f'{" or ".join(addresses)}: open the network between them, or take --run.allreduce mpi'
    )


def open_store(place: Endpoint, *, is_host: bool, seconds: int) -> Store:
    """A connection to the store of this job, which this process keeps itself if `is_host`.

    It waits for what is not there yet for so many seconds. UserError if the port is taken; RankLost
    if nothing answers there for so long, or for a minute where torchrun has made the store before.
    """
    timeout = datetime.timedelta(seconds=seconds)
    if launch_methods.current().finds_store:
        seconds = min(seconds, TORCHRUN_STORE_SECONDS)
    from torch.distributed import (
        PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
        TCPStore,  # pyright: ignore[reportPrivateImportUsage]
    )

    try:
        store = TCPStore(
            place.address,
            place.port,
            is_master=is_host,
            timeout=datetime.timedelta(seconds=seconds),
            wait_for_workers=False,
        )
    except (RuntimeError, ValueError) as error:
        where = f'{place.address}, TCP port {place.port}'
        if is_host:
            reason = str(error).splitlines()[0]
            raise UserError(
                f'rank 0 cannot listen at {where} ({reason}): set MASTER_PORT to a free port, and'
                " MASTER_ADDR to its host's name, for all ranks"
            ) from error
        raise RankLost(
            f'nothing answers at {where} within {seconds} s, where rank 0 should be: MASTER_ADDR'
            ' and MASTER_PORT must name its host and a free port there; torchrun sets them to what'
            ' its option --local-addr says on the first host, or to the name of that host'
        ) from error
    store.set_timeout(timeout)
    return PrefixStore(place.job, store)


class MpiRanks(Protocol):
    """What ranks that MPI connects have to say of themselves, see `comm.MpiComm`.

    world, node: mpi4py's communicators of all ranks, and of those on this host.
    """

    rank: int
    size: int
    local_size: int
    world: Any
    node: Any

    def meet(self) -> tuple[Store, Endpoint]:
        """What `meet_over_mpi` returned, which is called once."""
        ...

    def all_gather_object(self, value: T) -> list[T]:
        """`value` of every rank, in the order of ranks."""
        ...


def meet_over_mpi(comm: MpiRanks) -> tuple[Store, Endpoint]:
    """A store on rank 0 that all ranks are connected to, and where it is.

    Gloo is told to use the network interface of that connection. UserError, on all ranks alike, if
    a host does not reach rank 0's.
    """
    own_address = '127.0.0.1'
    place = Endpoint(own_address, 0, 'mpi')
    store = None
    listening = None
    if comm.rank == 0:
        store = _tcp_store(place, is_master=True)
        listening = store.port, list(interfaces())
    port, addresses = comm.world.bcast(listening)
    place = place._replace(port=port)
    if comm.local_size < comm.size:
        is_first_host = comm.node.bcast(comm.rank) == 0
        found, failure = None, None
        try:
            found = None if is_first_host else route(addresses, port)
        except UserError as error:
            failure = str(error)
        routes, failures = zip(*comm.world.allgather((found, failure)), strict=True)
        if any(failures):
            raise UserError(next(filter(None, failures)))
        if found is None:
            # Rank 0's host: other hosts reach it at the address that the first of them found.
            own_address = next(each[0] for each in routes if each is not None)
        else:
            place = place._replace(address=found[0])
            own_address = found[1]
    use_interface(own_address)
    return store or _tcp_store(place), place


def _tcp_store(place: Endpoint, *, is_master: bool = False) -> TCPStore:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    return TCPStore(place.address, place.port, is_master=is_master, wait_for_workers=False)


def choose_interface(store: Store, place: Endpoint, rank: int, size: int) -> None:
    """Let Gloo use the network interface by which this rank reaches the others.

    RankLost if one does not come.
    """
    own, peer = ends(place.address, place.port)
    is_remote = own != peer
    store.set(f'route/{rank}', json.dumps([is_remote, peer]))
    routes = []
    for each in range(size):
        try:
            routes.append(json.loads(store.get(f'route/{each}')))
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise RankLost(f'rank {each} has not come: {reason}') from error
    if not is_remote:
        # The store's host: others reach it at the address that the first of them found.
        own = next((peer for is_remote, peer in routes if is_remote), '127.0.0.1')
    use_interface(own)


def use_interface(address: str) -> None:
    """Let Gloo use the interface with this address of this host's, unless the user names another.

    Where no interface has it, Gloo resolves the name of the host.
    """
    interface = interfaces().get(address)
    if interface:
        os.environ.setdefault('GLOO_SOCKET_IFNAME', interface)


def host_identity() -> str:
    """Names this host, as no other that takes part does."""
    with open('/proc/sys/kernel/random/boot_id', encoding='ascii') as boot_id:
        return f'{socket.gethostname()} {boot_id.read().strip()}'
