"""Files of one JSON object a line that grow at the end, and are exact after a kill at any moment.

A line is in the file when `append` returns: it was written whole and synchronised to the disk, and
the name still stood for the file. A kill may leave a last line without its line end, which nobody
was told of: readers stop before it, and the next writer removes it.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError


class Reader:
    """Follows a file as it grows; a file that is not there is empty.

    most_lines: where to stop, as if the file had no more; None: at its end. offset, lines: how much
    has been read. torn: bytes after that, of a line that has no end yet.
    """

    def __init__(self, path: str, most_lines: int | None = None) -> None:
        self.path = path
        self.most_lines = most_lines
        self.offset = self.lines = self.torn = 0

    def was_cut(self) -> bool:
        """Whether lines that were read are gone: a write that failed was taken back."""
        return os.path.exists(self.path) and os.path.getsize(self.path) < self.offset

    def new_lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield (where it begins, a line with its end) for each line since the last call."""
        self.torn = 0
        try:
            file = open(self.path, 'rb', opener=storage.open_nofollow)
        except FileNotFoundError:
            return
        except OSError as e:
            raise UserError(f'{self.path} cannot be read: {e.strerror or e}') from e
        with file:
            file.seek(self.offset)
            for line in file:
                if self.lines == self.most_lines:
                    return
                if not line.endswith(b'\n'):
                    self.torn = len(line)
                    return
                begin = self.offset
                self.offset += len(line)
                self.lines += 1
                yield begin, line

    def where(self) -> str:
        """The line read last, for an error message."""
        return f'{self.path}, line {self.lines}'


def parse(line: bytes, where: str) -> dict[str, Any]:
    """The object in a line; UserError, which says `where` it is, for anything else."""
    value = storage.parse_json(line, where)
    if not isinstance(value, dict):
        raise UserError(f'{where} is a {type(value).__name__}, not an object')
    return value


class FileTaken(UserError):
    """A file that is being written was moved, replaced or changed by somebody else.

    what: what has happened to it, for people who do not see the computer that it is on.
    """

    def __init__(self, path: str, what: str, advice: str) -> None:
        super().__init__(
            f'{path} {what} while this program was using it, so nothing more is saved: {advice}'
        )
        self.what = f'{os.path.basename(path)} {what}'


class Writer:
    """The only writer of a file, which appends to it; creates the file if it does not exist.

    in_use: the error where another process is writing the file. dropped: bytes of an unfinished
    last line that was removed.
    """

    def __init__(self, path: str, in_use: str) -> None:
        self.path = path
        try:
            is_new = not os.path.exists(path)
            self.file = open(path, 'ab+', buffering=0, opener=storage.open_nofollow)
            self._lock(in_use)
            self.dropped = self._drop_torn_line()
            self._size = self.file.seek(0, io.SEEK_END)
            if is_new:
                storage.sync_directory(os.path.dirname(path))
        except OSError as e:
            raise UserError(f'{path} cannot be written: {e.strerror or e}') from e

    def _lock(self, in_use: str) -> None:
        try:
            storage.lock_file(self.file)
        except BlockingIOError:
            self.file.close()
            raise UserError(in_use) from None

    def _drop_torn_line(self) -> int:
        size = self.file.seek(0, io.SEEK_END)
        end = _end_of_last_line(self.file, size)
        if end < size:
            self.file.truncate(end)
            os.fsync(self.file.fileno())
        return size - end

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Add a line for each record: all are on the disk when this returns, or UserError.

        FileTaken where they would not be found under the name of the file.
        """
        lines = [json.dumps(record, allow_nan=False).encode() + b'\n' for record in records]
        data = b''.join(lines)
        self.check()
        try:
            storage.append(self.file, data, sync=True)
        except OSError as e:
            raise UserError(
                f'{self.path} cannot be written: {e.strerror or e}; what it had is saved'
            ) from e
        self.remember(data)
        self.check()

    def remember(self, data: bytes) -> None:
        """Note that the file has grown by `data`."""
        self._size += len(data)

    def check(self) -> None:
        """Raise FileTaken if the name means another file, or somebody else has changed this one.

        All is well again once the file is back as it was.
        """
        try:
            what = self.what_happened()
            if what is not None:
                raise FileTaken(self.path, what, self.advice())
        except OSError as e:
            raise UserError(f'{self.path} cannot be written: {e.strerror or e}') from e

    def what_happened(self) -> str | None:
        """What somebody has done to the file; None if it is as this process left it."""
        ours = os.fstat(self.file.fileno())
        try:
            named = os.lstat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return 'was moved' if ours.st_nlink else 'was deleted'
        if not os.path.samestat(ours, named):
            return 'was replaced'
        if ours.st_nlink > 1:
            return 'was given a second name (a hard link)'
        if ours.st_size < self._size:
            return 'was cut off'
        if ours.st_size > self._size:
            return 'was added to by somebody else'
        return None

    def advice(self) -> str:
        """What to do about it."""
        number = self.file.fileno()
        if os.fstat(number).st_nlink > 1:
            return 'put a copy in its place, and start again'
        now = os.readlink(f'/proc/self/fd/{number}')
        if now == os.path.realpath(self.path) or not os.path.exists(now):
            return 'see to it that nobody else uses the file, and start again'
        return f'its lines are in {now}; move that back, or start again'

    def close(self) -> None:
        """Let others write."""
        self.file.close()


def _end_of_last_line(file: io.FileIO, size: int, block: int = 1 << 16) -> int:
    """Where the last whole line of a file of `size` bytes ends."""
    end = size
    while end > 0:
        begin = max(0, end - block)
        file.seek(begin)
        found = file.read(end - begin).rfind(b'\n')
        if found >= 0:
            return begin + found + 1
        end = begin
    return 0
