"""Handling of signals that ask a job to stop: Ctrl-C, SIGTERM, SIGHUP of a closing terminal."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from lm_human_preferences.utils import streams


@contextlib.contextmanager
def handled(handler: Callable[[int, FrameType | None], None], *numbers: int) -> Iterator[None]:
    """Within the block, call `handler` at signals `numbers`; only in the main thread.

    Only the first SIGHUP counts, as shell and kernel both send one; if nohup has it ignored, it
    stays so.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        """Call the handler, of SIGHUP once."""
        if number == signal.SIGHUP:
            signal.signal(number, signal.SIG_IGN)
            streams.leave_closed_terminal()
        handler(number, frame)

    before = {}
    for number in numbers:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        for number, earlier in before.items():
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, earlier)


def interrupt(number: int, frame: FrameType | None) -> None:
    """Handle a signal as Python does Ctrl-C."""
    raise KeyboardInterrupt
