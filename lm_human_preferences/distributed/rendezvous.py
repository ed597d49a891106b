"""Rendezvous of ranks: addresses of hosts, and the store that all ranks connect to."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import ipaddress
import json
import os
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

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


def interfaces() -> dict[str, str]:
    """Return this host's interfaces that have an IPv4 address: {address: name}."""
    names = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no IPv4 address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, name.encode().ljust(256, b'\0'))
                names[socket.inet_ntoa(answer[20:24])] = name
    return names


def ends(address: str, port: int) -> tuple[str, str]:
    """Return (own address, peer's) of a connection, equal on the same host; OSError if refused."""
    with socket.create_connection((address, port), CONNECT_SECONDS) as connection:
        own = connection.getsockname()[0]
        peer = connection.getpeername()[0]
    is_here = ipaddress.ip_address(peer).is_loopback or peer in interfaces()
    return (peer, peer) if is_here else (own, peer)


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
        f'{" or ".join(addresses)}: open the network between them, or use --run.allreduce mpi'
    )


def open_store(place: Endpoint, *, is_host: bool, seconds: int) -> Store:
    """Connect to the job's store; UserError if the port is taken, RankLost without answer."""
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


def meet_over_mpi(world: Any, node: Any) -> tuple[Store, Endpoint]:
    """Return a store on rank 0, and its endpoint; UserError on all ranks if unreachable."""
    rank = world.Get_rank()
    place = Endpoint('127.0.0.1', 0, 'mpi')
    store = None
    listening = None
    if rank == 0:
        store = _tcp_store(place, is_master=True)
        listening = store.port, list(interfaces())
    port, addresses = world.bcast(listening)
    place = place._replace(port=port)
    failure = None
    if node.bcast(rank) != 0:
        try:
            place = place._replace(address=reachable(addresses, port))
        except UserError as error:
            failure = str(error)
    failures = world.allgather(failure)
    if any(failures):
        raise UserError(next(filter(None, failures)))
    store = store or _tcp_store(place)
    choose_interface(store, place, rank, world.Get_size())
    return store, place


def _tcp_store(place: Endpoint, *, is_master: bool = False) -> TCPStore:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    return TCPStore(place.address, place.port, is_master=is_master, wait_for_workers=False)


def choose_interface(store: Store, place: Endpoint, rank: int, size: int) -> None:
    """Let Gloo use the interface to the other ranks; RankLost if a rank is missing."""
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
    interface = interfaces().get(own)
    if interface:
        os.environ.setdefault('GLOO_SOCKET_IFNAME', interface)


def host_identity() -> str:
    """Return a text that differs between the hosts that take part."""
    with open('/proc/sys/kernel/random/boot_id', encoding='ascii') as boot_id:
        return f'{socket.gethostname()} {boot_id.read().strip()}'
