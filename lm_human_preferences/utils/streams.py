"""Standard streams without tracebacks: for lacking characters, and closed pipes as of `| head`."""

import atexit
import contextlib
import io
import os
import select
import signal
import sys
from collections.abc import Iterator
from typing import TextIO

CLOSED_PIPE = 128 + signal.SIGPIPE  # exit status, as shells report it


def note(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def make_safe() -> None:
    """Escape characters that the encoding lacks; replace closed streams; drop unread output."""
    if sys.stdin is None:  # the file was closed when Python started, as by `<&-`
        sys.stdin = open(os.devnull, encoding='utf-8')
    for name in ('stdout', 'stderr'):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, 'w', encoding='utf-8'))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors='backslashreplace')
    atexit.unregister(_flush)
    atexit.register(_flush)


@contextlib.contextmanager
def closed_pipe_is_quiet() -> Iterator[None]:
    """End the process with status 141 if nobody reads the output of the block any more."""
    try:
        yield
    except BrokenPipeError:
        if not _has_reader(sys.stdout):
            sys.exit(CLOSED_PIPE)
        raise  # another pipe's


def _has_reader(stream: TextIO) -> bool:
    poll = select.poll()
    poll.register(stream, 0)  # for errors only, of which a pipe without a reader is one
    return not poll.poll(0)


def _flush() -> None:
    """Flush before Python does, which would complain about a closed pipe."""
    if sys.stdout.closed:
        return
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
