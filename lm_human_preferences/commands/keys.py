"""Keys that somebody presses at a terminal, or that come through a pipe."""

import contextlib
import sys
import termios
import time
import tty
from collections.abc import Iterator

import click

REPEAT_SECONDS = 0.5  # the same key within this time is held down, or pressed by mistake


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


class Keys:
    """Keys as they are pressed on a terminal, or characters of a pipe; EOFError at its end."""

    def __init__(self) -> None:
        self.are_pressed = sys.stdin.isatty()
        self._waiting: list[str] = []
        self._last, self._when = '', 0.0  # key that came last

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
