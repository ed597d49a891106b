"""Time limits of a connection, which uvicorn leaves to a proxy that we do not have."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_SECONDS = 15.0  # from the beginning of a connection, or the reply before, to a request


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
