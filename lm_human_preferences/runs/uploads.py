"""Upload of a run from a staging directory to a remote one, where listed checkpoints stay whole.

The staging directory keeps in UPLOADED the MD5 of each list of checkpoints that it has uploaded. If
the store has another list, somebody else has gone on with the run, and this directory is out of
date.
"""

import contextlib
import hashlib
import io
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from lm_human_preferences import shell, storage
from lm_human_preferences.checkpointing import names
from lm_human_preferences.errors import UserError
from lm_human_preferences.storage import local_files
from lm_human_preferences.utils.logging import announce

Files = dict[str, tuple[int, str | None]]  # {path: (size, MD5 or None)} of a remote directory

UPLOADED = 'uploaded'
SYNC_SECONDS = 20  # between two looks for what has changed
CLOSE_TIMEOUT = 600  # seconds of tries when the run is done


class TakenOver(storage.StorageError):
    """Another process has uploaded checkpoints to the remote directory."""


def is_up_to_date(url: str, directory: str) -> bool:
    """Return whether a staging directory has everything that the store has."""
    lists = _lists_in(url, storage.listing(url))
    return os.path.isdir(directory) and _has_uploaded(directory, lists)


def _lists_in(url: str, remote: Files) -> dict[str, str]:
    """Return {path: MD5} of the lists of checkpoints among the files of the store."""
    lists = {}
    for path, (_, md5) in remote.items():
        if _is_list(path):
            lists[path] = md5 or _md5(_read(url, path))  # a store need not know it
    return lists


def _read(url: str, path: str) -> bytes:
    """Return the content of a small file of the store."""
    return Path(storage.cached_path(storage.join(url, path))).read_bytes()


def _has_uploaded(directory: str, lists: Mapping[str, str]) -> bool:
    """Return whether all of these lists of checkpoints are from this staging directory."""
    record = Path(directory, UPLOADED)
    uploaded = record.read_text().split() if record.exists() else []
    return all(md5 in uploaded for md5 in lists.values())


def _record(directory: str, text: bytes) -> None:
    """Note in a staging directory that the store may have this list of checkpoints."""
    os.makedirs(directory, exist_ok=True)
    with open(os.path.join(directory, UPLOADED), 'a', encoding='utf-8') as file:
        file.write(f'{_md5(text)}\n')


def _md5(text: bytes) -> str:
    return hashlib.md5(text, usedforsecurity=False).hexdigest()


def fetch(url: str, directory: str, pattern: re.Pattern[str]) -> None:
    """Download a run's files that match `pattern`; values of the latest checkpoints only."""
    for path in local_files(directory, pattern):
        os.remove(os.path.join(directory, path))
    remote = [path for path in storage.listing(url) if pattern.fullmatch(path)]
    with_values = set()
    for path in filter(_is_list, remote):
        text = _read(url, path)
        _record(directory, text)
        stems = _listed(path, text)
        resumable = [stem for stem in stems if stem + names.RESUME in remote]
        with_values.update(stems[-1:], resumable[-1:])
    wanted = []
    for path in remote:
        if not path.endswith(names.DATA) or _stem(path) in with_values:
            wanted.append(path)
    copies = storage.cached_paths([storage.join(url, path) for path in wanted])
    for path, copy in zip(wanted, copies, strict=True):
        target = os.path.join(directory, path)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.replace(copy, target)


def sync(url: str, directory: str, pattern: re.Pattern[str]) -> None:
    """Upload new files that match `pattern`, and delete old ones.

    Settings are uploaded before checkpoints, and the lists of checkpoints last, so that an error at
    any point leaves those that are listed whole. FileNotFoundError if a file is deleted meanwhile;
    TakenOver if the store has checkpoints of others.
    """
    remote = storage.listing(url)
    in_store = _lists_in(url, remote)
    if not _has_uploaded(directory, in_store):
        raise TakenOver(f'{url} was changed by another process')
    local = local_files(directory, pattern)
    lists = {path: Path(directory, path).read_bytes() for path in local if _is_list(path)}
    kept = set()
    for path, text in lists.items():
        kept.update(_listed(path, text))
    # Looked for after the lists: a checkpoint may be saved, or deleted, at any moment.
    files = []
    for path in local_files(directory, pattern):
        if not _is_list(path) and _stem(path) in (None, *kept):
            files.append(path)
    for stem in kept:
        for path in (stem + names.DATA, stem + names.INDEX):
            if path not in files and path not in remote:
                raise FileNotFoundError(path)

    changed = [path for path in files if _version(directory, path) != remote.get(path)]
    # A run that was resumed with other settings saves some checkpoints once more.
    if any(_stem(path) is not None and path in remote for path in changed):
        for path in in_store:
            storage.remove(storage.join(url, path))
        in_store.clear()
    for path in sorted(changed, key=lambda path: _stem(path) is not None):
        with open(os.path.join(directory, path), 'rb') as file:
            storage.write(storage.join(url, path), file)
    for path, text in lists.items():
        if _md5(text) != in_store.get(path):
            _record(directory, text)
            storage.write(storage.join(url, path), io.BytesIO(text))

    gone = []
    for path in remote:
        is_kept = path in lists or path in files or _stem(path) in kept
        if pattern.fullmatch(path) and not is_kept:
            gone.append(path)
    for path in sorted(gone, key=lambda path: not _is_list(path)):
        storage.remove(storage.join(url, path))


