"""Keys that somebody presses at a terminal, or that come through a pipe."""

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator

import click

AGAIN_SECONDS = 2.0  # in which a keyboard begins to repeat a key that is held down
REPEAT_SECONDS = 0.15  # between two repetitions


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
        self._last, self._when = '', 0.0  # key that was returned last

    def next(self) -> str:
        """Return the next key. KeyboardInterrupt for Ctrl-C, '' for a key with another meaning."""
        while True:
            if not self._waiting:
                self._waiting = self._read()
            key, now = self._waiting.pop(0), time.monotonic()
            is_again = key == self._last and now - self._when < AGAIN_SECONDS
            self._last, self._when = key, now
            if not (self.are_pressed and is_again and self._is_held(key)):
                return key
            click.echo('A key was held down: it counts once.')

    def _is_held(self, key: str) -> bool:
        """Return whether the same key comes on and on; takes all of that."""
        typed = ''.join(self._waiting)
        others = typed.lstrip(key)
        count = len(typed) - len(others)
        while not others and select.select([sys.stdin], [], [], REPEAT_SECONDS)[0]:
            # Click would discard what was pressed before it reads.
            typed = os.read(sys.stdin.fileno(), 1024).decode(errors='replace')
            if not typed:
                raise EOFError
            others = typed.lstrip(key)
            count += len(typed) - len(others)
        self._waiting = list(others)
        return count > 0

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
