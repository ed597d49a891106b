"""Server of the page, in a thread of its own."""

import asyncio
import contextlib
import ipaddress
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.labelling_options import PUBLIC_URL, WebHParams
from lm_human_preferences.labels.folder import LabelFolder
from lm_human_preferences.labels.page.app import make_app, page_and_policy
from lm_human_preferences.labels.page.service import LabellingService

ALL_ADDRESSES = ('0.0.0.0', '::')  # any address of this machine
MOST_CONNECTIONS = 200
MOST_HEADER_BYTES = 16 * 1024
GRACE_SECONDS = 3  # seconds for open replies when the server ends
HEADERS = {  # headers of every reply
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
        _, public_host, _, path = _public_url(options) or ('', name, '', '')
        hosts = ['127.0.0.1', name, public_host]
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
        """Accept a connection; close the oldest one if there are too many."""
        self.begun = time.monotonic()
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            there = [each for each in self.connections if isinstance(each, FairProtocol)]
            still_open = [each for each in there if not each.transport.is_closing()]
            min(still_open, key=lambda each: each.begun).transport.abort()


def missing_tls(options: WebHParams) -> str | None:
    """Return a warning if others can reach the host and nothing is encrypted."""
    scheme, host, _, _ = _public_url(options) or ('http', options.host, '', '')
    if scheme == 'https' or _is_local(host.strip('[]')):
        return None
    return (
        f'warning: no TLS: whoever is between you and {options.public_url or host} can read the'
        f' links, and answer as anybody; leave {options.option_name("host")} out and use ssh -L,'
        f' or a proxy with TLS and {options.option_name("public_url")}'
    )


def _public_url(options: WebHParams) -> tuple[str, ...] | None:
    """Return scheme, host, port and path of the public address, if there is one."""
    match = PUBLIC_URL.fullmatch(options.public_url or '')
    return match and match.groups('')


def _is_local(host: str) -> bool:
    """Return whether nobody but this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _listen(options: WebHParams) -> socket.socket:
    """Return a socket that listens where `options` say; UserError if that cannot be."""
    host, port = options.host, options.port
    family = socket.AF_INET6 if ':' in host else socket.AF_INET
    both = host == '::' and socket.has_dualstack_ipv6()  # the name in links may mean IPv4
    try:
        listener = socket.create_server((host, port), family=family, dualstack_ipv6=both)
    except (OSError, UnicodeError) as e:
        name = options.option_name('port')
        raise UserError(
            f'{options.option_name("host")} {host!r:.80} with {name} {port} cannot be listened on:'
            f' {getattr(e, "strerror", e)}; give an address of this machine, and a free port'
            f' ({name} 0 finds one)'
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
