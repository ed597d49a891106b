"""Files of one JSON object a line that grow at the end, and are exact after a kill at any moment.

A line is in the file when `append` returns: it was written whole and synchronised to the disk. A
kill may leave a last line without its line end, which nobody was told of: readers stop before it,
and the next writer removes it.
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
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise UserError(f'{where} is not JSON: {e}') from e
    if not isinstance(value, dict):
        raise UserError(f'{where} is a {type(value).__name__}, not an object')
    return value


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
        """Add a line for each record: all are on the disk when this returns, or UserError."""
        lines = [json.dumps(record, allow_nan=False).encode() + b'\n' for record in records]
        try:
            storage.append(self.file, b''.join(lines), sync=True)
        except OSError as e:
            raise UserError(
                f'{self.path} cannot be written: {e.strerror or e}; what it had is saved'
            ) from e

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
