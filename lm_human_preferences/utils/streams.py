"""Make stdout and stderr safe: escape control characters, survive closed pipes."""

import atexit
import contextlib
import io
import os
import re
import select
import shutil
import signal
import sys
from collections.abc import Iterator
from typing import Any

STDOUT, STDERR = 1, 2  # file descriptors of the standard streams
_CONTROLS = re.compile(r'[\x00-\x08\x0b-\x1f\x7f-\x9f]')  # control codes except tab and newline
_MOVES_OF_BARS = re.compile(r'\A(?:\r|\n|\x1b\[A)*')  # cursor movements that progress bars print
CLOSED_PIPE = 128 + signal.SIGPIPE  # exit status that shells report for a closed pipe
_LEAST_COLUMNS = 20  # smallest width for output, even on a narrower terminal
# Invisible characters that str.isprintable accepts (Unicode 17.0: Default_Ignorable_Code_Point)
INVISIBLE = re.compile(
    '[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u3164\ufe00-\ufe0f\uffa0'
    '\U000e0100-\U000e01ef]'
)

_terminal_is_gone = False
_notes_are_muted = False


def note(message: str) -> None:
    """Print a line to standard error, unless notes are muted; ignore write errors."""
    if not _notes_are_muted:
        with contextlib.suppress(OSError):
            print(message, file=sys.stderr, flush=True)


def mute_notes(muted: bool) -> None:
    """Make `note` print nothing, or print again if `muted` is False."""
    global _notes_are_muted
    _notes_are_muted = muted


def make_safe() -> None:
    """Make standard streams escape characters that control a terminal or that the encoding lacks.

    Output is dropped if nobody reads it any more.
    """
    os.environ.setdefault('PYTHON_COLORS', '0')  # no coloured tracebacks: colours would be escaped
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors='backslashreplace')
            if 'write' not in vars(stream):
                _escape_controls(stream, has_bars=stream is sys.stderr)
    atexit.unregister(_flush)
    atexit.register(_flush)


def _escape_controls(stream: Any, *, has_bars: bool) -> None:
    """Make `stream` write control characters as escapes such as \\x1b: texts may be untrusted."""
    write = stream.write

    def write_escaped(text: str) -> int:
        """Write `text`, but escape control characters other than cursor moves of progress bars."""
        foreign = text
        if has_bars:
            foreign = _MOVES_OF_BARS.sub('', text, count=1)
        safe = _CONTROLS.sub(lambda match: match[0].encode('unicode_escape').decode(), foreign)
        write(text[: len(text) - len(foreign)] + safe)
        return len(text)

    stream.write = write_escaped


@contextlib.contextmanager
def closed_pipe_is_quiet() -> Iterator[None]:
    """End the process with status 141 if nobody reads the block's output any more."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        poll = select.poll()
        poll.register(sys.stdout, 0)  # polls only for errors, such as a pipe without a reader
        if poll.poll(0):
            sys.exit(CLOSED_PIPE)
        raise  # the closed pipe is not standard output


@contextlib.contextmanager
def lost_output_is_reported() -> Iterator[None]:
    """If the block cannot write to standard output, warn and go on; but raise for a closed pipe."""
    try:
        yield
    except OSError as e:
        if isinstance(e, BrokenPipeError) and not _terminal_is_gone:
            raise
        discard(STDOUT)
        note(f'WARNING: the output cannot be written, and what follows is lost: {e.strerror}')


def leave_closed_terminal() -> None:
    """Discard further output to standard streams if their terminal is gone."""
    global _terminal_is_gone
    _terminal_is_gone = True
    for number in (STDOUT, STDERR):
        try:
            os.write(number, b'')
        except OSError:
            discard(number)


def discard(number: int) -> None:
    """Discard all further output to the file descriptor `number`."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, number)
    os.close(null)


def _flush() -> None:
    """Flush standard output before Python does: Python would complain about a closed pipe."""
    if sys.stdout.closed:
        return
    try:
        sys.stdout.flush()
    except OSError:
        discard(sys.stdout.fileno())


def printable(text: str) -> str:
    """Return `text` with control and invisible characters escaped, as in \\x1b."""
    if text.isprintable() and not INVISIBLE.search(text):  # a fast path for most texts
        return text
    shown = []
    for character in text:
        is_shown = character.isprintable() and not INVISIBLE.match(character)
        shown.append(character if is_shown else character.encode('unicode_escape').decode())
    return ''.join(shown)


def error_line(error: object) -> str:
    """Return the line that reports an error to the user. error: an exception or a message."""
    return f'error: {printable(" ".join(str(error).splitlines()))}'


def columns(most: int) -> int:
    """Return the terminal's width in columns, at most `most`; `most` without a terminal."""
    return max(_LEAST_COLUMNS, min(shutil.get_terminal_size((most, 24)).columns, most))
