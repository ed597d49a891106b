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
_MAX_LENGTH = 300  # most characters to read, as anybody may have made the file


def acquire(directory: str) -> io.FileIO:
    """Make and lock a run directory; return the file that holds the lock until it is closed."""
    path = os.path.join(directory, LOCK)
    with os_errors_as(f'--save_dir: {path} cannot be written'):
        os.makedirs(directory, exist_ok=True)
        try:
            lock = storage.open_locked(path, 'ab+')
        except BlockingIOError:
            with open(path, 'rb', buffering=0, opener=storage.open_nofollow) as file:
                raise _held(path, _holder(file)) from None
    try:
        holder = _holder(lock)
        if not os.path.exists(path) or not os.path.samestat(os.stat(path), os.fstat(lock.fileno())):
            raise _held(path, holder)  # another process has deleted the file, or replaced it
        if holder and f' on {_HOST}, ' not in holder:
            # The file system may not pass locks on to other hosts.
            raise UserError(
                f'{path}: {holder} is writing this run; if it has ended there, delete this file'
            )
        return lock
    except BaseException:  # Ctrl-C too: nobody else could close the file
        lock.close()
        raise


def _holder(file: io.FileIO) -> str:
    file.seek(0)
    return file.read(_MAX_LENGTH).decode(errors='replace')


def _held(path: str, holder: str) -> UserError:
    who = holder or 'a process'
    return UserError(f'{path}: {who} is writing this run: wait for its end, or use another NAME')


@contextlib.contextmanager
def held(directory: str, ranks: int) -> Iterator[None]:
    """Hold a run directory's lock; then delete the lock file, and a new, still empty directory."""
    is_new = not os.path.isdir(directory)
    with acquire(directory) as lock:
        try:
            _name_holder(lock, ranks)
            yield
        finally:
            # A user may have deleted it, so that another process has made it anew.
            with contextlib.suppress(OSError):  # an upload has deleted it; or it is not empty
                if os.path.samestat(os.stat(lock.name), os.fstat(lock.fileno())):
                    os.remove(lock.name)
                    if is_new:
                        os.rmdir(directory)


def _name_holder(lock: io.FileIO, ranks: int) -> None:
    """Write into the lock file which process holds it; UserError on a full disk."""
    process = f'process {os.getpid()} on {_HOST}, since {time.strftime("%F %T")}, {ranks} rank(s)'
    with os_errors_as(f'--save_dir: {lock.name} cannot be written'):
        lock.truncate(0)
        os.write(lock.fileno(), process.encode())


def check_free(directory: str) -> None:
    """Raise UserError if another process writes the run in `directory`."""
    if os.path.exists(os.path.join(directory, LOCK)):
        acquire(directory).close()


def is_held(directory: str) -> bool:
    """Return whether another process writes the run in a local or remote directory, if known."""
    try:
        check_free(storage.staging_dir(directory))
    except UserError:
        return True
    return False
