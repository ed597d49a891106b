"""Upload of a run from a staging directory to a store, where listed checkpoints stay complete.

The record of a run (run_record) says which processes have worked on it. If the record in the store
names a process that the staging directory's record lacks, another machine has continued the run.
"""

import contextlib
import io
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator, Set
from pathlib import Path

from lm_human_preferences import shell, storage
from lm_human_preferences.checkpointing import names
from lm_human_preferences.errors import UserError, about_option
from lm_human_preferences.runs import run_record
from lm_human_preferences.runs.run_files import RECORD
from lm_human_preferences.storage import local_files
from lm_human_preferences.utils.logging import announce

SYNC_SECONDS = 20  # seconds between two scans for changes
CLOSE_TIMEOUT = 600  # seconds for which uploads are tried again after the run has ended


class TakenOver(storage.StorageError):
    """Another machine has continued the run."""


def is_up_to_date(url: str, directory: str) -> bool:
    """Return whether a staging directory has everything that the store has."""
    if not os.path.isdir(directory):
        return False
    in_store = run_record.processes(url)
    if not in_store:  # the store is empty, or has a run of the original
        return not storage.listing(url)
    return in_store <= run_record.processes(directory)


def fetch(url: str, directory: str, pattern: re.Pattern[str]) -> None:
    """Download files that match `pattern`; values of the last and the last resumable checkpoint."""
    for path in local_files(directory, pattern):
        os.remove(os.path.join(directory, path))
    remote = [path for path in storage.listing(url) if pattern.fullmatch(path)]
    with_values = set()
    for path in filter(_is_list, remote):
        stems = _listed(path, storage.read_text(storage.join(url, path)))
        # The last one cannot be resumed if an error in the middle of a step has saved it.
        resumable = [stem for stem in stems if stem + names.RESUME in remote]
        with_values.update(stems[-1:], resumable[-1:])
    wanted = []
    for path in remote:
        if not path.endswith(names.DATA) or _stem(path) in with_values:
            wanted.append(path)
    copies = storage.cached_paths([storage.join(url, path) for path in wanted])
    # The record last: with it, the directory counts as up to date.
    for path, copy in sorted(zip(wanted, copies, strict=True), key=lambda pair: pair[0] == RECORD):
        target = os.path.join(directory, path)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.replace(copy, target)


def sync(url: str, directory: str, pattern: re.Pattern[str], known: Set[str]) -> None:
    """Upload changed files that match `pattern`, and delete files that are gone here.

    Settings are uploaded before checkpoints, and the lists of checkpoints last, so that an error at
    any point leaves the listed checkpoints whole. FileNotFoundError if a file is deleted meanwhile;
    TakenOver if the store names a process that is not `known`, nor in the staging directory.
    """
    _check_not_taken_over(url, directory, known)
    remote = storage.listing(url)
    lists = {}
    listed = set()
    for path in filter(_is_list, local_files(directory, pattern)):
        lists[path] = Path(directory, path).read_bytes()
        listed.update(_listed(path, lists[path].decode()))
    # Look for files after reading the lists, as checkpoints may be saved or deleted at any moment.
    files = []
    for path in local_files(directory, pattern):
        if not _is_list(path) and _stem(path) in (None, *listed):
            files.append(path)
    for stem in listed:
        for path in (stem + names.DATA, stem + names.INDEX):
            if path not in files and path not in remote:
                raise FileNotFoundError(path)

    def differs(path: str) -> bool:
        local = os.path.join(directory, path)
        return (os.path.getsize(local), storage.md5(local)) != remote.get(path)

    changed = list(filter(differs, files))
    # A run that was resumed with other settings replaces checkpoints that the lists name.
    if any(_stem(path) is not None and path in remote for path in changed):
        for path in filter(_is_list, list(remote)):
            storage.remove(storage.join(url, path))
            del remote[path]
    for path in sorted(changed, key=_order):
        with open(os.path.join(directory, path), 'rb') as file:
            storage.write(storage.join(url, path), file)
    _check_not_taken_over(url, directory, known)  # uploading may have taken long
    for path in filter(differs, lists):
        storage.write(storage.join(url, path), io.BytesIO(lists[path]))
    kept = {*lists, *files}
    for path in sorted(remote, key=_order, reverse=True):
        if pattern.fullmatch(path) and path not in kept and _stem(path) not in listed:
            storage.remove(storage.join(url, path))


