"""Upload of a run from a staging directory to a remote one, where listed checkpoints stay whole.

REMOTE/writer is a lease: the staging directory that wrote last, and the process that writes now.
That staging directory has everything in the store; any other one is out of date.
"""

import contextlib
import hashlib
import io
import os
import re
import secrets
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from lm_human_preferences import shell, storage
from lm_human_preferences.checkpointing import names
from lm_human_preferences.errors import UserError
from lm_human_preferences.runs.run_files import LABELS
from lm_human_preferences.storage import local_files
from lm_human_preferences.utils.logging import announce

LEASE = 'writer'
POLL_SECONDS = 1  # between two looks for a new checkpoint
# Between two uploads of TensorBoard's files; a lease that is half as old is renewed then.
SYNC_SECONDS = 120
LEASE_TIMEOUT = 5 * SYNC_SECONDS  # a lease that is older belongs to a dead process
RETRY_SECONDS = 20  # between tries while the store cannot be reached
CLOSE_TIMEOUT = 600  # seconds of tries when the run is done


class LeaseLost(UserError):
    """Another process writes the remote directory."""


def last_writer(url: str) -> tuple[str, str, float]:
    """Return (lease id or '', process that writes now or '', age in seconds) of a lease."""
    path = storage.join(url, LEASE)
    try:
        age = time.time() - storage.stat(path).mtime
        lease_id, _, process = storage.read_text(path).partition(' ')
    except storage.NotFound:
        return '', '', 0
    return lease_id, process, age


def is_up_to_date(url: str, directory: str) -> bool:
    """Return whether a staging directory has everything in the store; LeaseLost if it is in use."""
    storage.check_access(url)
    lease_id, process, age = last_writer(url)
    path = os.path.join(directory, LEASE)  # with those under which it was uploaded or fetched
    own_leases = storage.read_text(path).split() if os.path.exists(path) else []
    if lease_id in own_leases or (own_leases and not lease_id):
        return True
    if process and age < LEASE_TIMEOUT:
        minutes = (LEASE_TIMEOUT - age) / 60
        raise LeaseLost(
            f'{url}: {process} is writing this run: wait for its end, or use another NAME; if it'
            f' was killed, try again in {minutes:.0f} minutes'
        )
    return False


def _record_lease(directory: str, lease_id: str) -> None:
    os.makedirs(directory, exist_ok=True)
    with open(os.path.join(directory, LEASE), 'a', encoding='utf-8') as file:
        file.write(f'{lease_id}\n')


def fetch(url: str, directory: str, pattern: re.Pattern[str]) -> None:
    """Download a run's files that match `pattern`; values of the latest checkpoints only."""
    lease_id, *_ = last_writer(url)
    for path in local_files(directory, pattern):
        os.remove(os.path.join(directory, path))
    remote = [path for path in storage.listing(url) if pattern.fullmatch(path)]
    listed = set()
    with_values = set()
    for path in remote:
        if _is_list(path):
            stems = _listed(path, storage.read_text(storage.join(url, path)))
            resumable = [stem for stem in stems if stem + names.RESUME in remote]
            listed.update(stems)
            with_values.update(stems[-1:], resumable[-1:])
    wanted = []
    for path in remote:
        stem = _stem(path)
        without_values = stem in listed and not path.endswith(names.DATA)
        if stem is None or stem in with_values or without_values:
            wanted.append(path)
    copies = storage.cached_paths([storage.join(url, path) for path in wanted])
    for path, copy in zip(wanted, copies, strict=True):
        target = os.path.join(directory, path)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.replace(copy, target)
    _record_lease(directory, lease_id)


def _is_list(path: str) -> bool:
    """Return whether a file is a list of checkpoints."""
    return os.path.basename(path) == names.LIST


def _stem(path: str) -> str | None:
    """Return the checkpoint of a file, its path without the suffix; None for other files."""
    match = names.FILE.fullmatch(os.path.basename(path))
    return match and os.path.join(os.path.dirname(path), match[1])