def _version(directory: str, path: str) -> tuple[int, str]:
    """Return (size, MD5) of a file in a local directory."""
    local = os.path.join(directory, path)
    return os.path.getsize(local), storage.md5(local)


def _is_list(path: str) -> bool:
    """Return whether a file is a list of checkpoints."""
    return os.path.basename(path) == names.LIST


def _stem(path: str) -> str | None:
    """Return the checkpoint of a file, its path without the suffix; None for other files."""
    match = names.FILE.fullmatch(os.path.basename(path))
    return match and os.path.join(os.path.dirname(path), match[1])


def _listed(path: str, text: bytes) -> list[str]:
    """Return the checkpoints in the list at `path` with this text, the latest last."""
    directory = os.path.dirname(path)
    return [os.path.join(directory, name) for name in names.parse_checkpoint_file(text.decode())]


class Uploader:
    """Thread that uploads the files of a directory as they change. Arguments: those of `sync`."""

    def __init__(self, url: str, directory: str, pattern: re.Pattern[str]) -> None:
        self.url = url
        self.directory = directory
        self.pattern = pattern
        self.last_error: Exception | None = None  # None when all was uploaded
        self.closing = threading.Event()
        self.thread = threading.Thread(target=self._sync_repeatedly, daemon=True)
        self.thread.start()

    def _sync_repeatedly(self) -> None:
        while not self._is_taken_over() and not self.closing.wait(SYNC_SECONDS):
            self._try_to_sync()

    def _try_to_sync(self) -> bool:
        """Upload, and return whether all is there now; print a failure, but not its repetitions."""
        try:
            sync(self.url, self.directory, self.pattern)
        except FileNotFoundError:
            return False
        except (storage.StorageError, OSError) as e:
            if isinstance(e, TakenOver):
                announce(f'WARNING: uploads end: {e}')
            elif not self.last_error:
                announce(f'WARNING: uploads are delayed, and tried again: {e}')
            self.last_error = e
            return False
        if self.last_error:
            announce(f'note: uploads to {self.url} are up to date again')
            self.last_error = None
        return True

    def close(self, timeout: float) -> None:
        """Upload the rest; UserError if it cannot be done within `timeout` seconds of tries."""
        self.closing.set()
        self.thread.join()
        if not self._is_taken_over():
            self._upload_rest(timeout)
        if self._is_taken_over():
            raise UserError(
                f'{self.last_error}; what this one has made is in {self.directory}: copy it before'
                f' you type `{self._resume_command()}`, which replaces it'
            )

    def _upload_rest(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        if self.last_error and timeout:
            announce(f'note: trying to upload the rest, for up to {timeout / 60:.0f} minutes')
        while not self._try_to_sync() and not self._is_taken_over():
            if time.monotonic() > deadline:
                raise UserError(
                    f'{self.url} is not complete: {self.last_error or "a file is missing"}; all of'
                    f' the run is in {self.directory}, and `{self._resume_command()}` here uploads'
                    ' the rest'
                ) from self.last_error
            time.sleep(SYNC_SECONDS)

    def _is_taken_over(self) -> bool:
        return isinstance(self.last_error, TakenOver)

    def _resume_command(self) -> str:
        return shell.typed('./launch.py resume', self.url)


@contextlib.contextmanager
def uploaded(url: str, directory: str, pattern: re.Pattern[str]) -> Iterator[None]:
    """Upload a directory during the block, and delete it afterwards unless something failed."""
    try:
        storage.check_access(storage.join(url, UPLOADED))
    except storage.StorageError as e:
        raise UserError(f'--save_dir: {e}') from e
    uploader = Uploader(url, directory, pattern)
    try:
        yield
    except BaseException:
        try:
            uploader.close(0)
        except UserError as e:
            announce(f'WARNING: {e}')
        raise
    uploader.close(CLOSE_TIMEOUT)
    for path in local_files(directory, pattern):
        os.remove(os.path.join(directory, path))
    Path(directory, UPLOADED).unlink(missing_ok=True)
    for folder, *_ in os.walk(directory, topdown=False):
        with contextlib.suppress(OSError):  # it is not empty
            os.rmdir(folder)
