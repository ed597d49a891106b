"""Routes of the labelling page, checks of requests, and the server, which runs in a thread."""

import asyncio
import base64
import contextlib
import dataclasses
import hashlib
import hmac
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.command_options import PUBLIC_URL, WebHParams
from lm_human_preferences.labels.folder import LabelFolder
from lm_human_preferences.labels.labeller import Refused
from lm_human_preferences.labels.page.service import LabellingService
from lm_human_preferences.storage.schema import matches_schema

MOST_CONNECTIONS = 200
BACKLOG = 64  # most connections accepted at once; below MOST_CONNECTIONS, so that none is closed
GRACE_SECONDS = 3  # seconds that a stopping server waits for unfinished replies
MOST_BYTES = 64 * 1024  # largest body of a request, in bytes
POLL_SECONDS = 0.1  # time between two checks whether the server is stopping
POLICY = (
    "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; connect-src"
    " 'self'; img-src data:; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {  # HTTP headers of every reply, besides Content-Security-Policy
    'Cache-Control': 'no-store',
    'Cross-Origin-Opener-Policy': 'same-origin',
    'Cross-Origin-Resource-Policy': 'same-origin',
    'Referrer-Policy': 'no-referrer',
    'X-Content-Type-Options': 'nosniff',
}
GIVEN = {'answer': str, 'question': str, 'seconds': int | float}
# {method of LabellingService: schema of a request, whose fields are the method's arguments}
ACTIONS: dict[str, dict[str, Any]] = {
    'task': {},
    'question': {},
    'answer': {**GIVEN, 'choice': [range(-10_000, 10_000)]},
    'skip': {**GIVEN, 'reason': str},
    'undo': {'answer': str},
}


