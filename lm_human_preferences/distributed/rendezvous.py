"""Rendezvous of ranks: addresses of hosts, and the store that all ranks connect to."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import ipaddress
import json
import os
import secrets
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
LOOPBACK = ('127.0.0.1', 'localhost')
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


def check_network() -> None:
    """Raise UserError on a host without any network, where connecting is tried for ever."""
    if not interfaces():
        raise UserError(
            f'{socket.gethostname()} has no network by which ranks could meet, not even lo: `ip'
            ' link set lo up`, or use --mpi 1'
        )


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
    check_network()
    timeout = datetime.timedelta(seconds=seconds)
    if launch_methods.current().finds_store:
        seconds = min(seconds, TORCHRUN_STORE_SECONDS)
    from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

    try:
        is_alone = place.address in LOOPBACK
        connect_within = datetime.timedelta(seconds=seconds)
        store = _tcp_store(place, is_host=is_host, is_alone=is_alone, timeout=connect_within)
    except (OSError, RuntimeError, ValueError) as error:
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
    check_network()
    rank = world.Get_rank()
    # The prefix of the keys is a secret, as other users of these hosts may reach the store.
    place = Endpoint('127.0.0.1', 0, f'mpi-{secrets.token_hex(16)}')
    store = None
    listening = None
    if rank == 0:
        is_alone = node.Get_size() == world.Get_size()
        store = _tcp_store(place, is_host=True, is_alone=is_alone)
        listening = place.job, store.port, list(interfaces())
    job, port, addresses = world.bcast(listening)
    place = place._replace(port=port, job=job)
    failure = None
    if node.bcast(rank) != 0:
        try:
            place = place._replace(address=reachable(addresses, port))
        except UserError as error:
            failure = str(error)
    failures = world.allgather(failure)
    if any(failures):
        raise UserError(next(filter(None, failures)))
    from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

    own = PrefixStore(place.job, store or _tcp_store(place, is_host=False, is_alone=False))
    choose_interface(own, place, rank, world.Get_size())
    return own, place


def _tcp_store(place: Endpoint, *, is_host: bool, is_alone: bool, **options: Any) -> TCPStore:
    """Return a connection to the store. is_host: keep it, is_alone: for ranks of this host only."""
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    port = place.port
    if is_host and is_alone:  # torch itself would listen to all networks
        listener = socket.create_server((place.address, port))
        port = listener.getsockname()[1]
        options['master_listen_fd'] = listener.detach()
    return TCPStore(place.address, port, is_master=is_host, wait_for_workers=False, **options)


def choose_interface(store: Store, place: Endpoint, rank: int, size: int) -> None:
    """Let Gloo use the interface to the other ranks; RankLost if a rank is missing."""
    own, peer = ends(place.address, place.port)
    is_remote = own != peer
    store.set(f'route/{rank}', json.dumps([is_remote, peer]))
    routes = []
    for each in range(size):
        try:
            is_remote_there, peer_there = json.loads(store.get(f'route/{each}'))
            routes.append((is_remote_there, str(peer_there)))
        except (RuntimeError, TypeError, ValueError) as error:
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
