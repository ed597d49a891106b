"""Upload of a run from a staging directory to a remote one, where listed checkpoints stay whole.

The file UPLOADER names the staging directory that a remote directory is written from, by an
identifier that both contain. A machine that goes on with a run replaces it, and the other stops.
"""

import contextlib
import hashlib
import io
import os
import re
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from lm_human_preferences import shell, storage
from lm_human_preferences.checkpointing import names
from lm_human_preferences.errors import UserError
from lm_human_preferences.storage import local_files
from lm_human_preferences.utils.logging import announce

UPLOADER = 'uploader'
SYNC_SECONDS = 20  # between two looks for changes
CLOSE_TIMEOUT = 600  # seconds of further tries when the run is done


class TakenOver(storage.StorageError):
    """Another staging directory is uploaded to the remote directory."""


def is_up_to_date(url: str, directory: str) -> bool:
    """Return whether a staging directory has everything that the store has."""
    if not os.path.isdir(directory):
        return False
    uploader = _uploader(url)
    return uploader == _uploader(directory) if uploader else not storage.listing(url)


def _uploader(place: str) -> str | None:
    """Return the identifier in a staging or a remote directory; None if there is none."""
    try:
        return storage.read_text(storage.join(place, UPLOADER))
    except storage.NotFound:
        return None


def _take_over(url: str, directory: str) -> None:
    """Put the identifier of a staging directory into the store; StorageError if not allowed."""
    identifier = _uploader(directory) or uuid.uuid4().hex
    storage.write_bytes(os.path.join(directory, UPLOADER), identifier.encode())
    place = storage.join(url, UPLOADER)
    storage.remove(place)  # which has to be allowed, too
    storage.write(place, io.BytesIO(identifier.encode()))


def _check_uploader(url: str, directory: str) -> None:
    """Raise TakenOver if the store is written from another staging directory."""
    if _uploader(url) != _uploader(directory):
        raise TakenOver(f'{url} was changed by another process')


def fetch(url: str, directory: str, pattern: re.Pattern[str]) -> None:
    """Download a run's files that match `pattern`; values of the latest checkpoints only."""
    for path in local_files(directory, pattern):
        os.remove(os.path.join(directory, path))
    remote = [path for path in storage.listing(url) if pattern.fullmatch(path)]
    with_values = set()
    for path in filter(_is_list, remote):
        stems = _listed(path, storage.read_text(storage.join(url, path)))
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
    any point leaves the listed checkpoints whole. FileNotFoundError if a file is deleted meanwhile;
    TakenOver if the store is written from another staging directory.
    """
    _check_uploader(url, directory)
    remote = storage.listing(url)
    lists = {}
    kept = set()
    for path in filter(_is_list, local_files(directory, pattern)):
        lists[path] = Path(directory, path).read_bytes()
        kept.update(_listed(path, lists[path].decode()))
    # Looked for after the lists: a checkpoint may be saved, or deleted, at any moment.
    files = []
    for path in local_files(directory, pattern):
        if not _is_list(path) and _stem(path) in (None, *kept):
            files.append(path)
    for stem in kept:
        for path in (stem + names.DATA, stem + names.INDEX):
            if path not in files and path not in remote:
                raise FileNotFoundError(path)

    contents = {path: _content(directory, path) for path in files}
    changed = [path for path in files if contents[path] != remote.get(path)]
    # A run that was resumed with other settings saves some checkpoints once more.
    if any(_stem(path) is not None and path in remote for path in changed):
        for path in filter(_is_list, list(remote)):
            storage.remove(storage.join(url, path))
            del remote[path]
    for path in sorted(changed, key=lambda path: _stem(path) is not None):
        with open(os.path.join(directory, path), 'rb') as file:
            storage.write(storage.join(url, path), file)
    _check_uploader(url, directory)  # uploading may have taken long
    for path, text in lists.items():
        if (len(text), hashlib.md5(text, usedforsecurity=False).hexdigest()) != remote.get(path):
            storage.write(storage.join(url, path), io.BytesIO(text))

    gone = []
    for path in remote:
        is_kept = path in lists or path in files or _stem(path) in kept
        if pattern.fullmatch(path) and not is_kept:
            gone.append(path)
    for path in sorted(gone, key=lambda path: not _is_list(path)):
        storage.remove(storage.join(url, path))


def _content(directory: str, path: str) -> tuple[int, str]:
    """Return (size, MD5) of a file in a local directory, as `storage.listing` does."""
    local = os.path.join(directory, path)
    return os.path.getsize(local), storage.md5(local)


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


class Uploader:
    """Thread that uploads the files of a directory as they change. Arguments: those of `sync`."""

    def __init__(self, url: str, directory: str, pattern: re.Pattern[str]) -> None:
        self.url = url
        self.directory = directory
        self.pattern = pattern
        self.last_error: Exception | None = None  # None when all was uploaded
        self.is_done = False  # whether all was uploaded after `close`
        self.deadline = 0.0  # of tries after `close`, by time.monotonic()
        self.closing = threading.Event()
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        while not isinstance(self.last_error, TakenOver):
            is_closing = self.closing.wait(SYNC_SECONDS)
            is_uploaded = self._try_to_sync()
            if is_closing:
                self.is_done = is_uploaded
                if is_uploaded or time.monotonic() > self.deadline:
                    return
                time.sleep(SYNC_SECONDS)

    def _try_to_sync(self) -> bool:
        """Upload, and return whether all is there now; print the first of several failures."""
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
        if self.last_error and timeout and self.thread.is_alive():
            announce(f'note: trying to upload the rest, for up to {timeout / 60:.0f} minutes')
        self.deadline = time.monotonic() + timeout
        self.closing.set()
        self.thread.join()
        resume = shell.typed('./launch.py resume', self.url)
        if isinstance(self.last_error, TakenOver):
            raise UserError(
                f'{self.last_error}; what this one has made is in {self.directory}: copy it before'
                f' you type `{resume}`, which replaces it'
            )
        if not self.is_done:
            raise UserError(
                f'{self.url} is not complete: {self.last_error or "a file is missing"}; all of the'
                f' run is in {self.directory}, and `{resume}` here uploads the rest'
            ) from self.last_error


@contextlib.contextmanager
def uploaded(url: str, directory: str, pattern: re.Pattern[str]) -> Iterator[None]:
    """Upload a directory during the block, and delete it afterwards unless something failed."""
    try:
        _take_over(url, directory)
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
    storage.remove(storage.join(url, UPLOADER))
    for path in (UPLOADER, *local_files(directory, pattern)):
        os.remove(os.path.join(directory, path))
    for folder, *_ in os.walk(directory, topdown=False):
        with contextlib.suppress(OSError):  # it is not empty
            os.rmdir(folder)
