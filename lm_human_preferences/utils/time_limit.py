"""Limit of the time that code of others takes."""

import contextlib
import functools
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

TEMPLATE_SECONDS = 2.0  # for one dialogue


@contextlib.contextmanager
def rendering(template: str) -> Iterator[None]:
    """Limit the block, which renders a chat template: ValueError if it might take for ever.

    TimeoutError where it takes TEMPLATE_SECONDS of the processor, if this is the main thread.
    """
    check_template(template)
    if threading.current_thread() is not threading.main_thread():
        yield  # only that one can be interrupted
        return

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise TimeoutError(f'it takes more than {TEMPLATE_SECONDS:g} s')

    before = signal.signal(signal.SIGVTALRM, interrupt)
    signal.setitimer(signal.ITIMER_VIRTUAL, TEMPLATE_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@functools.lru_cache(maxsize=8)
def check_template(template: str) -> None:
    """Raise ValueError if a chat template computes a power: 9**9**9 cannot be interrupted."""
    import jinja2

    before = ''
    for _, kind, word in jinja2.Environment().lex(template):
        # After ( or a comma, it begins arguments.
        if kind == 'operator' and word == '**' and before not in '(,':
            raise ValueError('it computes a power (**), which may take for ever')
        before = before if kind == 'whitespace' else word
