"""The page's server, in a thread of its own."""

from __future__ import annotations

import ipaddress
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from typing import Any

import uvicorn

from lm_human_preferences.errors import UserError
from lm_human_preferences.labels.folder import LabelFolder
from lm_human_preferences.labels.labeller import check_name
from lm_human_preferences.labels.page.access import Access, KeyFile
from lm_human_preferences.labels.page.app import make_app
from lm_human_preferences.labels.page.assignments import LEASE_SECONDS
from lm_human_preferences.labels.page.connections import TimedProtocol
from lm_human_preferences.labels.page.service import LabellingService

MOST_CONNECTIONS = 500
MOST_HEADER_BYTES = 16 * 1024
GRACE_SECONDS = 3  # for replies that are under way when the server ends


class LabelServer:
    """Serves a folder's page to its labellers from when it is made until it is closed.

    It runs in a thread and needs no torch, so that a command may wait for Ctrl-C meanwhile, and a
    training may train. links: {labeller: URL to be opened in a browser}; they stay valid for the
    next server of the folder. port: 0 for any that is free. certificate, key: files for TLS. note:
    is called with lines for who started it, from any thread. UserError for what cannot be served.
    """

    def __init__(
        self,
        folder: str,
        labellers: Sequence[str],
        *,
        host: str = '127.0.0.1',
        port: int = 8000,
        certificate: str | None = None,
        key: str | None = None,
        lease_seconds: float = LEASE_SECONDS,
        note: Callable[[str], None] = print,
    ) -> None:
        for name in labellers:
            check_name(name)
        opened = LabelFolder(folder)
        self._error: BaseException | None = None
        self._key_file = KeyFile(folder)
        try:
            for line in self._key_file.notes:
                note(line)
            self.service = LabellingService(opened, labellers, lease_seconds, note)
        except BaseException:
            self._key_file.close()
            raise
        try:
            self._listener = _listen(host, port)
            self._start(host, labellers, certificate, key)
        except BaseException:
            self._release()
            raise

    def _start(
        self, host: str, labellers: Sequence[str], certificate: str | None, key: str | None
    ) -> None:
        access = Access(self._key_file.key, labellers)
        scheme = 'http' if certificate is None else 'https'
        name = socket.gethostname() if is_wildcard(host) else host
        app = make_app(self.service, access, [_in_url(name)], scheme=scheme)
        self.port: int = self._listener.getsockname()[1]
        self.url = f'{scheme}://{_in_url(name)}:{self.port}'
        self.links = {name: f'{self.url}/#{access.token(name)}' for name in labellers}
        try:
            self._server = uvicorn.Server(_config(app, certificate, key))
            self._server.config.load()
        except OSError as e:  # ssl.SSLError, too
            reason = e.reason if isinstance(e, ssl.SSLError) else e.strerror
            self._listener.close()
            raise UserError(
                f'--web.certificate {certificate} with --web.key {key}: {reason or e}; both must be'
                ' PEM files that belong together'
            ) from e
        self._thread = threading.Thread(target=self._run, name='label server', daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._listener])
        except BaseException as e:
            self._error = e

    def wait(self, seconds: float | None = None) -> None:
        """Wait until the server has ended, at most so long; re-raises what ended it."""
        self._thread.join(seconds)
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Answer what has been asked, and end; what was acknowledged is on the disk."""
        self._server.should_exit = True
        self._thread.join()
        self._release()

    def _release(self) -> None:
        self.service.close()
        self._key_file.close()

    def __enter__(self) -> LabelServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_wildcard(host: str) -> bool:
    """Whether a host stands for all addresses of this machine."""
    return host in ('0.0.0.0', '::')


def is_local(host: str) -> bool:
    """Whether nobody but this machine can reach a host."""
    if host == 'localhost':
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def missing_tls(host: str, certificate: str | None, prefix: str) -> str | None:
    """A warning where others can reach a host and what is sent is not encrypted.

    prefix: what the names of the options begin with.
    """
    if certificate is not None or is_local(host):
        return None
    return (
        f'warning: there is no TLS: whoever is between you and {host} can read the links, and'
        f' answer as anybody; give {prefix}certificate and {prefix}key, or leave {prefix}host out'
        ' and use ssh -L'
    )


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens there; UserError if that cannot be."""
    try:
        ((family, _, _, _, address), *_) = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as e:
        raise UserError(f'--web.host {host!r:.80} is no address of this machine: {e}') from e
    try:
        listener = socket.create_server(address[:2], family=family, backlog=MOST_CONNECTIONS)
        # Connections inherit it. Without, the body of a reply would wait for the acknowledgement of
        # its head, which takes 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as e:
        raise UserError(
            f'--web.port {port}: {host} cannot be listened on: {e.strerror or e}; take another'
            ' --web.port, or 0 for any'
        ) from e


def _in_url(host: str) -> str:
    return f'[{host}]' if ':' in host else host


def _config(app: Any, certificate: str | None, key: str | None) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=TimedProtocol,
        loop='asyncio',
        ws='none',
        lifespan='off',
        interface='asgi3',
        log_config=None,
        log_level='error',
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=MOST_CONNECTIONS,
        h11_max_incomplete_event_size=MOST_HEADER_BYTES,
        timeout_graceful_shutdown=GRACE_SECONDS,
        ssl_certfile=certificate,
        ssl_keyfile=key,
    )
