"""Append-only files with one JSON object per line; a writer first removes a cut last line."""

import errno
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError, os_errors_as


class Reader:
    """Reader that follows a file as it grows; a missing file counts as empty.

    most_lines: number of lines after which to stop; None: read all. offset, lines: bytes and lines
    read so far. A last line without a line end is not read: it is unfinished, or a kill cut it off.
    """

    def __init__(self, path: str, most_lines: int | None = None) -> None:
        self.path = path
        self.most_lines = most_lines
        self.offset = self.lines = 0

    def new_records(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield ('FILE, line N', object) for each line that was added since the last call."""
        if not os.path.lexists(self.path):
            return
        with (
            os_errors_as(f'{self.path} cannot be read'),
            open(self.path, 'rb', opener=storage.open_nofollow) as file,
        ):
            file.seek(self.offset)
            for line in file:
                if self.lines == self.most_lines or not line.endswith(b'\n'):
                    return
                self.offset += len(line)
                self.lines += 1
                where = f'{self.path}, line {self.lines}'
                yield where, as_object(storage.parse_json(line, where), where)


def as_object(value: Any, where: str) -> dict[str, Any]:
    """Return a JSON value that is an object; otherwise raise UserError, which names `where`."""
    if not isinstance(value, dict):
        raise UserError(f'{where} is a {type(value).__name__}, not an object')
    return value


class Writer:
    """Exclusive writer of a file; it creates a missing file and removes an unfinished last line.

    what_another_does: end of the UserError if another process is using the file.
    """

    def __init__(self, path: str, what_another_does: str) -> None:
        self.path = path
        self._unwritable = f'{path} cannot be written'
        is_new = not os.path.exists(path)
        with os_errors_as(self._unwritable):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            try:
                self.file = storage.open_locked(path, storage.open_private)
            except BlockingIOError:
                raise UserError(f'{path} is in use: {what_another_does}') from None
            self.file.seek(0)
            content = self.file.read()
            end = content.rfind(b'\n') + 1
            if end < len(content):
                self.file.truncate(end)
                os.fsync(self.file.fileno())
            if is_new:
                storage.sync_directory(os.path.dirname(path))

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append a line for each record, all or none, and wait until they are on the disk."""
        lines = [json.dumps(record, allow_nan=False).encode() + b'\n' for record in records]
        with os_errors_as(self._unwritable):
            # Without this check, lines could go to a file that has been moved or replaced.
            if not os.path.samestat(os.fstat(self.file.fileno()), os.lstat(self.path)):
                raise OSError(errno.ESTALE, 'it was replaced while this program was using it')
            storage.append(self.file, b''.join(lines), sync=True)

    def close(self) -> None:
        self.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
