"""The routes of the page."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from lm_human_preferences.label_types import MAX_RESPONSES, TIE_KEY
from lm_human_preferences.labels.answers import LONGEST_REMARK
from lm_human_preferences.labels.page.access import Access
from lm_human_preferences.labels.page.guard import Guard
from lm_human_preferences.labels.page.service import MOST_QUESTIONS, LabellingService, Refused

PROOF_HEADER = 'Labelling-Proof'
COOKIE_SECONDS = 30 * 24 * 3600
UUID = re.compile(r'[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}')
QUESTION = re.compile(r'[0-9a-f]{64}')
LONGEST_SECONDS = 24 * 3600.0  # that a labeller can have taken
MOST_HELD = 16  # questions that a page may have
ENDING_SECONDS = 10.0  # for which a page waits to hear that the server ends, before it asks again


class Json(JSONResponse):
    """JSON in ASCII, which can hold whatever a file of ours can."""

    def render(self, content: Any) -> bytes:
        """The bytes of the reply."""
        return json.dumps(content, allow_nan=False, separators=(',', ':')).encode('ascii')


class Page:
    """The one file that the browser gets, and the policy that lets its own script run only."""

    def __init__(self) -> None:
        self.html = Path(__file__).with_name('page.html').read_text(encoding='utf-8')
        self.policy = '; '.join(
            [
                "default-src 'none'",
                f'script-src {self._hash("script")}',
                f'style-src {self._hash("style")}',
                "connect-src 'self'",
                'img-src data:',  # the icon
                "base-uri 'none'",
                "form-action 'none'",
                "frame-ancestors 'none'",
                "require-trusted-types-for 'script'",
                "trusted-types 'none'",
            ]
        )

    def _hash(self, tag: str) -> str:
        (content,) = re.findall(rf'<{tag}>(.*?)</{tag}>', self.html, re.DOTALL)
        digest = hashlib.sha256(content.encode()).digest()
        return f"'sha256-{base64.b64encode(digest).decode()}'"


def make_app(
    service: LabellingService,
    access: Access,
    names: list[str],
    ending: asyncio.Event,
    *,
    scheme: str = 'http',
) -> ASGIApp:
    """The application of a service.

    names: of this host; see guard.Guard. ending: is set when the server ends. scheme: http or
    https.
    """
    routes = _Routes(service, access, ending, is_secure=scheme == 'https')
    app = Starlette(
        routes=[
            Route('/', routes.page, methods=['GET']),
            Route('/session', routes.session, methods=['POST']),
            Route('/task', routes.task, methods=['GET']),
            Route('/questions', routes.questions, methods=['POST']),
            Route('/answer', routes.answer, methods=['POST']),
            Route('/skip', routes.skip, methods=['POST']),
            Route('/undo', routes.undo, methods=['POST']),
            Route('/ending', routes.ending, methods=['POST']),
        ],
        exception_handlers={Refused: _refused, HTTPException: _http_error},
    )
    app.router.redirect_slashes = False
    return Guard(app, names, scheme)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return Json({'error': str(error)}, error.status)


async def _http_error(request: Request, error: Exception) -> Response:
    """A path or a method that there is not."""
    assert isinstance(error, HTTPException)
    return Json({'error': error.detail}, error.status_code, error.headers)


class _Routes:
    """What answers each request. Whatever waits for the disk does so in a thread."""

    def __init__(
        self, service: LabellingService, access: Access, ending: asyncio.Event, is_secure: bool
    ) -> None:
        self.service, self.access, self.is_secure = service, access, is_secure
        self._page, self._ending = Page(), ending

    async def page(self, request: Request) -> Response:
        """The page itself, which is the same for everybody."""
        headers = {'Content-Security-Policy': self._page.policy}
        return HTMLResponse(self._page.html, headers=headers)

    async def session(self, request: Request) -> Response:
        """Exchange the secret of a link for a cookie and a proof."""
        fields = _Fields(await request.body())
        labeller = self.access.by_token(fields.text('token'))
        if labeller is None:
            raise Refused(401, 'This link is not valid, or a part of it is missing.')
        reply = Json({'labeller': labeller, 'proof': self.access.proof(labeller)})
        reply.set_cookie(
            self.access.cookie_name,
            self.access.cookie(labeller),
            max_age=COOKIE_SECONDS,
            httponly=True,
            samesite='strict',
            secure=self.is_secure,
        )
        return reply

    async def task(self, request: Request) -> Response:
        """What does not change from question to question."""
        labeller = self._labeller(request)
        task = await run_in_threadpool(self.service.task, labeller)
        return Json({'folder': self.access.folder, **task})

    async def questions(self, request: Request) -> Response:
        """More questions for the labeller who asks."""
        labeller, fields = await self._request(request)
        held = fields.ids('held')
        count = fields.number('count', 0, MOST_QUESTIONS)
        return await _reply(self.service.questions, labeller, held, count)

    async def answer(self, request: Request) -> Response:
        """Record an answer."""
        labeller, fields = await self._request(request)
        lowest = TIE_KEY if self.service.folder.label_type.ties else 1
        return await _reply(
            self.service.answer,
            labeller,
            fields.text('answer', UUID),
            fields.text('question', QUESTION),
            fields.numbers('choice', lowest, MAX_RESPONSES),
            fields.seconds(),
            fields.remark(),
        )

    async def skip(self, request: Request) -> Response:
        """Record that a question is skipped."""
        labeller, fields = await self._request(request)
        return await _reply(
            self.service.skip,
            labeller,
            fields.text('answer', UUID),
            fields.text('question', QUESTION),
            fields.text('reason'),
            fields.seconds(),
            fields.remark(),
        )

    async def undo(self, request: Request) -> Response:
        """Take an answer back."""
        labeller, fields = await self._request(request)
        # The answer may have been given elsewhere, under a uuid of another form.
        return await _reply(self.service.undo, labeller, fields.text('answer'))

    async def ending(self, request: Request) -> Response:
        """Whether the server ends; the reply comes when it does, or else after a while."""
        await self._request(request)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ENDING_SECONDS):
                await self._ending.wait()
        return Json({'ended': self._ending.is_set()})

    def _labeller(self, request: Request) -> str:
        cookie = request.cookies.get(self.access.cookie_name, '')
        labeller = self.access.by_cookie(cookie, request.headers.get(PROOF_HEADER, ''))
        if labeller is None:
            raise Refused(401, 'Open the link that you were given.')
        return labeller

    async def _request(self, request: Request) -> tuple[str, _Fields]:
        """Who asks, and what."""
        labeller = self._labeller(request)
        fields = _Fields(await request.body())
        if fields.text('labeller') != labeller:
            # Else what one window shows would be answered in the name of the other.
            raise Refused(
                401,
                f'Another window of this browser is open as {labeller}: open your own link again.',
            )
        return labeller, fields


async def _reply(function: Callable[..., dict[str, Any]], *arguments: Any) -> Response:
    return Json(await run_in_threadpool(function, *arguments))


class _Fields:
    """The fields of a request's JSON object; Refused, with status 400, for any that is wrong."""

    def __init__(self, body: bytes) -> None:
        try:
            self._values = json.loads(body)
        except (ValueError, RecursionError):
            raise Refused(400, 'The request is not JSON.') from None
        if not isinstance(self._values, dict):
            raise Refused(400, 'The request is no object.')

    def text(self, name: str, pattern: re.Pattern[str] | None = None) -> str:
        """The text of a field, which matches `pattern` as a whole."""
        value = self._values.get(name)
        if not isinstance(value, str) or (pattern and not pattern.fullmatch(value)):
            raise Refused(400, f'The request has no valid {name}.')
        return value

    def number(self, name: str, low: int, high: int) -> int:
        """The whole number of a field, from `low` to `high`."""
        value = self._values.get(name)
        if type(value) is not int or not low <= value <= high:
            raise Refused(400, f'The request has no valid {name}.')
        return value

    def numbers(self, name: str, low: int, high: int) -> list[int]:
        """The same of a field that has a list of them, `high` at most, or just one."""
        value = self._values.get(name)
        numbers = value if isinstance(value, list) else [value]
        if len(numbers) > high:
            raise Refused(400, f'The request has no valid {name}.')
        for number in numbers:
            if type(number) is not int or not low <= number <= high:
                raise Refused(400, f'The request has no valid {name}.')
        return numbers

    def seconds(self) -> float:
        """The seconds that the labeller took."""
        value = self._values.get('seconds')
        if type(value) not in (int, float) or not 0 <= value <= LONGEST_SECONDS:
            raise Refused(400, 'The request has no valid seconds.')
        return float(value)

    def remark(self) -> str:
        """The remark to the answer; '' where there is none."""
        value = self._values.get('remark', '')
        if not isinstance(value, str) or len(value) > LONGEST_REMARK:
            raise Refused(400, 'The request has no valid remark.')
        return value

    def ids(self, name: str) -> list[str]:
        """The ids of questions in a field, MOST_HELD at most."""
        values = self._values.get(name)
        if not isinstance(values, list) or len(values) > MOST_HELD:
            raise Refused(400, f'The request has no valid {name}.')
        for value in values:
            if not isinstance(value, str) or not QUESTION.fullmatch(value):
                raise Refused(400, f'The request has no valid {name}.')
        return values
