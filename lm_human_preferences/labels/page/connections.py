"""Limits of connections, which uvicorn leaves to a proxy that we do not have."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_SECONDS = 15.0  # from the beginning of a connection, or the reply before, to a request
NOTE_SECONDS = 60.0  # between two notes that no more connections can be accepted
TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)


class LimitedLoop(asyncio.SelectorEventLoop):
    """An event loop whose server does not wait long for TLS, and says in one line what it lacks.

    note: is called with that line.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self._note = note
        self._noted = -NOTE_SECONDS
        self._server: asyncio.Server | None = None
        self.set_exception_handler(self._explain)

    async def create_server(self, *args: Any, **kwargs: Any) -> asyncio.Server:
        """A server whose connections have REQUEST_SECONDS for the handshake of TLS, if they do."""
        if kwargs.get('ssl') is not None:
            kwargs['ssl_handshake_timeout'] = REQUEST_SECONDS
        self._server = await super().create_server(*args, **kwargs)
        return self._server

    def _explain(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Note that there are too many connections; show the traceback of everything else."""
        error = context.get('exception')
        if isinstance(error, ValueError) and self._server and not self._server.is_serving():
            return  # asyncio had put off another attempt to accept until now
        if not isinstance(error, OSError) or error.errno not in TOO_MANY_FILES:
            loop.default_exception_handler(context)
        elif time.monotonic() - self._noted >= NOTE_SECONDS:
            self._noted = time.monotonic()
            self._note(
                f'note: no more connections are accepted for now: {error.strerror}; ulimit -n'
                ' sets how many there may be'
            )


class TimedProtocol(H11Protocol):
    """HTTP whose clients cannot keep a connection by sending, or reading, hardly anything."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._start()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing more."""
        self._stop()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Begin to wait for the next request."""
        super().on_response_complete()
        self._start()

    def _start(self) -> None:
        self._stop()
        self._deadline = self.loop.call_later(REQUEST_SECONDS, self._end)

    def _stop(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()

    def _end(self) -> None:
        """Close the connection, unless a request is being answered to somebody who reads."""
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if is_answering and not self.transport.get_write_buffer_size():
            self._start()
        else:
            self.transport.abort()