def _listed(path: str, text: str) -> list[str]:
    """Return the checkpoints in the list at `path` with this text, the latest last."""
    directory = os.path.dirname(path)
    return [os.path.join(directory, name) for name in names.parse_checkpoint_file(text)]


class DirectoryUploader:
    """Upload of files that match `pattern` to `url`. process: description of this process."""

    def __init__(self, url: str, directory: str, pattern: re.Pattern[str], process: str) -> None:
        self.url = url
        self.directory = directory
        self.pattern = pattern
        self.process = process
        self.lease_id = secrets.token_hex(8)
        # {name: (size, MD5)} of what the store has, if that is known
        self.remote_files: dict[str, tuple[int, str | None]] | None = None
        self.last_error: Exception | None = None  # None when all was uploaded
        self.closing = threading.Event()
        self.thread = threading.Thread(target=self._sync_repeatedly, daemon=True)

    def start(self) -> None:
        """Take the lease and begin; UserError if another process has it, or without access."""
        is_up_to_date(self.url, self.directory)
        # Recorded here first: a lease in the store is always known to its staging directory.
        _record_lease(self.directory, self.lease_id)
        try:
            self._renew_lease(self.process)
        except storage.StorageError as e:
            raise UserError(f'--save_dir: {e}') from e
        self.thread.start()

    def _renew_lease(self, process: str) -> None:
        self._write(LEASE, f'{self.lease_id} {process}'.encode())

    def _write(self, path: str, data: bytes) -> tuple[int, str]:
        return storage.write(storage.join(self.url, path), io.BytesIO(data), len(data))

    def _sync_repeatedly(self) -> None:
        """Upload after each checkpoint, and at intervals, until closing."""
        seen = None
        due = 0.0
        while not self.closing.wait(POLL_SECONDS):
            with contextlib.suppress(FileNotFoundError):  # deleted while this looks
                now = self._modification_times()
                has_changed = now != seen and not self.last_error
                if has_changed or time.monotonic() > due:
                    start = time.monotonic()
                    delay = SYNC_SECONDS if self.try_sync() else RETRY_SECONDS
                    due = start + delay
                    seen = now

    def _modification_times(self) -> list[int]:
        """Return the times of files, except checkpoints (see their list), events and labels."""
        times = []
        for path in local_files(self.directory, self.pattern):
            if _stem(path) is None and not path.startswith(('tb/', f'{LABELS}/')):
                times.append(os.stat(os.path.join(self.directory, path)).st_mtime_ns)
        return times

    def try_sync(self) -> bool:
        """Upload, and return whether all is there now; print a failure, but not its repetitions."""
        try:
            self.sync()
        except FileNotFoundError:  # deleted meanwhile, for a newer checkpoint
            self.remote_files = None
            return False
        except (LeaseLost, storage.StorageError, OSError) as e:
            if not self.last_error:
                announce(f'WARNING: uploads are delayed, and tried again: {e}')
            self.remote_files = None
            self.last_error = e
            return False
        if self.last_error:
            announce(f'note: uploads to {self.url} are up to date again')
            self.last_error = None
        return True

    def sync(self) -> None:
        """Upload new files, and delete old ones; an error at any point leaves listed ones whole."""
        self._check_lease()
        if self.remote_files is None:
            self.remote_files = storage.listing(self.url)
        lists = {}
        for path in local_files(self.directory, self.pattern):
            if _is_list(path):
                lists[path] = Path(self.directory, path).read_bytes()
        kept = set()
        for path, text in lists.items():
            kept.update(_listed(path, text.decode()))
        # Looked for after the lists: a checkpoint may be saved, or deleted, at any moment.
        files = []
        for path in local_files(self.directory, self.pattern):
            if not _is_list(path) and _stem(path) in (None, *kept):
                files.append(path)
        for stem in kept:
            for path in (stem + names.DATA, stem + names.INDEX):
                if path not in files and path not in self.remote_files:
                    raise FileNotFoundError(path)
        changed = [path for path in files if self._differs(path)]
        for path, text in lists.items():
            self._unlist(path, text.decode(), changed)
        for path in sorted(changed, key=lambda path: _stem(path) is not None):
            with open(os.path.join(self.directory, path), 'rb') as file:
                size = os.fstat(file.fileno()).st_size
                self.remote_files[path] = storage.write(storage.join(self.url, path), file, size)
        for path, text in lists.items():
            if self.remote_files.get(path) != (len(text), hashlib.md5(text).hexdigest()):
                self.remote_files[path] = self._write(path, text)
        gone = []
        for path in self.remote_files:
            is_ours = self.pattern.fullmatch(path)
            if is_ours and path not in (*lists, *files) and _stem(path) not in kept:
                gone.append(path)
        self._remove(gone)

    def _check_lease(self) -> None:
        """Renew the lease in time; LeaseLost if another process has taken it."""
        lease_id, process, age = last_writer(self.url)
        if lease_id not in ('', self.lease_id):
            raise LeaseLost(f'{self.url} was taken over by {process or "another run"}')
        if not lease_id or age > SYNC_SECONDS / 2:
            self._renew_lease(self.process)

    def _differs(self, path: str) -> bool:
        """Return whether the store lacks a local file, or has another version."""
        assert self.remote_files is not None
        if path not in self.remote_files:
            return True
        local = os.path.join(self.directory, path)
        return (os.path.getsize(local), storage.md5(local)) != self.remote_files[path]

    def _unlist(self, path: str, text: str, changed: list[str]) -> None:
        """Remove checkpoints to be replaced from the remote list; text: of the local list."""
        assert self.remote_files is not None
        if path not in self.remote_files:
            return
        stems = _listed(path, text)
        replaced = {_stem(file) for file in changed if file in self.remote_files}
        if not replaced.intersection(stems):
            return
        changing = {_stem(file) for file in changed}
        safe = [os.path.basename(stem) for stem in stems if stem not in changing]
        if safe:
            self.remote_files[path] = self._write(path, names.format_checkpoint_file(safe))
        else:
            self._remove([path])

    def _remove(self, paths: Iterable[str]) -> None:
        """Delete files in the store, lists before what they name."""
        assert self.remote_files is not None
        for path in sorted(paths, key=lambda path: not _is_list(path)):
            storage.remove(storage.join(self.url, path))
            del self.remote_files[path]

    def close(self, timeout: float) -> None:
        """Upload the rest and give the lease back; UserError if `timeout` seconds pass."""
        self.closing.set()
        self.thread.join()
        deadline = time.monotonic() + timeout
        if self.last_error and timeout:
            announce(f'note: trying to upload the rest, for up to {timeout / 60:.0f} minutes')
        while not self.try_sync():
            if isinstance(self.last_error, LeaseLost) or time.monotonic() > deadline:
                reason = self.last_error or 'a file is missing'
                command = shell.typed('./launch.py resume', self.url)
                raise UserError(
                    f'{self.url} is not complete: {reason}; all of the run is in'
                    f' {self.directory}, and `{command}` here uploads the rest'
                ) from self.last_error
            time.sleep(RETRY_SECONDS)
        with contextlib.suppress(storage.StorageError):
            self._renew_lease('')


@contextlib.contextmanager
def uploaded(url: str, directory: str, pattern: re.Pattern[str], process: str) -> Iterator[None]:
    """Upload a directory during the block, and delete it afterwards unless something failed."""
    uploader = DirectoryUploader(url, directory, pattern, process)
    uploader.start()
    try:
        yield
    except BaseException:
        try:
            uploader.close(0)
        except UserError as e:
            announce(f'WARNING: {e}')
        raise
    uploader.close(CLOSE_TIMEOUT)
    for path in [*local_files(directory, pattern), LEASE]:
        os.remove(os.path.join(directory, path))
    for folder, *_ in os.walk(directory, topdown=False):
        with contextlib.suppress(OSError):  # it is not empty
            os.rmdir(folder)
