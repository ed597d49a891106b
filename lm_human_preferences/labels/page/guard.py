"""What every request is checked for, and what every reply tells the browser."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MOST_BYTES = 64 * 1024  # of a body
BODY_SECONDS = 10.0  # in which it has to arrive
HOST = re.compile(r'(\[[0-9a-f:.]+\]|[^:\[\]@/\s]+)(:\d{1,5})?')
LOCAL_NAMES = ('127.0.0.1', 'localhost', '[::1]')
HEADERS = {
    'Cache-Control': 'no-store',
    'Cross-Origin-Opener-Policy': 'same-origin',
    'Cross-Origin-Resource-Policy': 'same-origin',
    'Referrer-Policy': 'no-referrer',
    'X-Content-Type-Options': 'nosniff',
    'X-Frame-Options': 'DENY',
}
NO_CONTENT = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


class Rejected(Exception):
    """A request that does not reach the routes. status: of HTTP."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Guard:
    """Lets requests through to `app` that a page of ours may have sent, whole and in time.

    names: hosts that the browser may have been told to ask, besides the address itself. Others are
    names that somebody has pointed at this machine (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, names: Collection[str], scheme: str) -> None:
        self.app, self.scheme = app, scheme
        self.names = {name.lower() for name in (*LOCAL_NAMES, *names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope['type'] != 'http':
            return

        async def send_guarded(message: Message) -> None:
            """Send a reply with HEADERS."""
            if message['type'] == 'http.response.start':
                headers = MutableHeaders(raw=message['headers'])
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault('Content-Security-Policy', NO_CONTENT)
                message['headers'] = headers.raw
            await send(message)

        try:
            self._check_head(scope)
            body = await _body(scope, receive)
        except Rejected as e:
            # What is left of the body would be taken for the next request.
            reply = JSONResponse({'error': str(e)}, e.status, {'Connection': 'close'})
            await reply(scope, receive, send_guarded)
        except ClientDisconnect:
            return
        else:
            await self.app(scope, _replay(body), send_guarded)

    def _check_head(self, scope: Scope) -> None:
        """Raise Rejected for a request from elsewhere, or of a kind that no page of ours sends."""
        headers = Headers(scope=scope)
        host = headers.get('host', '').lower()
        match = HOST.fullmatch(host)
        if match is None or not self._is_expected(match[1], scope):
            raise Rejected(403, 'This is no address of this page.')
        if scope['method'] in ('GET', 'HEAD'):
            return
        if headers.get('origin', '').lower() != f'{self.scheme}://{host}':
            raise Rejected(403, 'The request is from another page.')
        if headers.get('content-type', '').partition(';')[0].strip().lower() != 'application/json':
            raise Rejected(415, 'The request is not JSON.')

    def _is_expected(self, name: str, scope: Scope) -> bool:
        address = (scope.get('server') or ('', 0))[0]
        return name in self.names or name.strip('[]') == address


async def _body(scope: Scope, receive: Receive) -> bytes:
    """The body of a request; Rejected if it is too long or too slow."""
    length = Headers(scope=scope).get('content-length', '0')
    if not re.fullmatch(r'\d{1,20}', length) or int(length) > MOST_BYTES:
        raise Rejected(413, 'The request is too long.')
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while True:
                message = await receive()
                if message['type'] == 'http.disconnect':
                    raise ClientDisconnect
                body += message.get('body', b'')
                if len(body) > MOST_BYTES:
                    raise Rejected(413, 'The request is too long.')
                if not message.get('more_body'):
                    return bytes(body)
    except TimeoutError:
        raise Rejected(408, 'The request was too slow.') from None


def _replay(body: bytes) -> Receive:
    """What an application calls to get a body that has arrived."""
    messages: list[Message] = [{'type': 'http.request', 'body': body, 'more_body': False}]

    async def receive() -> Message:
        return messages.pop() if messages else {'type': 'http.disconnect'}

    return receive
