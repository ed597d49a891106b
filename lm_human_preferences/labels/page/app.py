"""Web application of the page: its routes, and the checks of every request and reply."""

import asyncio
import base64
import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from lm_human_preferences.hparams.labelling_options import PUBLIC_URL
from lm_human_preferences.labels.page.key import Access
from lm_human_preferences.labels.page.service import MOST_QUESTIONS, LabellingService

MOST_BYTES = 64 * 1024  # of a body
BODY_SECONDS = 10.0  # in which it has to arrive
HOST = re.compile(r'(\[[0-9a-f:.]+\]|[^:\[\]@/\s]+)(:\d{1,5})?')
LOCAL_NAMES = ('127.0.0.1', 'localhost', '[::1]')
HEADERS = {  # of every reply
    'Cache-Control': 'no-store',
    'Cross-Origin-Opener-Policy': 'same-origin',
    'Cross-Origin-Resource-Policy': 'same-origin',
    'Referrer-Policy': 'no-referrer',
    'X-Content-Type-Options': 'nosniff',
    'X-Frame-Options': 'DENY',
}
Check = Callable[[Any], bool]  # whether a value of JSON can be a field
PROOF_HEADER = 'Labelling-Proof'
COOKIE_SECONDS = 30 * 24 * 3600
LONGEST_SECONDS = 24 * 3600.0  # that a labeller can have taken
MOST_HELD = 16  # questions that a page may have
ENDING_SECONDS = 10.0  # for which a page waits to hear that the server ends, before it asks again
POLL_SECONDS = 0.1  # between two looks whether it does


def _matches(pattern: str) -> Check:
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None


_is_text = _matches('(?s).*')
# Random ones, of version 4
_is_uuid = _matches('[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}')
_is_question = _is_nonce = _matches('[0-9a-f]{64}')


