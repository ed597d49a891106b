"""Server of the labelling page, in a thread of its own."""

import contextlib
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
from lm_human_preferences.labels.page.app import Page, page_and_headers
from lm_human_preferences.labels.page.service import LabellingService

MOST_CONNECTIONS = 200
GRACE_SECONDS = 3  # seconds that open replies may take when the server stops


class LabelServer(contextlib.AbstractContextManager['LabelServer']):
    """Server of a folder's labelling page; it runs until it is closed.

    links: {labeller: address of the page, with a key that only this server accepts}.
    """

    def __init__(
        self,
        folder: str,
        labellers: Sequence[str],
        options: WebHParams,
        *,
        note: Callable[[str], None] = print,
    ) -> None:
        opened = LabelFolder(folder)
        with contextlib.ExitStack() as stack:
            self.service = LabellingService(opened, labellers, stack, note)
            listener = storage.closed_after_fork(stack.enter_context(_listen(options)))
            self.port: int = listener.getsockname()[1]
            name = socket.gethostname() if options.host in ('0.0.0.0', '::') else options.host
            name = f'[{name}]' if ':' in name else name
            self.url = (options.public_url or f'http://{name}:{self.port}').rstrip('/')
            keys = {labeller: secrets.token_urlsafe(32) for labeller in labellers}
            self.links = {labeller: f'{self.url}/#{key}' for labeller, key in keys.items()}
            hosts = ['127.0.0.1', name, _public_address(options)[1]]
            self._server = self._make_server(keys, hosts)
            self._thread = threading.Thread(
                target=self._server.run, args=[[listener]], name='label server', daemon=True
            )
            self._thread.start()
            self._stack = stack.pop_all()

    def _make_server(self, keys: dict[str, str], hosts: Sequence[str]) -> uvicorn.Server:
        html, headers = page_and_headers()
        page = Page(html, self.service, keys, lambda: self._server.should_exit)
        config = uvicorn.Config(
            page.app(hosts),
            headers=[*headers.items()],
            http=FairProtocol,
            ws='none',
            lifespan='off',
            log_config=None,
            log_level='error',
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
        return uvicorn.Server(config)

    def wait(self) -> None:
        """Wait until the server has stopped."""
        while self._thread.is_alive():  # after an interrupted `join`, a thread seems to have ended
            time.sleep(0.1)

    def close(self) -> None:
        """Send open replies, then stop; every answer that was acknowledged is on the disk."""
        self._server.should_exit = True
        self._thread.join()
        self._stack.close()

    def __exit__(self, *_: object) -> None:
        self.close()


class FairProtocol(H11Protocol):
    """HTTP that closes the oldest connection when there are too many, so nobody can take all."""

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
    """Return a warning if other machines can reach the page without TLS, else None."""
    scheme, host = _public_address(options)
    if scheme == 'https' or host in ('127.0.0.1', '::1', '[::1]'):
        return None
    return (
        f'warning: no TLS: whoever is between you and {host} can read the links, and answer as'
        f' anybody; leave {options.option_name("host")} out and use ssh -L, or a proxy with TLS and'
        f' {options.option_name("public_url")}'
    )


def _public_address(options: WebHParams) -> tuple[str, str]:
    """Return (scheme, host) of options.public_url or, without it, of the server's own address."""
    match = PUBLIC_URL.fullmatch(options.public_url or '')
    return (match[1], match[2]) if match else ('http', options.host)


def _listen(options: WebHParams) -> socket.socket:
    """Return a socket that listens at the host and port of `options`; UserError if it cannot."""
    host, port = options.host, options.port
    family = socket.AF_INET6 if ':' in host else socket.AF_INET
    both = host == '::' and socket.has_dualstack_ipv6()  # a host name in links may be IPv4
    try:
        listener = socket.create_server((host, port), family=family, dualstack_ipv6=both)
    except (OSError, UnicodeError) as e:
        name = options.option_name('port')
        raise UserError(
            f'{options.option_name("host")} {host!r:.80} with {name} {port} cannot be listened on:'
            f' {getattr(e, "strerror", e)}; give an address of this machine, and a free port'
            f' ({name} 0 finds one)'
        ) from e
    # Connections inherit this option. Without it, the body of a reply would wait 40 ms, until the
    # client acknowledges the head.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
