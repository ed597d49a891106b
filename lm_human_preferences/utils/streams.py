"""Standard streams that survive control characters, unencodable letters and closed pipes."""

import atexit
import contextlib
import io
import os
import re
import select
import signal
import sys
from collections.abc import Iterator
from typing import Any

STDOUT, STDERR = 1, 2  # file descriptors
_CONTROLS = re.compile(r'[\x00-\x08\x0b-\x1f\x7f-\x9f]')  # all but tabs and line ends
_MOVES_OF_BARS = re.compile(r'\A(?:\r|\n|\x1b\[A)*')  # how progress bars move the cursor on stderr
CLOSED_PIPE = 128 + signal.SIGPIPE  # exit status, as shells report it


_terminal_is_gone = False
_notes_are_muted = False


def note(message: str) -> None:
    """Print a line to standard error; do nothing if that fails."""
    if not _notes_are_muted:
        with contextlib.suppress(OSError):
            print(message, file=sys.stderr, flush=True)


def mute_notes(muted: bool) -> None:
    """Turn `note` off, or on again."""
    global _notes_are_muted
    _notes_are_muted = muted


def make_safe() -> None:
    """Make standard streams escape characters that control a terminal or that the encoding lacks.

    Closed streams are replaced by the null device, and output that nobody reads is dropped.
    """
    os.environ.setdefault('PYTHON_COLORS', '0')  # colours of tracebacks would be escaped
    if sys.stdin is None:  # the file was closed when Python started, as by `<&-`
        sys.stdin = open(os.devnull, encoding='utf-8')
    for name in ('stdout', 'stderr'):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, 'w', encoding='utf-8'))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors='backslashreplace')
            if 'write' not in vars(stream):
                _escape_controls(stream, has_bars=name == 'stderr')
    atexit.unregister(_flush)
    atexit.register(_flush)


def _escape_controls(stream: Any, *, has_bars: bool) -> None:
    """Make `stream` escape control characters, as in \\x1b, since it may print untrusted text."""
    write = stream.write

    def write_escaped(text: str) -> int:
        """Write text with control characters escaped."""
        foreign = text
        if has_bars:
            foreign = _MOVES_OF_BARS.sub('', text, count=1)
        write(text[: len(text) - len(foreign)] + escaped(foreign))
        return len(text)

    stream.write = write_escaped


def escaped(text: str) -> str:
    """Return `text` with control characters, except tabs and line ends, escaped: \\x1b."""
    return _CONTROLS.sub(lambda match: match[0].encode('unicode_escape').decode(), text)


@contextlib.contextmanager
def closed_pipe_is_quiet() -> Iterator[None]:
    """End the process with status 141 if nobody reads the output of the block any more."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        poll = select.poll()
        poll.register(sys.stdout, 0)  # for errors only, such as a pipe without a reader
        if poll.poll(0):
            sys.exit(CLOSED_PIPE)
        raise  # the error of another pipe


@contextlib.contextmanager
def lost_output_is_reported() -> Iterator[None]:
    """Warn if standard output cannot be written, and go on; a closed pipe stays an error."""
    try:
        yield
    except OSError as e:
        if isinstance(e, BrokenPipeError) and not _terminal_is_gone:
            raise
        discard(STDOUT)
        note(f'WARNING: the output cannot be written, and what follows is lost: {e.strerror}')


def leave_closed_terminal() -> None:
    """Discard the output to standard streams whose terminal is gone."""
    global _terminal_is_gone
    _terminal_is_gone = True
    for number in (STDOUT, STDERR):
        try:
            os.write(number, b'')
        except OSError:
            discard(number)


def discard(number: int) -> None:
    """Discard the output to a file descriptor from now on."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, number)
    os.close(null)


def _flush() -> None:
    """Flush before Python's own flush, which would complain about a closed pipe."""
    if sys.stdout.closed:
        return
    try:
        sys.stdout.flush()
    except OSError:
        discard(sys.stdout.fileno())
