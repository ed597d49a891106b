"""Errors that the user can fix."""

import contextlib
import errno
import functools
from collections.abc import Iterator

# Errors of a disk or its permissions, not of this program.
_OF_DISKS = 'ENOSPC EDQUOT EFBIG EROFS EIO EACCES EPERM ENOTDIR EISDIR'.split()


class UserError(ValueError):
    """Mistake of the user: one line with the option or file and the fix; exit status 2."""


class OptionError(UserError):
    """Mistake in the value of one option or argument: str(e) is OPTION TEXT."""

    def __init__(self, option: str, text: str) -> None:
        super().__init__(f'{option} {text}')
        self.option = option
        self.text = text


@contextlib.contextmanager
def disk_errors_reported() -> Iterator[None]:
    """Turn an OSError of a disk that is not handled within the block into a UserError."""
    try:
        yield
    except OSError as e:
        if errno.errorcode.get(e.errno or 0) not in _OF_DISKS:
            raise
        raise UserError(
            f'{e.filename or "the output"} cannot be read or written ({e.strerror}): make room'
            ' there, or name another place'
        ) from e


@contextlib.contextmanager
def os_errors_as(what: str, fix: str = '', kind: type[UserError] = UserError) -> Iterator[None]:
    """Turn an OSError within the block into a `kind` of error: `what`, the reason, `fix`."""
    try:
        yield
    except OSError as e:
        raise kind(f'{what}: {e.strerror or e}{fix}') from e


@contextlib.contextmanager
def no_panics() -> Iterator[None]:
    """Turn a panic of a Rust library, which is not an Exception, into a RuntimeError."""
    try:
        yield
    except BaseException as e:
        if type(e).__name__ != 'PanicException':
            raise
        raise RuntimeError(str(e)) from e


@contextlib.contextmanager
def about_option(option: str, kind: type[UserError] = UserError) -> Iterator[None]:
    """Turn an error of class `kind` within the block into an OptionError about `option`."""
    try:
        yield
    except kind as e:
        text = e.text if isinstance(e, OptionError) else str(e)
        raise OptionError(option, text) from e


# Changes the option that an OptionError names; passes on other errors.
option_renamed = functools.partial(about_option, kind=OptionError)
