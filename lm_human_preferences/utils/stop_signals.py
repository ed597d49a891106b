"""Handling of signals that ask a job to stop.

These are Ctrl-C, SIGTERM, and the WARNINGS: SIGHUP from a closing terminal, SIGUSR1 from Slurm
before the time limit of a job, SIGXCPU at a limit of processor time. Forked processes have the
default handlers.
"""

import contextlib
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from lm_human_preferences.utils import streams

WARNINGS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGXCPU)
TO_STOP = (signal.SIGTERM, *WARNINGS)
Handlers = dict[int, Any]  # {number of a signal: its handler}
_handlers: weakref.WeakSet[Callable[[int, FrameType | None], None]] = weakref.WeakSet()
# Seconds in which a step must end after SIGTERM: batch systems kill a job after 30 s, saved or not.
STOP_TIMEOUT = 20
LEAST_SECONDS = 1e-3  # shortest time for a timer, as 0 would cancel it
_deadline: float | None = None  # time at which to send SIGALRM, by the monotonic clock


@contextlib.contextmanager
def handled(handler: Callable[[int, FrameType | None], None], *numbers: int) -> Iterator[None]:
    """Within the block, let `handler` handle the signals `numbers` if this is the main thread.

    Repeated WARNINGS do not count: shell and kernel both send SIGHUP, and SIGXCPU comes each
    second. A warning that is ignored, as under nohup, stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        """Call the handler; if the signal is one of WARNINGS, ignore it from then on."""
        if number in WARNINGS:
            signal.signal(number, signal.SIG_IGN)
        if number == signal.SIGHUP:
            streams.leave_closed_terminal()
        handler(number, frame)

    before = {}
    _handlers.add(handle)
    for number in numbers:
        if number not in WARNINGS or signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        restore(before)


def set_deadline(seconds: float | None) -> None:
    """Make SIGALRM come after `seconds`, to end a job that was asked to stop; None: never."""
    global _deadline
    _deadline = None if seconds is None else time.monotonic() + seconds
    set_timer()


def set_timer() -> None:
    """Set the process's timer to the deadline; user code may have changed the timer."""
    if threading.current_thread() is threading.main_thread():
        left = 0.0
        if _deadline is not None:
            left = max(_deadline - time.monotonic(), LEAST_SECONDS)
        signal.setitimer(signal.ITIMER_REAL, left)


def handlers() -> Handlers:
    """Return {signal: handler} for the signals that ask a job to stop, and for SIGALRM."""
    numbers = (signal.SIGINT, signal.SIGALRM, *TO_STOP)
    return {number: signal.getsignal(number) for number in numbers}


def restore(before: Handlers) -> None:
    """In the main thread, restore earlier handlers. Signals that are ignored now stay ignored."""
    if threading.current_thread() is threading.main_thread():
        for number, earlier in before.items():
            if signal.getsignal(number) != signal.SIG_IGN and earlier is not None:
                signal.signal(number, earlier)


def interrupt(number: int, frame: FrameType | None) -> None:
    """Handle a signal as Python handles Ctrl-C: by KeyboardInterrupt."""
    raise KeyboardInterrupt


def _use_defaults() -> None:
    """Restore the default handlers of the signals that `handled` has changed."""
    for number in signal.valid_signals():
        if signal.getsignal(number) in _handlers:
            is_ctrl_c = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_ctrl_c else signal.SIG_DFL)


os.register_at_fork(after_in_child=_use_defaults)
