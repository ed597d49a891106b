"""Server of the page, in a thread of its own."""

import asyncio
import contextlib
import io
import ipaddress
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError, os_errors_as
from lm_human_preferences.hparams.labelling_options import PUBLIC_URL, WebHParams
from lm_human_preferences.labels.folder import LabelFolder
from lm_human_preferences.labels.page.app import make_app, page_and_policy
from lm_human_preferences.labels.page.service import LabellingService
from lm_human_preferences.runs.run_files import TASK

ALL_ADDRESSES = ('0.0.0.0', '::')  # of this machine
MOST_CONNECTIONS = 200
MOST_HEADER_BYTES = 16 * 1024
GRACE_SECONDS = 3  # for replies that are under way when the server ends
HEADERS = {  # of every reply
    'Cache-Control': 'no-store',
    'Cross-Origin-Opener-Policy': 'same-origin',
    'Cross-Origin-Resource-Policy': 'same-origin',
    'Referrer-Policy': 'no-referrer',
    'X-Content-Type-Options': 'nosniff',
    'X-Frame-Options': 'DENY',
}


class LabelServer(contextlib.AbstractContextManager['LabelServer']):
    """Server of a folder's page, from when it is made until it is closed.

    links: {labeller: address, with a key that only this server accepts}.
    """

    summary = ''  # see LabellingService.summary; once it is closed

    def __init__(
        self,
        folder: str,
        labellers: Sequence[str],
        options: WebHParams,
        *,
        note: Callable[[str], None] = print,
    ) -> None:
        opened = LabelFolder(folder)
        self._error: BaseException | None = None
        self._ended = threading.Event()
        with contextlib.ExitStack() as stack:
            stack.enter_context(_locked(folder))
            self.service = LabellingService(opened, labellers, note)
            stack.enter_context(contextlib.closing(self.service))
            self._listener = storage.closed_after_fork(stack.enter_context(_listen(options)))
            self._start(options, {name: secrets.token_urlsafe(32) for name in labellers})
            self._stack = stack.pop_all()

    def _start(self, options: WebHParams, keys: dict[str, str]) -> None:
        name = socket.gethostname() if options.host in ALL_ADDRESSES else options.host
        name = f'[{name}]' if ':' in name else name
        self.port: int = self._listener.getsockname()[1]
        self.url = (options.public_url or f'http://{name}:{self.port}').rstrip('/')
        self.links = {labeller: f'{self.url}/#{key}' for labeller, key in keys.items()}
        hosts, path = ['127.0.0.1', name], ''
        if public := PUBLIC_URL.fullmatch(options.public_url or ''):
            _, host, _, path = public.groups('')
            hosts.append(host)
        html, policy = page_and_policy()
        app = make_app(
            html, self.service, keys, hosts, path.rstrip('/'), lambda: self._server.should_exit
        )
        self._server = uvicorn.Server(_config(app, policy))
        self._thread = threading.Thread(target=self._run, name='label server', daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            asyncio.run(self._server.serve(sockets=[self._listener]))
        except BaseException as e:
            self._error = e
        finally:
            self._ended.set()

    def wait(self, seconds: float | None = None) -> None:
        """Wait until the server has ended, for at most `seconds`; re-raises what ended it."""
        # Not by `join`, after whose interruption Python takes the thread for ended.
        self._ended.wait(seconds)
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Answer what has been asked, and end; what was acknowledged is on the disk."""
        self._server.should_exit = True
        self._thread.join()
        self.summary = self.summary or self.service.summary()
        self._stack.close()

    def __exit__(self, *_: object) -> None:
        self.close()


class FairProtocol(H11Protocol):
    """HTTP that closes the oldest connection when there are too many, so that nobody takes all."""

    begun = 0.0

    def connection_made(self, transport: Any) -> None:
        """Begin, and close the oldest connection if this is one too many."""
        self.begun = time.monotonic()
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            there = [each for each in self.connections if isinstance(each, FairProtocol)]
            still_open = [each for each in there if not each.transport.is_closing()]
            min(still_open, key=lambda each: each.begun).transport.abort()


def _locked(folder: str) -> io.FileIO:
    """Return task.json, locked until it is closed; UserError if another server has it."""
    path = os.path.join(folder, TASK)
    # Some shared disks lock for those only who may write.
    mode = 'rb+' if os.access(path, os.W_OK) else 'rb'
    with os_errors_as(f'{path} cannot be used'):
        try:
            return storage.open_locked(path, mode)
        except BlockingIOError:
            raise UserError(
                f'{folder} has a page already: name all labellers where it was started'
            ) from None


def is_local(host: str) -> bool:
    """Return whether nobody but this machine can reach a host."""
    if host == 'localhost':
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def missing_tls(options: WebHParams) -> str | None:
    """Return a warning if others can reach the host and nothing is encrypted."""
    host, is_encrypted = options.host, False
    if match := PUBLIC_URL.fullmatch(options.public_url or ''):
        is_encrypted = match[1] == 'https'
        host = match[2].strip('[]')
    if is_encrypted or is_local(host):
        return None
    return (
        f'warning: no TLS: whoever is between you and {options.public_url or host} can read the'
        f' links, and answer as anybody; leave {options.option_name("host")} out and use ssh -L,'
        f' or a proxy with TLS and {options.option_name("public_url")}'
    )


def _listen(options: WebHParams) -> socket.socket:
    """Return a socket that listens where `options` say; UserError if that cannot be."""
    host, port = options.host, options.port
    try:
        ((family, _, _, _, address), *_) = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as e:
        raise UserError(
            f'{options.option_name("host")} {host!r:.80} is not an address of this machine: {e}'
        ) from e
    try:
        both = host == '::' and socket.has_dualstack_ipv6()  # the name in links may be of IPv4
        listener = socket.create_server(
            address[:2], family=family, backlog=MOST_CONNECTIONS, dualstack_ipv6=both
        )
    except OSError as e:
        name = options.option_name('port')
        raise UserError(
            f'{name} {port}: {host} cannot be listened on: {e.strerror or e}; use another {name},'
            ' or 0 for any'
        ) from e
    # Connections inherit it. Without, the body of a reply would wait for the acknowledgement of
    # its head, which takes 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _config(app: Any, policy: str) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        headers=[*HEADERS.items(), ('Content-Security-Policy', policy)],
        http=FairProtocol,
        ws='none',
        lifespan='off',
        interface='asgi3',
        log_config=None,
        log_level='error',
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=MOST_HEADER_BYTES,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
