"""Local files: atomic writing, locks, checks of output paths, free space."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import io
import json
import os
import re
import shutil
import stat
import tempfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from google_crc32c import value as crc32c

from lm_human_preferences.errors import UserError, os_errors_as
from lm_human_preferences.storage.paths import is_remote

if TYPE_CHECKING:
    import numpy as np

AnyFile = TypeVar('AnyFile')
_not_inherited: weakref.WeakSet[Any] = weakref.WeakSet()
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # errors on file systems without locks


def open_nofollow(path: str, flags: int, mode: int = 0o666) -> int:
    """Open a file without following links, as an `opener` of open; OSError for a link or a pipe."""
    if os.path.islink(path):
        raise OSError(errno.ELOOP, 'it is a symbolic link: put the file itself in its place', path)
    # Without O_NONBLOCK, opening a pipe would wait until somebody opens its other end.
    number = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, mode)
    kind = os.fstat(number).st_mode
    if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):  # directories are refused by `open` itself
        os.close(number)
        raise OSError(errno.EINVAL, 'it is a pipe or a device: put a file in its place', path)
    return number


open_private = functools.partial(open_nofollow, mode=0o600)  # makes new files private to the owner


def is_within(path: str, directory: str) -> bool:
    """Return whether a local path lies below a directory, after resolving all links."""
    return os.path.realpath(path).startswith(os.path.join(os.path.realpath(directory), ''))


@contextlib.contextmanager
def atomic_write(*targets: str, by: str | None = None) -> Iterator[list[BinaryIO]]:
    """Yield open files, which replace `targets` in order if the block ends without an error.

    A killed process leaves TARGET.BY.part. by: the writer's name, by default its process number.
    """
    parts = [f'{target}.{by or os.getpid()}.part' for target in targets]
    try:
        with contextlib.ExitStack() as stack:
            files: list[BinaryIO] = []
            for part in parts:
                files.append(stack.enter_context(open(part, 'wb', opener=open_nofollow)))
            yield files
            for file in files:
                file.flush()
                os.fsync(file.fileno())
            for part, target in zip(parts, targets, strict=True):
                os.replace(part, target)
            sync_directory(os.path.dirname(targets[0]))
    except BaseException as e:
        for part in parts:
            with contextlib.suppress(OSError):
                os.remove(part)
        if isinstance(e, OSError):
            e.filename = e.filename or targets[0]  # the error for a full disk names no file
        raise


def sync_directory(directory: str) -> None:
    """Flush a directory's file names to the disk, as fsync of a file flushes only its content."""
    number = os.open(directory or '.', os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def append(file: io.FileIO, data: bytes, *, sync: bool) -> None:
    """Append `data` to an unbuffered file, completely or not at all. sync: also flush to disk."""
    begin = file.seek(0, io.SEEK_END)
    rest = memoryview(data)
    try:
        while rest:  # a write to a nearly full disk may store only some of the bytes
            rest = rest[file.write(rest) :]
        if sync:
            os.fsync(file.fileno())
    except BaseException as e:
        with contextlib.suppress(OSError):
            file.truncate(begin)
        if isinstance(e, OSError):
            e.filename = file.name
        raise


def closed_after_fork(file: AnyFile) -> AnyFile:
    """Return a file or socket, and close it in all processes that are forked from now on."""
    _not_inherited.add(file)
    return file


def _close_after_fork() -> None:
    for file in list(_not_inherited):
        file.close()


os.register_at_fork(after_in_child=_close_after_fork)


def open_locked(path: str, opener: Callable[[str, int], int] = open_nofollow) -> io.FileIO:
    """Open a file for appending, and lock it until it is closed; BlockingIOError if locked already.

    Forked processes do not inherit the lock. filelock is not used, since it needs a second file and
    follows links.
    """
    file = closed_after_fork(io.FileIO(path, 'ab+', opener=opener))
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        if e.errno not in NO_LOCKS:
            file.close()
            raise
    return file


@contextlib.contextmanager
def locked_folder(path: str) -> Iterator[None]:
    """Lock a folder within the block, if the file system can; other processes wait meanwhile."""
    number = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some file systems do not lock folders
            fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)


def write_bytes(path: str, data: bytes) -> None:
    """Write a local file atomically; make its directory if it is missing."""
    os.makedirs(os.path.dirname(path) or '.', exist_ok=True)
    with atomic_write(path) as (file,):
        file.write(data)


