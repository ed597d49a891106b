"""Local files, written so that a reader finds all of a file or none of it."""

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
from collections.abc import Iterator
from typing import Any, BinaryIO, TextIO

from lm_human_preferences.errors import UserError

NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # of a file system that knows none


def open_nofollow(path: str, flags: int) -> int:
    """For open(..., opener=...): a link raises OSError, since its target may be anybody's file."""
    # A pipe is not waited for, either.
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


@contextlib.contextmanager
def atomic_write(*targets: str, by: str | None = None) -> Iterator[list[BinaryIO]]:
    """Open files that replace the local `targets`, in this order, once all are on the disk.

    After an error every target is what it was, unless the error came between two renames. A kill
    leaves TARGET.BY.part behind, where `by` is the number of this process unless given.
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
    except BaseException:
        for part in parts:
            with contextlib.suppress(OSError):
                os.remove(part)
        raise


def sync_directory(directory: str) -> None:
    """Have the names in a directory on the disk: without this, only the contents of files are."""
    number = os.open(directory or '.', os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def append(file: io.FileIO, data: bytes, *, sync: bool) -> None:
    """Add all of `data` to the end of an unbuffered file, or nothing; sync: have it on the disk."""
    begin = file.seek(0, io.SEEK_END)
    rest = memoryview(data)
    try:
        while rest:  # a disk that becomes full takes a part, and fails the next time
            rest = rest[file.write(rest) :]
        if sync:
            os.fsync(file.fileno())
    except BaseException:
        with contextlib.suppress(OSError):
            file.truncate(begin)
        raise


def lock_file(file: io.FileIO | TextIO) -> None:
    """Lock a file until it is closed; BlockingIOError if another process has locked it.

    On a file system without locks nothing happens.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        if e.errno not in NO_LOCKS:
            raise


def write_bytes(path: str, data: bytes) -> None:
    """Write a local file whole or not at all, and make its directory if need be."""
    os.makedirs(os.path.dirname(path) or '.', exist_ok=True)
    with atomic_write(path) as (file,):
        file.write(data)


def write_json(path: str, value: Any) -> None:
    """Write `value` to a local file, indented as the original did; UserError if that fails."""
    try:
        write_bytes(path, json.dumps(value, indent=2).encode())
    except OSError as e:
        raise UserError(f'cannot write {path}: {e.strerror}') from e


def local_files(directory: str, pattern: re.Pattern[str]) -> list[str]:
    """The files below a local directory whose relative paths match `pattern`, sorted."""
    matching = []
    for folder, _, names in os.walk(directory):
        for name in names:
            path = os.path.relpath(os.path.join(folder, name), directory)
            if pattern.fullmatch(path):
                matching.append(path)
    return sorted(matching)


def md5(path: str) -> str:
    """The MD5 of a local file, in hexadecimal; computed again only if the file has changed."""
    stat = os.stat(path)
    return _md5(path, stat.st_size, stat.st_mtime_ns)


@functools.cache
def _md5(path: str, size: int, modified: int) -> str:
    with open(path, 'rb') as file:
        return hashlib.file_digest(file, 'md5').hexdigest()