class LabelServer(contextlib.AbstractContextManager['LabelServer']):
    """Server of a folder's labelling page; it runs until it is closed.

    links: {labeller: address of the page, with a key that only this server accepts}. note: function
    that shows the user a line.
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
            match = PUBLIC_URL.fullmatch(options.public_url or '')
            scheme, host = (match[1], match[2]) if match else ('http', options.host)
            if scheme == 'http' and host not in ('127.0.0.1', '::1', '[::1]'):
                note(
                    f'warning: no TLS: whoever is between you and {host} can read the links, and'
                    ' answer as anybody; use ssh -L, or a proxy with TLS'
                )
            html, headers = page_and_headers()
            page = Page(html, self.service, keys, lambda: self._server.should_exit)
            config = uvicorn.Config(
                page.app(['127.0.0.1', name, host]),
                headers=[*headers.items()],
                http=FairProtocol,
                backlog=BACKLOG,
                ws='none',
                lifespan='off',
                log_config=None,
                log_level='error',
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=GRACE_SECONDS,
            )
            self._server = uvicorn.Server(config)
            self._thread = threading.Thread(
                target=self._server.run, args=[[listener]], name='label server', daemon=True
            )
            self._thread.start()
            self._stack = stack.pop_all()

    def wait(self) -> None:
        """Wait until the server has stopped."""
        while self._thread.is_alive():  # an interrupted `join` would mark the thread as ended
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        """Send unfinished replies, then stop; every acknowledged answer is already on the disk."""
        self._server.should_exit = True
        self._thread.join()
        self._stack.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def page_and_headers() -> tuple[str, dict[str, str]]:
    """Return page.html, and HTTP headers that allow no script or style but those in the page."""
    html = Path(__file__).with_name('page.html').read_text(encoding='utf-8')
    policy = POLICY
    for tag in ('script', 'style'):
        (content,) = re.findall(rf'<{tag}>(.*?)</{tag}>', html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        policy += f"; {tag}-src 'sha256-{digest}'"
    return html, {**HEADERS, 'Content-Security-Policy': policy}


@dataclasses.dataclass
class Page:
    """Request handlers of the page; handlers that wait for the disk run in a thread.

    keys: {labeller: bearer token that their requests carry}.
    """

    html: str
    service: LabellingService
    keys: Mapping[str, str]
    is_ending: Callable[[], bool]

    def app(self, hosts: Sequence[str]) -> Starlette:
        """Return the application. hosts: host names that a request may be addressed to."""
        app = Starlette(
            routes=[
                Route('/', self.page, methods=['GET']),
                Route('/ending', self.ending, methods=['POST']),
                Route('/{action}', self.act, methods=['POST']),
            ],
            exception_handlers={HTTPException: self.refuse, UserError: self.refuse},
            middleware=[
                Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False),
                Middleware(RequestBodyLimitMiddleware, max_body_size=MOST_BYTES),
            ],
        )
        app.router.redirect_slashes = False
        return app

    async def page(self, request: Request) -> Response:
        """Send the page itself, which is the same for everybody."""
        return HTMLResponse(self.html)

    async def act(self, request: Request) -> Response:
        """Run one of ACTIONS for the labeller, and send its result as JSON."""
        labeller, action = self._labeller(request), request.path_params['action']
        if action not in ACTIONS:
            raise HTTPException(detail='There is no such page.', status_code=404)
        schema = ACTIONS[action]
        fields: Any = None
        with contextlib.suppress(ClientDisconnect, RecursionError, ValueError):
            fields = await request.json()
        if not matches_schema(fields, schema):
            raise HTTPException(detail='The request is not one of this page.', status_code=400)
        arguments = {name: fields[name] for name in schema}
        method = getattr(self.service, action)
        return JSONResponse(await run_in_threadpool(method, labeller, **arguments))

    async def ending(self, request: Request) -> Response:
        """Reply only when the server is stopping, so that the page can say so at once."""
        self._labeller(request)
        while not self.is_ending() and not await request.is_disconnected():
            await asyncio.sleep(POLL_SECONDS)
        return JSONResponse({})

    def _labeller(self, request: Request) -> str:
        """Return the labeller whose key the request carries; compare keys in constant time."""
        given = request.headers.get('authorization', '').removeprefix('Bearer ').encode()
        for labeller, key in self.keys.items():
            if hmac.compare_digest(key.encode(), given):
                return labeller
        raise HTTPException(detail='Open the link that you were given.', status_code=401)

    async def refuse(self, request: Request, error: Exception) -> Response:
        """Send an error that the page shows; after status 507, a disk failure, the page retries."""
        if isinstance(error, HTTPException):
            return JSONResponse({'error': error.detail}, error.status_code, error.headers)
        if isinstance(error, Refused):
            return JSONResponse({'error': f'{error}.'}, 409)
        self.service.note(f'note: {error}')
        reason = getattr(error.__cause__, 'strerror', None) or 'see its terminal'
        return JSONResponse({'error': f'the server cannot use its files: {reason}.'}, 507)


class FairProtocol(H11Protocol):
    """HTTP protocol that closes the oldest connection if there are more than MOST_CONNECTIONS."""

    begun = 0.0

    def connection_made(self, transport: Any) -> None:
        """Accept a connection; close the oldest one if there are too many."""
        self.begun = time.monotonic()
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            there = [each for each in self.connections if isinstance(each, FairProtocol)]
            still_open = [each for each in there if not each.transport.is_closing()]
            min(still_open, key=lambda each: each.begun).transport.abort()


def _listen(options: WebHParams) -> socket.socket:
    """Return a socket that listens at the host and port of `options`; UserError if it cannot."""
    host, port = options.host, options.port
    family = socket.AF_INET6 if ':' in host else socket.AF_INET
    both = host == '::' and socket.has_dualstack_ipv6()  # browsers may use IPv4 for a host name
    try:
        listener = socket.create_server((host, port), family=family, dualstack_ipv6=both)
    except (OSError, UnicodeError) as e:
        name = options.option_name('port')
        raise UserError(
            f'{options.option_name("host")} {host!r:.80} and {name} {port} cannot be used:'
            f' {getattr(e, "strerror", e)}; give an address of this machine and a free port'
            f' ({name} 0 finds one)'
        ) from e
    # Accepted connections inherit the option TCP_NODELAY.
    # Without TCP_NODELAY, the body of a reply waits 40 ms until the client acknowledges the head.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
