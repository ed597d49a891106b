"""Secret of a folder, readable by its owner only, and keyed hashes (HMACs) made from it."""

import base64
import dataclasses
import hmac
import io
import os
import re
import secrets
import stat
from collections.abc import Iterable, Sequence

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError, os_errors_as

KEY_FILE = 'page.key'
LOCK_SECONDS = 5.0  # for which another program may be making the key
KEY = re.compile(rb'[0-9a-f]{64}\n')


@dataclasses.dataclass(frozen=True)
class FolderKey:
    """Secret of a folder. notes: lines for the user, such as that old links are void."""

    secret: bytes
    notes: tuple[str, ...] = ()

    def derive(self, purpose: str) -> bytes:
        """Return a secret for one purpose, which reveals nothing about those for others."""
        return hmac.digest(self.secret, purpose.encode(), 'sha256')

    @property
    def order(self) -> bytes:
        """Key of the order in which labellers see samples, see answers.shown_order."""
        return self.derive('order on the screen')


def folder_key(folder: str) -> FolderKey:
    """Return the key of a folder, made if there is none; UserError if that is unsafe."""
    path = os.path.join(folder, KEY_FILE)
    opener = storage.open_private
    with os_errors_as(f'{path} cannot be used'):
        try:
            with storage.open_locked(path, 'ab+', opener=opener, seconds=LOCK_SECONDS) as file:
                return _read_or_make(file, path)
        except PermissionError as e:
            return _temporary(f'{path} cannot be opened ({e.strerror})')


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
    secret = secrets.token_bytes(32)
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
    return FolderKey(secrets.token_bytes(32), (text,))


class Access:
    """Links and cookies; as all ports of a host get the cookie, pages send a `proof`, too."""

    def __init__(self, key: FolderKey, labellers: Sequence[str]) -> None:
        self._key, self.labellers = key, labellers
        # Other ports of the host may have pages of other folders.
        self.cookie_name = f'labelling-{self._derive("cookie name")[:8]}'

    def _derive(self, text: str) -> str:
        return base64.urlsafe_b64encode(self._key.derive(text)).decode().rstrip('=')

    def code(self, kind: str, labeller: str) -> str:
        return self._derive(f'{kind} of {labeller}')

    def greeting(self, labeller: str, asked: str) -> str:
        """Return what shows the page of a labeller, which knows their code, that this is ours.

        asked: a random number and the origin of the page.
        """
        key = self.code('greeting', labeller).encode()
        return hmac.digest(key, asked.encode(), 'sha256').hex()

    def owner(self, kind: str, given: str) -> str | None:
        """Return whose code `given` is; how long this takes reveals nothing about the codes."""
        found = None
        for name in self.labellers:
            code = self.code(kind, name)
            if hmac.compare_digest(code.encode(), given.encode(errors='replace')):
                found = name
        return found


class QuestionTokens:
    """Names of questions in the browser; their ids would reveal the order of the samples."""

    def __init__(self, key: FolderKey) -> None:
        self._key = key.derive('tokens of questions')
        self._tokens: dict[str, str] = {}
        self._ids: dict[str, str] = {}

    def token(self, question: str) -> str:
        """Return the token of a question's id."""
        if question not in self._tokens:
            token = hmac.digest(self._key, question.encode(), 'sha256').hex()
            self._tokens[question] = token
            self._ids[token] = question
        return self._tokens[question]

    def id(self, token: str, questions: Iterable[str]) -> str | None:
        """Return the id of the one of `questions` that has a token; None if none of them has it."""
        if token not in self._ids:  # a page may know it from the server before
            for question in questions:
                self.token(question)
        return self._ids.get(token)
