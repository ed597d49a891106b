"""Server of the page, in a thread of its own."""

import asyncio
import collections
import contextlib
import io
import ipaddress
import os
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError, os_errors_as
from lm_human_preferences.hparams.labelling_options import PUBLIC_URL, WebHParams
from lm_human_preferences.labels.folder import LabelFolder
from lm_human_preferences.labels.page.app import HEADERS, make_app, page_and_policy
from lm_human_preferences.labels.page.key import Access, folder_key
from lm_human_preferences.labels.page.service import LabellingService
from lm_human_preferences.runs.run_files import TASK

ALL_ADDRESSES = ('0.0.0.0', '::')  # of this machine
MOST_CONNECTIONS = 500
MOST_OF_ADDRESS = 250  # of these; all who come through ssh have one
MOST_HEADER_BYTES = 16 * 1024
GRACE_SECONDS = 3  # for replies that are under way when the server ends
REQUEST_SECONDS = 15.0  # from the beginning of a connection, or the reply before, to a request


class LabelServer(contextlib.AbstractContextManager['LabelServer']):
    """Server of a folder's page, from when it is made until it is closed."""

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
        with contextlib.ExitStack() as stack:
            stack.enter_context(_locked(folder))
            secret = folder_key(folder)
            for line in secret.notes:
                note(line)
            self.service = LabellingService(opened, labellers, secret, note)
            stack.enter_context(contextlib.closing(self.service))
            self._listener = storage.closed_after_fork(stack.enter_context(_listen(options)))
            self._start(options, Access(secret, labellers))
            self._stack = stack.pop_all()

    def _start(self, options: WebHParams, access: Access) -> None:
        scheme = 'http' if options.certificate is None else 'https'
        name = socket.gethostname() if options.host in ALL_ADDRESSES else options.host
        self.port: int = self._listener.getsockname()[1]
        own_url = f'{scheme}://{_in_url(name)}:{self.port}'
        self.url = (options.public_url or own_url).rstrip('/')
        self.links = {name: f'{self.url}/#{access.code("link", name)}' for name in access.labellers}
        html, policy = page_and_policy()
        app = make_app(
            html,
            self.service,
            access,
            [_in_url(name)],
            lambda: self._server.should_exit,
            scheme=scheme,
            public_url=options.public_url,
        )
        try:
            self._server = uvicorn.Server(_config(app, policy, options))
            self._server.config.load()
        except OSError as e:  # ssl.SSLError, too
            reason = e.reason if isinstance(e, ssl.SSLError) else e.strerror
            certificate, key = options.setting('certificate'), options.setting('key')
            raise UserError(
                f'{certificate} with {key}: {reason or e}; both must be PEM files that belong'
                ' together'
            ) from e
        self._thread = threading.Thread(target=self._run, name='label server', daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            asyncio.run(self._server.serve(sockets=[self._listener]))
        except BaseException as e:
            self._error = e

    def wait(self, seconds: float | None = None) -> None:
        """Wait until the server has ended, for at most `seconds`; re-raises what ended it."""
        self._thread.join(seconds)
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


class TimedProtocol(H11Protocol):
    """HTTP that also limits the time for a request; uvicorn limits that between two only."""

    _deadline: asyncio.TimerHandle | None = None
    _of_address: ClassVar[collections.Counter[str]] = collections.Counter()  # {address: open ones}
    _address = ''

    def connection_made(self, transport: Any) -> None:
        """Begin, or close at once the connection of an address that has too many."""
        super().connection_made(transport)
        self._address = str((transport.get_extra_info('peername') or [''])[0])
        self._of_address[self._address] += 1
        if self._of_address[self._address] > MOST_OF_ADDRESS:
            transport.abort()
        self._start()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the time for a request, and count the connection no more."""
        self._of_address[self._address] -= 1
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._start()

    def _start(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(REQUEST_SECONDS, self._end)

    def _end(self) -> None:
        """Close the connection, unless a request is being answered to somebody who reads."""
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if is_answering and not self.transport.get_write_buffer_size():
            self._start()
        else:
            self.transport.abort()


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
    host, is_encrypted = options.host, options.certificate is not None
    if match := PUBLIC_URL.fullmatch(options.public_url or ''):
        is_encrypted = is_encrypted or match[1] == 'https'
        host = match[2].strip('[]')
    if is_encrypted or is_local(host):
        return None
    certificate, key = options.option_name('certificate'), options.option_name('key')
    return (
        f'warning: no TLS: whoever is between you and'
        f' {options.public_url or host} can read the links,'
        f' and answer as anybody; give {certificate} and {key}, or leave'
        f' {options.option_name("host")} out and use ssh -L'
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


def _in_url(host: str) -> str:
    return f'[{host}]' if ':' in host else host


def _config(app: Any, policy: str, options: WebHParams) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        headers=[*HEADERS.items(), ('Content-Security-Policy', policy)],
        http=TimedProtocol,
        ws='none',
        lifespan='off',
        interface='asgi3',
        log_config=None,
        log_level='error',
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=MOST_CONNECTIONS,
        backlog=MOST_CONNECTIONS,
        h11_max_incomplete_event_size=MOST_HEADER_BYTES,
        timeout_graceful_shutdown=GRACE_SECONDS,
        ssl_certfile=options.certificate,
        ssl_keyfile=options.key,
    )
