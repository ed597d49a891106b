"""Keys that somebody presses at a terminal, or that come through a pipe."""

import contextlib
import re
import sys
import termios
import tty
from collections.abc import Iterator

import click


@contextlib.contextmanager
def keys_at_once() -> Iterator[None]:
    """Read a terminal without Enter and echo within the block."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _lines_at_once() -> Iterator[None]:
    """Show a line that is typed on the terminal within the block, and let it be edited."""
    before = termios.tcgetattr(sys.stdin)
    mode = termios.tcgetattr(sys.stdin)
    mode[tty.IFLAG] |= termios.ICRNL  # Enter ends the line
    mode[tty.LFLAG] |= termios.ICANON | termios.ECHO
    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, mode)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


class Keys:
    """Keys as they are pressed on a terminal, or characters of a pipe; EOFError at its end."""

    def __init__(self) -> None:
        self.are_pressed = sys.stdin.isatty()
        self._waiting: list[str] = []

    def next(self) -> str:
        """Return the next key. KeyboardInterrupt for Ctrl-C, '' for a key with another meaning."""
        if not self._waiting:
            self._waiting = self._read()
        return self._waiting.pop(0)

    def line(self) -> str:
        """Return the text before the next Enter. Raises as `next` does."""
        typed = ''.join(self._waiting)
        self._waiting = []
        end = re.search('[\r\n]', typed)
        if end is not None:
            self._waiting = list(typed[end.end() :])
            return typed[: end.start()]
        with _lines_at_once() if self.are_pressed else contextlib.nullcontext():
            line = sys.stdin.readline()
        if not line:
            raise EOFError
        return typed + line

    def _read(self) -> list[str]:
        if not self.are_pressed:
            character = sys.stdin.read(1)
            while character == '\n':  # keys may be on lines of their own
                character = sys.stdin.read(1)
            if not character:
                raise EOFError
            return [character]
        pressed = click.getchar()
        # An arrow or a function key is several characters; so are keys pressed at one moment.
        return [''] if pressed.startswith('\x1b') else list(pressed)
