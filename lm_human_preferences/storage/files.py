"""Local files, written so that a reader finds all of a file or none of it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

from lm_human_preferences.errors import UserError


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
            # The names are on the disk only when the directory is.
            directory = os.open(os.path.dirname(targets[0]) or '.', os.O_RDONLY)
            stack.callback(os.close, directory)
            os.fsync(directory)
    except BaseException:
        for part in parts:
            with contextlib.suppress(OSError):
                os.remove(part)
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