def write_json(path: str, value: Any) -> None:
    """Write `value` to a local JSON file, indented as in the original; UserError if that fails."""
    with os_errors_as(f'cannot write {path}'):
        write_bytes(path, json.dumps(value, indent=2).encode())


def write_file(path: str, data: bytes) -> None:
    """Write an output file of a command atomically; UserError if that fails."""
    with os_errors_as(f'{path} cannot be written'):
        write_bytes(path, data)


def check_output_dir(directory: str) -> None:
    """Make the directory of --output_dir; UserError unless files can be written there."""
    if is_remote(directory):
        raise UserError(f'--output_dir: {directory} is remote; give a local directory')
    with os_errors_as(f'--output_dir: cannot write to {directory}', '; give another directory'):
        os.makedirs(directory, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass


def check_new_file(path: str) -> None:
    """Raise UserError unless a new file can be made at `path`."""
    if path in ('', '-') or is_remote(path):
        raise UserError(f'{path!r}: give the name of a local file')
    if os.path.lexists(path):
        raise UserError(f'{path} exists already: give another name')
    if not os.access(os.path.dirname(path) or '.', os.W_OK | os.X_OK):
        raise UserError(f'{path!r}: there is no such directory, or you may not write there')


@contextlib.contextmanager
def new_directory(path: str, *errors: type[Exception]) -> Iterator[None]:
    """Make a directory for the block to fill; delete it if the block fails.

    UserError if it is not empty, or if the block raises an OSError or one of `errors`.
    """
    if is_remote(path):
        raise UserError(f'{path} is remote; give a local directory')
    if os.path.lexists(path) and not (os.path.isdir(path) and not os.listdir(path)):
        raise UserError(f'{path} is not empty: give a new directory')
    try:
        os.makedirs(path, exist_ok=True)
        yield
    except BaseException as e:
        shutil.rmtree(path, ignore_errors=True)
        if isinstance(e, (OSError, *errors)):
            reason = getattr(e, 'strerror', None) or e
            raise UserError(f'{path!r} cannot be written: {reason}') from e
        raise


def local_files(directory: str, pattern: re.Pattern[str]) -> list[str]:
    """Return sorted relative paths of the files below a local directory that match `pattern`."""
    files = filter(Path.is_file, Path(directory).rglob('*'))
    names = (str(path.relative_to(directory)) for path in files)
    return sorted(filter(pattern.fullmatch, names))


def open_to_others(path: str) -> str | None:
    """Return a reason why other users could replace the file or folder at `path`, or None.

    They can if everybody may write to it or to a folder above it, or if one of these belongs to
    another user and is in a folder like /tmp. Owners of folders elsewhere, groups, and mounts of
    root or of this user are trusted.
    """
    for end in dict.fromkeys((Path(os.path.abspath(path)), Path(os.path.realpath(path)))):
        is_shared = False
        for part in filter(os.path.lexists, [*reversed(end.parents), end]):
            state = part.lstat()
            is_foreign = state.st_uid not in (0, os.geteuid())
            if is_foreign and is_shared:
                return f'{part} belongs to another user, who could replace what is in it'
            if stat.S_ISLNK(state.st_mode) or not state.st_mode & stat.S_IWOTH:
                continue
            is_sticky = bool(state.st_mode & stat.S_ISVTX)
            # Mount points are trusted, because everybody may write to many container volumes.
            if is_foreign or not (is_sticky or os.path.ismount(part)):
                return f'everybody may write to {part}, and replace what is in it'
            is_shared = is_shared or is_sticky
    return None


def free_bytes(directory: str) -> int:
    """Return the free bytes on the disk of a directory that may not exist yet."""
    return shutil.disk_usage(existing_part(directory)).free


def existing_part(path: str) -> str:
    """Return `path` if it exists, or else the deepest existing folder above it."""
    while not os.path.exists(path):
        path = os.path.dirname(path) or '.'
    return path


def md5(path: str) -> str:
    """Return the MD5 of a local file in hexadecimal; reads an unchanged file only once."""
    stat = os.stat(path)
    return _md5(path, stat.st_size, stat.st_mtime_ns)


@functools.cache
def _md5(path: str, size: int, modified: int) -> str:
    with open(path, 'rb') as file:
        return hashlib.file_digest(file, 'md5').hexdigest()


def masked_crc(data: bytes | bytearray | memoryview | np.ndarray) -> int:
    """Return the CRC32C of a bytes-like object as TensorFlow stores it (lib/hash/crc32c.h)."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
