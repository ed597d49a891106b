"""Web application of the page: its routes, and the checks of requests."""

import asyncio
import base64
import dataclasses
import functools
import hashlib
import hmac
import json
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Mount, Route

from lm_human_preferences.labels.page.service import LabellingService

MOST_BYTES = 64 * 1024  # largest body of a request
LONGEST_SECONDS = 24 * 3600.0  # longest time for an answer
POLL_SECONDS = 0.1  # seconds between two checks whether the server ends
Check = Callable[[Any], bool]  # returns whether a JSON value is valid for a field


def _matches(pattern: str) -> Check:
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int for number in value)


def _are_seconds(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= LONGEST_SECONDS


_is_id = _matches('[0-9a-f]{32}')
GIVEN = {'answer': _is_id, 'question': _matches('[0-9a-f]{64}'), 'seconds': _are_seconds}
# Methods of the service, and the fields of a request that are their arguments.
ACTIONS: dict[str, dict[str, Check]] = {
    'task': {},
    'question': {},
    'answer': {**GIVEN, 'choice': _are_numbers},
    'skip': {**GIVEN, 'reason': _matches('.*')},
    'undo': {'answer': _matches('[0-9a-f-]{32,36}')},  # a terminal's answers have hyphens
}


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


class Json(JSONResponse):
    """JSON in ASCII, which can hold any text of our files."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(',', ':')).encode('ascii')


async def _refuse(request: Request, error: Exception) -> Response:
    """Reply to a request that is not granted, or without a route."""
    if isinstance(error, HTTPException):
        return Json({'error': error.detail}, error.status_code, error.headers)
    return Json({}, 400)  # nobody is there to read it


def make_app(
    html: str,
    service: LabellingService,
    keys: Mapping[str, str],
    hosts: Collection[str],
    path: str,
    is_ending: Callable[[], bool],
) -> Starlette:
    """Return the application of a service.

    keys: {labeller: what their requests have to bear}. hosts: names in addresses of the page. path:
    that of its public address, which a proxy may leave in requests or not.
    """
    handlers = _Routes(html, service, keys, is_ending)
    routes = [
        Route('/', handlers.page, methods=['GET']),
        Route('/ending', handlers.ending, methods=['POST']),
        *(
            Route(f'/{action}', functools.partial(handlers.act, action), methods=['POST'])
            for action in ACTIONS
        ),
    ]
    app = Starlette(
        routes=[*routes, Mount(path, routes=routes)] if path else routes,
        exception_handlers={HTTPException: _refuse, ClientDisconnect: _refuse},
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=[*hosts], www_redirect=False),
            Middleware(RequestBodyLimitMiddleware, max_body_size=MOST_BYTES),
        ],
    )
    app.router.redirect_slashes = False
    return app


@dataclasses.dataclass
class _Routes:
    """Handlers of requests. Work that waits for the disk runs in a thread."""

    html: str
    service: LabellingService
    keys: Mapping[str, str]
    is_ending: Callable[[], bool]

    async def page(self, request: Request) -> Response:
        """Send the page itself, which is the same for everybody."""
        return HTMLResponse(self.html)

    async def act(self, action: str, request: Request) -> Response:
        """Do one of ACTIONS for a labeller."""
        labeller = self._labeller(request)
        fields = await _fields(request, ACTIONS[action])
        return Json(await run_in_threadpool(getattr(self.service, action), labeller, **fields))

    async def ending(self, request: Request) -> Response:
        """Reply when the server ends."""
        self._labeller(request)
        while not self.is_ending() and not await request.is_disconnected():
            await asyncio.sleep(POLL_SECONDS)
        return Json({})

    def _labeller(self, request: Request) -> str:
        """Return who asks; how long this takes reveals nothing about the keys."""
        given = request.headers.get('authorization', '').removeprefix('Bearer ').encode()
        for labeller, key in self.keys.items():
            if hmac.compare_digest(key.encode(), given):
                return labeller
        raise HTTPException(401, 'Open the link that you were given.')


async def _fields(request: Request, checks: Mapping[str, Check]) -> dict[str, Any]:
    """Return the fields of a request that `checks` names; HTTPException if a value is invalid."""
    try:
        values = json.loads(await request.body())
    except (ValueError, RecursionError):
        raise HTTPException(400, 'The request is not JSON.') from None
    if not isinstance(values, dict):
        raise HTTPException(400, 'The request is not an object.')
    for name, is_valid in checks.items():
        if not is_valid(values.get(name)):
            raise HTTPException(400, f'The request has no valid {name}.')
    return {name: values[name] for name in checks}
