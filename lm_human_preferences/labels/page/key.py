"""The secret of a folder: its links, cookies, and the order on the screen follow from it.

It is kept in the folder, in a file that only its owner can read, so that they outlive the program.
Nothing else is kept: they are keyed hashes. Without the file, links and cookies are void.
"""

from __future__ import annotations

import dataclasses
import hmac
import io
import os
import re
import secrets
import stat
import time
from typing import ClassVar

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError

KEY_FILE = 'page.key'
LOCK_SECONDS = 5.0  # for which another program may be making the key
BYTES = 32
KEY = re.compile(rb'[0-9a-f]{64}\n')


@dataclasses.dataclass(frozen=True)
class FolderKey:
    """The secret of a folder. notes: what the user should know, as that old links are void."""

    secret: bytes
    notes: tuple[str, ...] = ()
    ORDER: ClassVar[str] = 'order on the screen'
    TOKENS: ClassVar[str] = 'tokens of questions'

    def derive(self, purpose: str) -> bytes:
        """A secret for one purpose, which reveals nothing about those for others."""
        return hmac.digest(self.secret, purpose.encode(), 'sha256')

    @property
    def order(self) -> bytes:
        """The key of what labellers see in which order, see answers.shown_order."""
        return self.derive(self.ORDER)


def folder_key(folder: str) -> FolderKey:
    """The key of a folder, which is made if there is none; UserError where that is unsafe.

    A key that others know, or that cannot be kept, is replaced by one for this program alone.
    """
    path = os.path.join(folder, KEY_FILE)
    try:
        with open(path, 'ab+', buffering=0, opener=_open_private) as file:
            _wait_for_lock(file)
            return _read_or_make(file, path)
    except PermissionError as e:
        return _temporary(f'{path} cannot be opened ({e.strerror})')
    except OSError as e:
        raise UserError(f'{path} cannot be used: {e.strerror or e}') from e


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)


def _wait_for_lock(file: io.FileIO) -> None:
    """Lock the file; BlockingIOError if another program keeps it locked."""
    end = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            return storage.lock_file(file)
        except BlockingIOError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def _read_or_make(file: io.FileIO, path: str) -> FolderKey:
    status = os.fstat(file.fileno())
    if status.st_nlink > 1:
        raise UserError(f'{path} is a hard link to another file: delete it, and all links are new')
    if status.st_uid != os.geteuid():
        return _temporary(f'{path} belongs to another user')
    was_private = _is_private(file)
    os.fchmod(file.fileno(), 0o600)
    if not _is_private(file):
        return _temporary(f'{path} cannot be hidden from others on this disk')
    file.seek(0)
    text = file.read(128)
    if was_private and KEY.fullmatch(text):
        return FolderKey(bytes.fromhex(text.decode()))
    secret = secrets.token_bytes(BYTES)
    file.truncate(0)
    storage.append(file, f'{secret.hex()}\n'.encode(), sync=True)
    storage.sync_directory(os.path.dirname(path))
    if not text:
        return FolderKey(secret)
    reason = 'is damaged' if was_private else 'could be read by others'
    return FolderKey(secret, (f'note: {path} {reason}: all links are new',))


def _is_private(file: io.FileIO) -> bool:
    return not stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077


def _temporary(reason: str) -> FolderKey:
    text = f'note: {reason}: links, and the order on the screen, hold until this program ends'
    return FolderKey(secrets.token_bytes(BYTES), (text,))
