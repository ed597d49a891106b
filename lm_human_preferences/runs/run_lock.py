"""SAVE_DIR/lock: a process that writes a run locks this file, and puts its own name into it."""

import contextlib
import io
import os
import socket
import time
from collections.abc import Iterator

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError, os_errors_as
from lm_human_preferences.runs.run_files import LOCK

_HOST = socket.gethostname()


@contextlib.contextmanager
def held(directory: str, ranks: int) -> Iterator[None]:
    """Make and lock a run directory; then delete the lock file, and a new, still empty directory.

    ranks: number of ranks that write the run. UserError if another process has locked it.
    """
    is_new = not os.path.isdir(directory)
    path = os.path.join(directory, LOCK)
    process = f'process {os.getpid()} on {_HOST}, since {time.strftime("%F %T")}, {ranks} rank(s)'
    with contextlib.ExitStack() as stack:
        with os_errors_as(f'--save_dir: {path} cannot be written'):
            os.makedirs(directory, exist_ok=True)
            lock = None
            with contextlib.suppress(BlockingIOError):
                lock = stack.enter_context(storage.open_locked(path))
            holder = _holder(path)
            # Another process may have deleted the file, or replaced it, before it was locked.
            if lock is None or not _is_at(path, lock):
                raise UserError(
                    f'{path}: {holder or "a process"} is writing this run: wait for its end, or use'
                    ' another NAME'
                )
            if holder and f' on {_HOST}, ' not in holder:
                # The file system may not pass locks on to other hosts.
                raise UserError(
                    f'{path}: {holder} is writing this run; if it has ended there, delete this file'
                )
        try:
            with os_errors_as(f'--save_dir: {path} cannot be written'):
                lock.truncate(0)
                os.write(lock.fileno(), process.encode())
            yield
        finally:
            # A user may have deleted it, so that another process has made it anew.
            with contextlib.suppress(OSError):  # an upload has deleted it; or it is not empty
                if _is_at(path, lock):
                    os.remove(path)
                    if is_new:
                        os.rmdir(directory)


def _is_at(path: str, lock: io.FileIO) -> bool:
    return os.path.exists(path) and os.path.samestat(os.stat(path), os.fstat(lock.fileno()))


def _holder(path: str) -> str:
    """Return the beginning of a lock file, which anybody may have made; '' if it is gone."""
    if not os.path.exists(path):
        return ''
    with open(path, 'rb', opener=storage.open_nofollow) as file:
        return file.read(300).decode(errors='replace')


def check_free(directory: str) -> None:
    """Raise UserError if another process writes the run in `directory`."""
    if os.path.exists(os.path.join(directory, LOCK)):
        with held(directory, ranks=0):
            pass


def is_held(directory: str) -> bool:
    """Return whether another process writes the run in a local or remote directory, if known."""
    try:
        check_free(storage.staging_dir(directory))
    except UserError:
        return True
    return False
