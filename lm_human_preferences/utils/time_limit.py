"""Limit of the time that code of others takes."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

TEMPLATE_SECONDS = 2.0  # for one dialogue


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise TimeoutError where the block takes more processor time, if this is the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only that one can be interrupted
        return

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise TimeoutError(f'it takes more than {seconds:g} s')

    before = signal.signal(signal.SIGVTALRM, interrupt)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
