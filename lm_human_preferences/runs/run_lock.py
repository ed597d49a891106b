"""SAVE_DIR/lock says which process writes a run; it is locked as long as that process lives.

A killed process leaves the file behind, but not the lock, so that the next one can take it over.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from typing import TextIO

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError
from lm_human_preferences.runs.run_files import LOCK

_HOST = socket.gethostname()
_MAX_LENGTH = 300  # characters that are read of a file that somebody else may have made


def describe_process(size: int) -> str:
    """What the lock says of this process, for other people to read. size: the number of ranks."""
    return f'process {os.getpid()} on {_HOST}, since {time.strftime("%F %T")}, {size} rank(s)'


def acquire(directory: str) -> tuple[TextIO, str]:
    """Lock a run directory, which is made, until the returned file is closed.

    Returns (the file, what a holder that was killed has left in it). UserError if another process
    has the lock.
    """
    path = os.path.join(directory, LOCK)
    try:
        os.makedirs(directory, exist_ok=True)
        lock = open(path, 'a+', encoding='utf-8', errors='replace', opener=storage.open_nofollow)
    except OSError as e:
        raise UserError(f'--save_dir: {path} cannot be written: {e.strerror}') from e
    try:
        return lock, _lock(lock, path)
    except BaseException:  # Ctrl-C too: nobody else could close the file
        lock.close()
        raise


def _lock(lock: TextIO, path: str) -> str:
    """Lock the open file at `path`; see acquire for what it returns and raises."""
    lock.seek(0)
    holder = lock.read(_MAX_LENGTH)
    try:
        storage.lock_file(lock)
        if not os.path.exists(path) or not os.path.samestat(os.stat(path), os.fstat(lock.fileno())):
            raise BlockingIOError  # another process has deleted it, and perhaps made it anew
    except BlockingIOError:
        who = holder or 'a process'
        raise UserError(
            f'{path}: {who} is writing this run: wait for its end, or take another NAME'
        ) from None
    except OSError as e:
        raise UserError(f'--save_dir: {path} cannot be written: {e.strerror}') from e
    if holder and f' on {_HOST}, ' not in holder:
        # The file system may not pass locks on to other hosts.
        raise UserError(
            f'{path}: {holder} is writing this run; if it has ended there, delete this file'
        )
    return holder


def check_free(directory: str) -> None:
    """UserError if another process writes the run in `directory`."""
    if os.path.exists(os.path.join(directory, LOCK)):
        lock, _ = acquire(directory)
        lock.close()


def release(directory: str | None, *, and_directory: bool = True) -> None:
    """Remove the lock of a run whose processes have ended, unless another job has it by now.

    and_directory: whether to remove the directory too, if it is empty then.
    """
    path = os.path.join(directory or '', LOCK)
    if directory is None or not os.path.exists(path):
        return
    # A UserError: another job has the run, on this host or another one. An OSError: the directory
    # is not empty.
    with contextlib.suppress(UserError, OSError):
        lock, _ = acquire(directory)
        with lock:
            os.remove(path)
        if and_directory:
            os.rmdir(directory)


def size_of_holder(directory: str) -> int | None:
    """The number of ranks of the job that has, or had, the lock; None where nothing tells."""
    path = os.path.join(directory, LOCK)
    try:
        with open(path, encoding='utf-8', errors='replace', opener=storage.open_nofollow) as lock:
            match = re.search(r'(\d+) rank', lock.read(_MAX_LENGTH))
    except OSError:
        return None
    return int(match[1]) if match else None