def _are_held(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= MOST_HELD and all(map(_is_question, value))


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MOST_QUESTIONS


def _is_choice(value: Any) -> bool:
    numbers = value if isinstance(value, list) else [value]
    return all(type(number) is int for number in numbers)


def _are_seconds(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= LONGEST_SECONDS


GIVEN = {'answer': _is_uuid, 'question': _is_question, 'seconds': _are_seconds}
# Methods of the service, and the fields of a request that are their arguments.
ACTIONS: dict[str, dict[str, Check]] = {
    'questions': {'held': _are_held, 'count': _is_count},
    'answer': {**GIVEN, 'choice': _is_choice},
    'skip': {**GIVEN, 'reason': _is_text},
    'undo': {'answer': _is_text},
}


async def _read(request: Request) -> dict[str, Any]:
    """Return the JSON object of a request; HTTPException if it is not one, or too slow."""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            body = await request.body()
        values = json.loads(body)
    except TimeoutError:
        raise HTTPException(408, 'The request was too slow.') from None
    except (ValueError, RecursionError):
        raise HTTPException(400, 'The request is not JSON.') from None
    if not isinstance(values, dict):
        raise HTTPException(400, 'The request is not an object.')
    return values


def _field(values: dict[str, Any], name: str, is_valid: Check) -> Any:
    """Return a field of a request; HTTPException if it is missing or not valid."""
    value = values.get(name)
    if not is_valid(value):
        raise HTTPException(400, f'The request has no valid {name}.')
    return value


class Json(JSONResponse):
    """JSON in ASCII, which can hold whatever a file of ours can."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(',', ':')).encode('ascii')


def page_and_policy() -> tuple[str, str]:
    """Return page.html, and the Content-Security-Policy by which only its own script runs."""
    html = Path(__file__).with_name('page.html').read_text(encoding='utf-8')
    hashes = []
    for tag in ('script', 'style'):
        (content,) = re.findall(rf'<{tag}>(.*?)</{tag}>', html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        hashes.append(f"{tag}-src 'sha256-{digest}'")
    policy = [
        "default-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        *hashes,
        "connect-src 'self'",
        'img-src data:',  # the icon
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
    return html, '; '.join(policy)


async def _refuse(request: Request, error: Exception) -> Response:
    """Reply to a request that is not granted, or without a route."""
    if isinstance(error, HTTPException):
        return Json({'error': error.detail}, error.status_code, error.headers)
    return Json({}, 400)  # nobody is there to read it


def make_app(
    html: str,
    service: LabellingService,
    access: Access,
    names: Collection[str],
    is_ending: Callable[[], bool],
    *,
    scheme: str = 'http',
    public_url: str | None = None,
) -> ASGIApp:
    """Return the application of a service; is_ending: says if it ends; the rest is for Guard."""
    routes = _Routes(html, service, access, is_ending)
    app = Starlette(
        routes=[
            Route('/', routes.page, methods=['GET']),
            Route('/session', routes.session, methods=['POST']),
            Route('/greeting', routes.greeting, methods=['POST']),
            Route('/task', routes.task, methods=['GET']),
            Route('/ending', routes.ending, methods=['POST']),
            *(Route(f'/{action}', routes.act, methods=['POST']) for action in ACTIONS),
        ],
        exception_handlers={HTTPException: _refuse, ClientDisconnect: _refuse},
    )
    app.router.redirect_slashes = False
    return Guard(RequestBodyLimitMiddleware(app, MOST_BYTES), names, scheme, public_url)


class Guard:
    """Filter that lets requests through to `app` that a page of ours may have sent.

    names: hosts at which browsers reach the server itself, by `scheme`. public_url: where they
    reach it through a proxy, which may leave the path of this address in requests or not.
    starlette's TrustedHostMiddleware knows neither the address of a connection nor origins.
    """

    def __init__(
        self, app: ASGIApp, names: Collection[str], scheme: str, public_url: str | None
    ) -> None:
        self.app, self.scheme = app, scheme
        self.names = {name.lower() for name in (*LOCAL_NAMES, *names)}
        self.public_host = self.public_origin = None
        self.path = '/'
        if match := PUBLIC_URL.fullmatch(public_url or ''):
            public_scheme, host, port, path = match.groups('')
            # A browser leaves out the port that a scheme has anyway.
            port = port.removesuffix(':443' if public_scheme == 'https' else ':80')
            self.public_host = host.lower()
            self.public_origin = f'{public_scheme}://{self.public_host}{port}'
            self.path = f'{path.rstrip("/")}/'

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope['type'] == 'http':
            reply = self._refusal(scope) or self.app
            if scope['path'].startswith(self.path):
                scope = {**scope, 'path': scope['path'].removeprefix(self.path[:-1])}
            await reply(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        """Return the reply to a request that no page of ours sends; None for any other."""
        headers = Headers(scope=scope)
        host = headers.get('host', '').lower()
        match = HOST.fullmatch(host)
        address = (scope.get('server') or ('', 0))[0].removeprefix('::ffff:')
        is_own = match and (match[1] in self.names or match[1].strip('[]') == address)
        if match is None or not (is_own or match[1] == self.public_host):
            return _unread(403, 'This is not an address of this page: see --web.public_url.')
        if scope['method'] in ('GET', 'HEAD'):
            return None
        origins = [self.public_origin]
        if is_own:
            origins.append(f'{self.scheme}://{host}')
        if headers.get('origin', 'none').lower() not in origins:
            return _unread(403, 'The request is from another page.')
        if headers.get('content-type', '').partition(';')[0].strip().lower() != 'application/json':
            return _unread(415, 'The request is not JSON.')
        if scope['path'].endswith('/greeting') and headers.get('origin', '').lower() not in (
            self.public_origin,
            *self._own_origins(match[1], scope),
        ):
            # Else a program at the port of a page could pass on to this server what that asks.
            return _unread(403, 'This server is not at the port of that page.')
        return None

    def _own_origins(self, name: str, scope: Scope) -> list[str]:
        """Return the origins of pages that come from this server, under the `name` of its host."""
        port = (scope.get('server') or ('', 0))[1]
        origins = [f'{self.scheme}://{name}:{port}']
        if port == {'http': 80, 'https': 443}[self.scheme]:  # which browsers leave out
            origins.append(f'{self.scheme}://{name}')
        return origins


def _unread(status: int, text: str) -> Response:
    return Json({'error': text}, status, {'Connection': 'close'})


@dataclasses.dataclass
class _Routes:
    """Handlers of requests. Whatever waits for the disk does so in a thread."""

    html: str
    service: LabellingService
    access: Access
    is_ending: Callable[[], bool]

    async def page(self, request: Request) -> Response:
        """Send the page itself, which is the same for everybody."""
        return HTMLResponse(self.html)

    async def session(self, request: Request) -> Response:
        """Exchange the secret of a link for a cookie and a proof."""
        token = _field(await _read(request), 'token', _is_text)
        labeller = self.access.owner('link', token)
        if labeller is None:
            raise HTTPException(401, 'This link is not valid, or a part of it is missing.')
        reply = Json({'labeller': labeller, 'proof': self.access.code('proof', labeller)})
        reply.set_cookie(
            self.access.cookie_name,
            self.access.code('cookie', labeller),
            max_age=COOKIE_SECONDS,
            httponly=True,
            samesite='strict',
            secure=request.headers['origin'].lower().startswith('https:'),
        )
        return reply

    async def task(self, request: Request) -> Response:
        """Send what does not change from question to question."""
        labeller = self._labeller(request)
        task = await run_in_threadpool(self.service.task, labeller)
        # The name of the cookie stands for the folder, and reveals nothing about its path.
        folder, greeting = self.access.cookie_name, self.access.code('greeting', labeller)
        return Json({'folder': folder, 'greeting': greeting, **task})

    async def greeting(self, request: Request) -> Response:
        """Show a page of this server, or of one before it, that this is not another program."""
        values = await _read(request)
        labeller, nonce = _field(values, 'labeller', _is_text), _field(values, 'nonce', _is_nonce)
        origin = request.headers['origin'].lower()
        return Json({'code': self.access.greeting(labeller, f'{nonce} {origin}')})

    async def act(self, request: Request) -> Response:
        """Do what a labeller asks for: one of ACTIONS."""
        labeller, values = await self._request(request)
        action = request.url.path.removeprefix('/')
        fields = {name: _field(values, name, check) for name, check in ACTIONS[action].items()}
        return Json(await run_in_threadpool(getattr(self.service, action), labeller, **fields))

    async def ending(self, request: Request) -> Response:
        """Say whether the server ends: at once when it does, or else after a while."""
        await self._request(request)
        loop = asyncio.get_running_loop()
        until = loop.time() + ENDING_SECONDS
        while not self.is_ending() and loop.time() < until:
            await asyncio.sleep(POLL_SECONDS)
        return Json({'ended': self.is_ending()})

    def _labeller(self, request: Request) -> str:
        """Return who asks: the cookie counts only with the proof, as all ports get the cookie."""
        cookie = request.cookies.get(self.access.cookie_name, '')
        labeller = self.access.owner('cookie', cookie)
        proof = request.headers.get(PROOF_HEADER, '')
        if labeller is None or labeller != self.access.owner('proof', proof):
            raise HTTPException(401, 'Open the link that you were given.')
        return labeller

    async def _request(self, request: Request) -> tuple[str, dict[str, Any]]:
        labeller = self._labeller(request)
        values = await _read(request)
        if _field(values, 'labeller', _is_text) != labeller:
            # Else what one window shows would be answered in the name of the other.
            raise HTTPException(
                401,
                f'Another window of this browser is open as {labeller}: open your own link again.',
            )
        return labeller, values
