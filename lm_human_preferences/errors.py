"""Errors that the user can fix, and command lines to show with them; imports no library."""

import contextlib
import errno
import functools
import importlib.util
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

# Error codes of a full or failing disk, or of missing permissions: no fault of this program.
_OF_DISKS = 'ENOSPC EDQUOT EFBIG EROFS EIO EACCES EPERM ENOTDIR EISDIR'.split()
_ROOT = Path(__file__).parents[1]  # folder of the project


class UserError(ValueError):
    """Mistake of the user. The message names the option or file and the fix; exit status is 2."""


class OptionError(UserError):
    """Mistake in the value of an option or argument; `text` is the message without the option.

    message: begins with `option`, by default its first word.
    """

    def __init__(self, message: str, option: str = '') -> None:
        super().__init__(message)
        self.option = option or message.split()[0]
        self.text = message.removeprefix(self.option).removeprefix(' ')


@contextlib.contextmanager
def disk_errors_reported() -> Iterator[None]:
    """Turn a disk's OSError that the block does not handle into a UserError."""
    try:
        yield
    except OSError as e:
        if errno.errorcode.get(e.errno or 0) not in _OF_DISKS:
            raise
        raise UserError(
            f'{e.filename or "the output"} cannot be read or written ({e.strerror}): make room'
            ' there or permit access, or name another file or folder'
        ) from e


@contextlib.contextmanager
def os_errors_as(failure: str, fix: str = '', kind: type[UserError] = UserError) -> Iterator[None]:
    """Turn an OSError in the block into a UserError that says what failed, why, and the fix."""
    try:
        yield
    except OSError as e:
        raise kind(f'{failure}: {e.strerror or e}{fix}') from e


@contextlib.contextmanager
def no_panics() -> Iterator[None]:
    """Raise RuntimeError if a Rust library panics: `except Exception` would not catch a panic."""
    try:
        yield
    except BaseException as panic:
        if type(panic).__name__ != 'PanicException':
            raise
        raise RuntimeError(f'a Rust library panicked: {panic}') from panic


@contextlib.contextmanager
def about_option(option: str, kind: type[UserError] = UserError) -> Iterator[None]:
    """Turn an error of class `kind` within the block into an OptionError about `option`."""
    try:
        yield
    except kind as e:
        complaint = e.text if isinstance(e, OptionError) else str(e)
        raise OptionError(f'{option} {complaint}', option) from e


# Context manager that makes an OptionError name another option; other errors pass unchanged.
option_renamed = functools.partial(about_option, kind=OptionError)


def typed(command: str, *words: str) -> str:
    """Return `command` and quoted `words` as the user can type them in the project's folder."""
    command = ' '.join([command, *map(shlex.quote, words)])
    folder = os.path.dirname(sys.executable)
    if _is_active(folder):
        return command
    if command.startswith('./'):
        return f'{shlex.quote(sys.executable)} {command}'
    return os.path.join(shlex.quote(folder), command)


def option_words(name: str, value: object) -> list[str]:
    """Return the command-line words, not yet quoted, that set the option `name` to `value`."""
    text = str(value)
    return [f'--{name}={text}'] if text.startswith('-') else [f'--{name}', text]


def _is_active(folder: str) -> bool:
    """Return whether `python3` in the user's shell is the Python in `folder`."""
    python = shutil.which('python3')
    # pipenv puts the environment's folder first in PATH for this process, not for the user's shell.
    if python is None or 'PIPENV_ACTIVE' in os.environ:
        return False
    return os.path.realpath(os.path.dirname(python)) == os.path.realpath(folder)


def require(module: str) -> None:
    """Exit with one line and status 2 unless this Python has the package `module`."""
    if module not in sys.modules and importlib.util.find_spec(module) is None:
        print(f'error: {missing(module)}', file=sys.stderr)
        sys.exit(2)


def missing(module: str) -> str:
    """Return a message on how to install the package `module`, which this Python lacks."""
    environment = shlex.quote(os.path.relpath(_ROOT / '.venv'))
    return (
        f'{sys.executable} has no module {module!r}: `sh tools/setup.sh` installs what this program'
        f' needs into .venv, and `. {environment}/bin/activate` makes this shell use it'
    )
