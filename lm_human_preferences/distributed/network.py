"""Addresses by which hosts find each other where their names do not resolve."""

import contextlib
import fcntl
import socket
from collections.abc import Sequence

from lm_human_preferences.errors import UserError

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
_CONNECT_TIMEOUT_SECONDS = 5


def interfaces() -> dict[str, str]:
    """This host's network interfaces with an IPv4 address, loopback included: {address: name}."""
    names = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no IPv4 address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, name.encode().ljust(256, b'\0'))
                names[socket.inet_ntoa(answer[20:24])] = name
    return names


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
            socket.create_connection((address, port), _CONNECT_TIMEOUT_SECONDS) as connection,
        ):
            return address, connection.getsockname()[0]
    raise UserError(
        f'{socket.gethostname()} does not reach the first host of this run, TCP port {port} of '
        f'{" or ".join(addresses)}: open the network between them, or take --run.allreduce mpi'
    )
