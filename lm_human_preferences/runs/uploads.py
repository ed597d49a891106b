"""Runs that are kept in a remote directory: written to a local one, the staging directory, and
uploaded as they grow.

A reader who follows a `checkpoint` file finds each checkpoint that it names whole, at any moment:
the file comes after them, and what it has named goes after it. While the store cannot be reached,
training goes on, and uploads wait.

REMOTE/writer says which staging directory wrote last, and which process is writing now. A staging
directory that was the last one has all that the store has, or more; any other one is out of date.
"""

import contextlib
import hashlib
import io
import itertools
import os
import re
import secrets
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from lm_human_preferences import storage
from lm_human_preferences.checkpointing import checkpoints
from lm_human_preferences.errors import UserError
from lm_human_preferences.storage import local_files
from lm_human_preferences.utils.logging import log_line

LEASE, STATE = 'writer', 'checkpoint'
LOOK = 1  # seconds between two looks for a new checkpoint
INTERVAL = (
    120  # seconds after which TensorBoard's files are uploaded, and the writer says that it lives
)
LEASE_TIMEOUT = 5 * INTERVAL  # seconds of silence after which a writer is taken for dead
RETRY = 20  # seconds between tries while the store is out of order
LAST_TRY = 600  # seconds of tries when the run is done


class LeaseLost(UserError):
    """Somebody else writes the remote directory."""


def last_writer(url: str) -> tuple[str, str, float]:
    """(id, process, seconds since it has said so) of who wrote a remote directory last; '' where
    nobody did or does."""
    path = storage.join(url, LEASE)
    try:
        age = time.time() - storage.stat(path).mtime
        name, _, process = storage.read_text(path).partition(' ')
    except storage.NotFound:
        return '', '', 0
    return name, process, age


def is_newest(url: str, directory: str) -> bool:
    """Whether a staging directory has all that the store has; UserError where somebody else is
    adding to that."""
    storage.check_access(url)
    (name, process, age), path = last_writer(url), os.path.join(directory, LEASE)
    ours = storage.read_text(path).split() if os.path.exists(path) else []
    if name in ours or (ours and not name):
        return True
    if process and age < LEASE_TIMEOUT:
        raise LeaseLost(
            f'{url}: {process} is writing this run: wait for its end, or take another NAME; if it'
            f' was killed, try again in {(LEASE_TIMEOUT - age) / 60:.0f} minutes'
        )
    return False


def fetch(url: str, directory: str, own: re.Pattern[str]) -> None:
    """Make a staging directory of what the store has of a run, all that it needs to go on.

    own: a regular expression for the names of its files. Of checkpoints before the newest, and
    before the newest to go on from, the values stay away.
    """
    name, *_ = last_writer(url)
    for path in local_files(directory, own):
        os.remove(os.path.join(directory, path))
    found = [path for path in storage.listing(url) if own.fullmatch(path)]
    kept = [
        _listed(path, storage.read_text(storage.join(url, path)))
        for path in found
        if _is_state(path)
    ]
    newest = {
        last
        for stems in kept
        for last in [
            *stems[-1:],
            *[stem for stem in stems if stem + checkpoints.RESUME in found][-1:],
        ]
    }
    every = set(itertools.chain.from_iterable(kept))
    wanted = [
        path
        for path in found
        if _stem(path) in (None, *newest)
        or (_stem(path) in every and not path.endswith(checkpoints.DATA))
    ]
    for path, copy in zip(
        wanted, storage.cached_paths([storage.join(url, path) for path in wanted]), strict=True
    ):
        os.makedirs(os.path.dirname(os.path.join(directory, path)), exist_ok=True)
        os.replace(copy, os.path.join(directory, path))
    _record_lease_here(directory, name)


def _is_state(path: str) -> bool:
    return os.path.basename(path) == STATE


def _stem(path: str) -> str | None:
    """The checkpoint that a file belongs to, its path without the suffix; None for other files."""
    match = checkpoints.FILE.fullmatch(os.path.basename(path))
    return match and os.path.join(os.path.dirname(path), match[1])


def _listed(path: str, text: str) -> list[str]:
    """The checkpoints that the text of the state file `path` names, the newest last."""
    return [
        os.path.join(os.path.dirname(path), name)
        for name in checkpoints.parse_checkpoint_file(text)
    ]


def _record_lease_here(directory: str, name: str) -> None:
    os.makedirs(directory, exist_ok=True)
    with open(os.path.join(directory, LEASE), 'a', encoding='utf-8') as file:
        file.write(f'{name}\n')