def _check_not_taken_over(url: str, directory: str, known: Set[str]) -> None:
    if not run_record.processes(url) <= known | run_record.processes(directory):
        raise TakenOver(f'{url} was changed by another process')


def _is_list(path: str) -> bool:
    """Return whether a file is a list of checkpoints."""
    return os.path.basename(path) == names.LIST


def _order(path: str) -> int:
    """Return the rank of a file in the order of uploads: 0 settings, 1 checkpoints, 2 lists."""
    return 2 if _is_list(path) else int(_stem(path) is not None)


def _stem(path: str) -> str | None:
    """Return the checkpoint that a file belongs to, as a path without suffix, or None."""
    match = names.FILE.fullmatch(os.path.basename(path))
    return match and os.path.join(os.path.dirname(path), match[1])


def _listed(path: str, text: str) -> list[str]:
    """Return the paths of the checkpoints in the list at `path`, whose content is `text`."""
    directory = os.path.dirname(path)
    return [os.path.join(directory, name) for name in names.parse_checkpoint_file(text)]


class Uploader:
    """Thread that uploads the files of a directory as they change; for arguments see `sync`."""

    def __init__(self, url: str, directory: str, pattern: re.Pattern[str], known: Set[str]) -> None:
        self.url = url
        self.directory = directory
        self.pattern = pattern
        self.known = known
        self.error: Exception | None = None  # error of the last try; None if all was uploaded
        self.closing = threading.Event()
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        while not (self.closing.wait(SYNC_SECONDS) or isinstance(self.error, TakenOver)):
            self._try_to_sync()

    def _try_to_sync(self) -> None:
        """Upload; warn of the first of several errors, but not of a file deleted meanwhile."""
        before, self.error = self.error, None
        try:
            sync(self.url, self.directory, self.pattern, self.known)
        except FileNotFoundError as e:
            self.error = e
        except (UserError, OSError) as e:
            self.error = e
            if isinstance(e, TakenOver):
                announce(f'WARNING: uploads end: {e}')
            elif before is None or isinstance(before, FileNotFoundError):
                announce(f'WARNING: uploads are delayed, and tried again: {e}')

    def close(self, timeout: float) -> None:
        """Upload the rest; UserError if it cannot be done within `timeout` seconds of tries."""
        self.closing.set()
        self.thread.join()
        deadline = time.monotonic() + timeout
        resume = shell.typed('./launch.py resume', self.url)
        while not isinstance(self.error, TakenOver):
            self._try_to_sync()
            if self.error is None:
                return
            if time.monotonic() > deadline:
                raise UserError(
                    f'{self.url} is not complete: {self.error}; all of the run is in'
                    f' {self.directory}, and `{resume}` here uploads the rest'
                )
            time.sleep(SYNC_SECONDS)
        raise UserError(
            f'{self.error}; what this one has made is in {self.directory}: copy it before you type'
            f' `{resume}`, which replaces it'
        )


@contextlib.contextmanager
def uploaded(url: str, directory: str, pattern: re.Pattern[str]) -> Iterator[None]:
    """Upload a directory during the block, and delete it afterwards unless something failed."""
    place = storage.join(url, 'access')  # a file that shows whether uploads are allowed
    with about_option('--save_dir', storage.StorageError):
        storage.write(place, io.BytesIO())
        storage.remove(place)
        known = run_record.processes(url)  # also those of a run that is overwritten
    uploader = Uploader(url, directory, pattern, known)
    try:
        yield
    except BaseException:
        try:
            uploader.close(0)
        except UserError as e:
            announce(f'WARNING: {e}')
        raise
    uploader.close(CLOSE_TIMEOUT)
    shutil.rmtree(directory)
