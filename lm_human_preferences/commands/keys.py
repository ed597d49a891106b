"""Keys pressed at a terminal, or read from a pipe."""

import contextlib
import sys
import termios
import time
import tty
from collections.abc import Iterator

import click

REPEAT_SECONDS = 0.5  # a key repeated so soon is held down, or pressed by mistake


@contextlib.contextmanager
def keys_at_once() -> Iterator[None]:
    """Make keys available at once within the block, without Enter, and do not echo them."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


class Keys:
    """Keys pressed on a terminal, or characters of a pipe; EOFError at the end of the pipe."""

    def __init__(self) -> None:
        self.are_pressed = sys.stdin.isatty()
        self._waiting: list[str] = []
        self._last, self._when = '', 0.0  # last key, and when it came

    def next(self) -> str:
        """Return the next key, or '' for an arrow or function key; KeyboardInterrupt for Ctrl-C."""
        while True:
            if not self._waiting:
                self._waiting = self._read()
            key, now = self._waiting.pop(0), time.monotonic()
            is_held = key == self._last and now - self._when < REPEAT_SECONDS
            self._last, self._when = key, now
            if not (self.are_pressed and is_held):
                return key

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
