"""Standard streams that never end a run with a traceback.

Characters that the encoding lacks are escaped; a closed pipe, as after `| head`, ends it quietly.
"""

import atexit
import contextlib
import io
import os
import select
import signal
import sys
from collections.abc import Iterator
from typing import TextIO

# The status with which a shell reports a program that wrote to a closed pipe.
CLOSED_PIPE = 128 + signal.SIGPIPE


def note(message: str) -> None:
    """Print a line for the user to standard error: it is not part of the output."""
    print(message, file=sys.stderr, flush=True)


def make_safe() -> None:
    """Let anything be printed; characters that the encoding lacks become escapes such as \\u201c.

    Where a stream is closed from the start, nothing is printed or read. What is still buffered when
    the process ends, and finds no reader, is dropped without a message.
    """
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
    """End the process with status 141 if nobody reads any more what the block prints."""
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
    """Write what is buffered before Python does, which would complain of a closed pipe."""
    if sys.stdout.closed:
        return
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