class DirectoryUploader:
    """Keeps the remote directory `url` as the local `directory` is, as far as names match `own`.

    process: what to tell others of who writes it.
    """

    def __init__(self, url: str, directory: str, own: re.Pattern[str], process: str) -> None:
        self.url, self.directory, self.own, self.process = url, directory, own, process
        self.name = secrets.token_hex(8)
        # {name: (size, MD5)} of what the store has, if that is known
        self.there: dict[str, tuple[int, str | None]] | None = None
        self.trouble: Exception | None = None  # what has gone wrong since all was uploaded
        self.closing = threading.Event()
        self.thread = threading.Thread(target=self._follow, daemon=True)

    def start(self) -> None:
        """Take the remote directory; UserError where that is somebody else's, or cannot be
        written."""
        is_newest(self.url, self.directory)
        _record_lease_here(
            self.directory, self.name
        )  # before the store knows: its name is always known here
        try:
            self._renew_lease(self.process)
        except storage.StorageError as e:
            raise UserError(f'--save_dir: {e}') from e
        self.thread.start()

    def _renew_lease(self, process: str) -> None:
        self._write(LEASE, f'{self.name} {process}'.encode())

    def _write(self, path: str, data: bytes) -> tuple[int, str]:
        return storage.write(storage.join(self.url, path), io.BytesIO(data), len(data))

    def _follow(self) -> None:
        """The thread: upload after each checkpoint, and at intervals."""
        seen, due = None, 0
        while not self.closing.wait(LOOK):
            paths = [
                path
                for path in local_files(self.directory, self.own)
                if _stem(path) is None and not path.startswith('tb/')
            ]
            with contextlib.suppress(FileNotFoundError):
                now = [os.stat(os.path.join(self.directory, path)).st_mtime_ns for path in paths]
                if (now != seen and not self.trouble) or time.monotonic() > due:
                    due = time.monotonic() + (INTERVAL if self.try_sync() else RETRY)
                    seen = now

    def try_sync(self) -> bool:
        """Whether all is uploaded now; what hinders that is said once."""
        try:
            self.sync()
        except FileNotFoundError:  # deleted meanwhile, for a newer checkpoint
            self.there = None
            return False
        except (LeaseLost, storage.StorageError, OSError) as e:
            if not self.trouble:
                log_line(f'WARNING: uploads are delayed, and tried again: {e}')
            self.there, self.trouble = None, e
            return False
        if self.trouble:
            log_line(f'note: uploads to {self.url} are up to date again')
            self.trouble = None
        return True

    def sync(self) -> None:
        """Upload what is new, and delete what is gone. A StorageError or OSError may end it at any
        point."""
        name, process, age = last_writer(self.url)
        if name not in ('', self.name):
            raise LeaseLost(f'{self.url} was taken over by {process or "another run"}')
        if not name or age > INTERVAL / 2:
            self._renew_lease(self.process)
        self.there = storage.listing(self.url) if self.there is None else self.there
        states = {
            path: Path(self.directory, path).read_bytes()
            for path in local_files(self.directory, self.own)
            if _is_state(path)
        }
        kept = {stem for path, text in states.items() for stem in _listed(path, text.decode())}
        # Looked for after what names them: a checkpoint may be saved, or deleted, at any moment.
        files = [
            path
            for path in local_files(self.directory, self.own)
            if not _is_state(path) and _stem(path) in (None, *kept)
        ]
        for path in [
            stem + suffix for stem in kept for suffix in (checkpoints.DATA, checkpoints.INDEX)
        ]:
            if path not in files and path not in self.there:
                raise FileNotFoundError(path)
        changed = [path for path in files if self._differs(path)]
        for path, text in states.items():
            self._withdraw(path, text.decode(), changed)
        for path in sorted(changed, key=lambda path: _stem(path) is not None):
            with open(os.path.join(self.directory, path), 'rb') as file:
                self.there[path] = storage.write(
                    storage.join(self.url, path), file, os.fstat(file.fileno()).st_size
                )
        for path, text in states.items():
            if self.there.get(path) != (len(text), hashlib.md5(text).hexdigest()):
                self.there[path] = self._write(path, text)
        self._remove(
            [
                path
                for path in self.there
                if self.own.fullmatch(path)
                and path not in states
                and path not in files
                and _stem(path) not in kept
            ]
        )

    def _differs(self, path: str) -> bool:
        assert self.there is not None
        place = os.path.join(self.directory, path)
        return (
            path not in self.there
            or (os.path.getsize(place), storage.md5(place)) != self.there[path]
        )

    def _withdraw(self, path: str, text: str, changed: list[str]) -> None:
        """Have the remote state file `path` name no checkpoint that is to be replaced by another of
        its name."""
        assert self.there is not None
        stems = _listed(path, text)
        if path in self.there and {_stem(file) for file in changed if file in self.there} & {
            *stems
        }:
            safe = [os.path.basename(stem) for stem in stems if stem not in map(_stem, changed)]
            if safe:
                self.there[path] = self._write(path, checkpoints.format_checkpoint_file(safe))
            else:
                self._remove([path])

    def _remove(self, paths: Iterable[str]) -> None:
        assert self.there is not None
        for path in sorted(paths, key=lambda path: not _is_state(path)):
            storage.remove(storage.join(self.url, path))
            del self.there[path]

    def close(self, patience: float) -> None:
        """Upload the rest, trying for so many seconds; UserError if that fails."""
        self.closing.set()
        self.thread.join()
        until = time.monotonic() + patience
        if self.trouble and patience:
            log_line(f'note: trying to upload the rest, for up to {patience / 60:.0f} minutes')
        while not self.try_sync():
            if isinstance(self.trouble, LeaseLost) or time.monotonic() > until:
                raise UserError(
                    f'{self.url} is not complete: {self.trouble or "a file is missing"}; all of the'
                    f' run is in {self.directory}, and `./launch.py resume {self.url}` here uploads'
                    ' the rest'
                ) from self.trouble
            time.sleep(RETRY)
        with contextlib.suppress(storage.StorageError):
            self._renew_lease('')


@contextlib.contextmanager
def mirrored(url: str, directory: str, own: re.Pattern[str], process: str) -> Iterator[None]:
    """Within the block, the local `directory` is uploaded to `url`; after it, it is empty, unless
    something failed."""
    mirror = DirectoryUploader(url, directory, own, process)
    mirror.start()
    try:
        yield
    except BaseException:
        try:
            mirror.close(0)
        except UserError as e:
            log_line(f'WARNING: {e}')
        raise
    mirror.close(LAST_TRY)
    for path in [*local_files(directory, own), LEASE]:
        os.remove(os.path.join(directory, path))
    for folder, *_ in os.walk(directory, topdown=False):
        with contextlib.suppress(OSError):  # not empty
            os.rmdir(folder)
