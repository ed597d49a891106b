"""Who may come in: a link and a cookie for each labeller, both made from a private key.

The key is kept in the folder, in a file that only its owner can read, so that links and cookies
outlive the server. Nothing else is kept: they are HMACs of the labeller's name. Without the file,
links and cookies are void.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import re
import secrets
import stat
from collections.abc import Sequence

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError

KEY_FILE = 'page.key'
KEY = re.compile(rb'[0-9a-f]{64}\n')


class KeyFile:
    """The key of a folder, and the lock that lets one server at a time have the folder.

    notes: what the user should know: that links which were given before are void.
    """

    def __init__(self, folder: str) -> None:
        path = os.path.join(folder, KEY_FILE)
        self.notes: list[str] = []
        try:
            self._file = open(path, 'ab+', buffering=0, opener=_open_private)
            self._lock(folder)
            self.key = self._read_or_make(path)
        except OSError as e:
            raise UserError(f'{path} cannot be used: {e.strerror or e}') from e

    def _lock(self, folder: str) -> None:
        try:
            storage.lock_file(self._file)
        except BlockingIOError:
            self._file.close()
            raise UserError(
                f'{folder} has a page already: name all labellers where it was started'
            ) from None

    def _read_or_make(self, path: str) -> bytes:
        was_private = self._is_private()
        os.fchmod(self._file.fileno(), 0o600)
        if not self._is_private():
            self.notes.append(
                f'note: {path} cannot be hidden from others on this disk: links will hold until'
                ' this server ends'
            )
            return secrets.token_bytes(32)
        self._file.seek(0)
        text = self._file.read(128)
        if KEY.fullmatch(text) and was_private:
            return bytes.fromhex(text.decode())
        if text:
            reason = 'is damaged' if was_private else 'could be read by others'
            self.notes.append(f'note: {path} {reason}: all links are new')
        key = secrets.token_bytes(32)
        self._file.truncate(0)
        storage.append(self._file, f'{key.hex()}\n'.encode(), sync=True)
        storage.sync_directory(os.path.dirname(path))
        return key

    def _is_private(self) -> bool:
        return not stat.S_IMODE(os.fstat(self._file.fileno()).st_mode) & 0o077

    def close(self) -> None:
        """Let another server have the folder."""
        self._file.close()


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)


class Access:
    """The labellers' links and cookies, and to whom each belongs."""

    def __init__(self, key: bytes, labellers: Sequence[str]) -> None:
        self._key = key
        # Browsers send cookies of one host to all its ports, where other folders may be.
        self.cookie_name = f'labelling-{self._code("cookie name")[:8]}'
        self._tokens = {name: self._code(f'link of {name}') for name in labellers}
        self._cookies = {name: self._code(f'cookie of {name}') for name in labellers}

    def _code(self, text: str) -> str:
        digest = hmac.new(self._key, text.encode(), hashlib.sha256).digest()
        return base64.urlsafe_b64encode(digest).decode().rstrip('=')

    @property
    def folder(self) -> str:
        """A name of the folder for the browser, which reveals nothing about its path."""
        return self.cookie_name

    def token(self, labeller: str) -> str:
        """The secret in a labeller's link."""
        return self._tokens[labeller]

    def cookie(self, labeller: str) -> str:
        """The cookie that a labeller gets for it."""
        return self._cookies[labeller]

    def by_token(self, token: str) -> str | None:
        """The labeller who has this link."""
        return _owner(self._tokens, token)

    def by_cookie(self, cookie: str) -> str | None:
        """The labeller who has this cookie."""
        return _owner(self._cookies, cookie)


def _owner(codes: dict[str, str], given: str) -> str | None:
    """The name whose code was given; how long this takes reveals nothing about the codes."""
    found = None
    for name, code in codes.items():
        if hmac.compare_digest(code.encode(), given.encode(errors='replace')):
            found = name
    return found
