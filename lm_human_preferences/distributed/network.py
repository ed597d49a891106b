"""Addresses by which hosts find each other where their names are no help."""

import contextlib
import fcntl
import socket
from collections.abc import Sequence

from lm_human_preferences.errors import UserError

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
_PATIENCE = 5  # seconds for an address to answer


def interfaces() -> dict[str, str]:
    """This host's network interfaces that have an IPv4 address: {address: name}, the loopback among
    them."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, name.encode().ljust(256, b'\0'))
                found[socket.inet_ntoa(answer[20:24])] = name
    return found


def route(addresses: Sequence[str], port: int) -> tuple[str, str]:
    """(the first of another host's `addresses` that answers at TCP `port`, this host's own address
    on the way there).

    Addresses that this host has too, such as the loopback's or a container bridge's, lead nowhere.
    UserError if none answers.
    """
    for address in [address for address in addresses if address not in interfaces()]:
        with (
            contextlib.suppress(OSError),
            socket.create_connection((address, port), _PATIENCE) as connection,
        ):
            return address, connection.getsockname()[0]
    raise UserError(
        f'{socket.gethostname()} does not reach the first host of this run, TCP port {port} of '
        f'{" or ".join(addresses)}: open the network between them, or take --run.allreduce mpi'
    )
