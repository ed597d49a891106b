"""Web application of the labelling page: its routes, and the checks of each request."""

import asyncio
import base64
import contextlib
import dataclasses
import hashlib
import hmac
import re
from collections.abc import Callable, Mapping, Sequence
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
from starlette.routing import Route

from lm_human_preferences.errors import UserError
from lm_human_preferences.labels.labeller import Refused
from lm_human_preferences.labels.page.service import LabellingService
from lm_human_preferences.storage.schema import matches_schema

MOST_BYTES = 64 * 1024  # largest body of a request, in bytes
POLL_SECONDS = 0.1  # time between two checks whether the server is stopping
POLICY = (
    "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; connect-src"
    " 'self'; img-src data:; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {  # headers of every reply, beside POLICY
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


def page_and_headers() -> tuple[str, dict[str, str]]:
    """Return page.html, and headers of replies that let only its own script and style run."""
    html = Path(__file__).with_name('page.html').read_text(encoding='utf-8')
    policy = POLICY
    for tag in ('script', 'style'):
        (content,) = re.findall(rf'<{tag}>(.*?)</{tag}>', html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        policy += f"; {tag}-src 'sha256-{digest}'"
    return html, {**HEADERS, 'Content-Security-Policy': policy}


@dataclasses.dataclass
class Page:
    """Handlers of requests; those that wait for the disk run in a thread.

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
            raise HTTPException(404, 'There is no such page.')
        schema = ACTIONS[action]
        fields: Any = None
        with contextlib.suppress(ClientDisconnect, RecursionError, ValueError):
            fields = await request.json()
        if not matches_schema(fields, schema):
            raise HTTPException(400, 'The request is not one of this page.')
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
        """Return the labeller whose key a request has; compare keys in constant time."""
        given = request.headers.get('authorization', '').removeprefix('Bearer ').encode()
        for labeller, key in self.keys.items():
            if hmac.compare_digest(key.encode(), given):
                return labeller
        raise HTTPException(401, 'Open the link that you were given.')

    async def refuse(self, request: Request, error: Exception) -> Response:
        """Send an error for the page to show; status 507, a failing disk, makes the page retry."""
        if isinstance(error, HTTPException):
            return JSONResponse({'error': error.detail}, error.status_code, error.headers)
        if isinstance(error, Refused):
            return JSONResponse({'error': f'{error}.'}, 409)
        self.service.note(f'note: {error}')
        reason = getattr(error.__cause__, 'strerror', None) or 'see its terminal'
        return JSONResponse({'error': f'the server cannot use its files: {reason}.'}, 507)
