"""Append-only files of one JSON object a line; a line that a kill left unfinished is removed."""

import contextlib
import json
import mmap
import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError, os_errors_as


class Reader:
    """Reader that follows a file as it grows; a file that is not there is empty.

    most_lines: where to stop, as if the file had no more; None: at its end. offset, lines: how much
    has been read. torn: bytes after that, of a line that has no end yet.
    """

    def __init__(self, path: str, most_lines: int | None = None) -> None:
        self.path = path
        self.most_lines = most_lines
        self.offset = self.lines = self.torn = 0
        self._last = b''  # line that was read

    def was_cut(self) -> bool:
        """Return whether the last line is gone: its write has failed, or the file was edited."""
        try:
            with open(self.path, 'rb', opener=storage.open_nofollow) as file:
                file.seek(self.offset - len(self._last))
                return file.read(len(self._last)) != self._last
        except OSError:  # of which reading on tells
            return False

    def new_lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield (where it begins, a line with its end) for each line since the last call."""
        self.torn = 0
        with os_errors_as(f'{self.path} cannot be read'):
            try:
                file = open(self.path, 'rb', opener=storage.open_nofollow)
            except FileNotFoundError:
                return
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
                self._last = line
                yield begin, line

    def new_records(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (file and line for messages, object) for each line since the last call."""
        for _, line in self.new_lines():
            yield self.where(), parse(line, self.where())

    def where(self) -> str:
        """Return the name of the line read last, for an error message."""
        return f'{self.path}, line {self.lines}'


def parse(line: bytes, where: str) -> dict[str, Any]:
    """Return the object in a line; UserError, which says `where` it is, for anything else."""
    value = storage.parse_json(line, where)
    if not isinstance(value, dict):
        raise UserError(f'{where} is a {type(value).__name__}, not an object')
    return value


class FileTaken(UserError):
    """Error: a file in use was moved, replaced or changed; `what` describes it without the path."""

    def __init__(self, path: str, what: str, advice: str) -> None:
        super().__init__(
            f'{path} {what} while this program was using it, so nothing more is saved: {advice}'
        )
        self.what = f'{os.path.basename(path)} {what}'


class Writer:
    """Exclusive writer of a file, which it creates if necessary.

    in_use: the error if another process is writing the file. keeps_lines: whether to remember all
    lines, and to save them in another file if this one is deleted or written over. dropped: bytes
    of an unfinished last line that was removed.
    """

    def __init__(
        self,
        path: str,
        in_use: str,
        *,
        keeps_lines: bool = False,
        opener: Callable[[str, int], int] = storage.open_nofollow,
    ) -> None:
        self.path = path
        self._unwritable = f'{path} cannot be written'
        self._rescue: tuple[str, str] | None = None  # change of a lost file, and advice
        is_new = not os.path.exists(path)
        # Where this fails, the lock would last as long as the error's traceback.
        with os_errors_as(self._unwritable), contextlib.ExitStack() as opened:
            try:
                self.file = opened.enter_context(storage.open_locked(path, 'ab+', opener=opener))
            except BlockingIOError:
                raise UserError(in_use) from None
            self.dropped = self._drop_torn_line()
            self._size = os.fstat(self.file.fileno()).st_size
            self._lines = bytearray(self._content()) if keeps_lines else None
            if is_new:
                storage.sync_directory(os.path.dirname(path))
            opened.pop_all()

    def _drop_torn_line(self) -> int:
        size = os.fstat(self.file.fileno()).st_size
        if size == 0:
            return 0
        with mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            end = content.rfind(b'\n') + 1
        if end < size:
            self.file.truncate(end)
            os.fsync(self.file.fileno())
        return size - end

    def _content(self) -> bytes:
        self.file.seek(0)
        return self.file.readall()

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append lines, synced to disk on return; FileTaken if the path no longer leads to them."""
        lines = [json.dumps(record, allow_nan=False).encode() + b'\n' for record in records]
        data = b''.join(lines)
        self.check_unchanged()
        with os_errors_as(self._unwritable, '; what it had is saved'):
            storage.append(self.file, data, sync=True)
        self._size += len(data)
        if self._lines is not None:
            self._lines += data
        self.check_unchanged()

    def check_unchanged(self) -> None:
        """Raise FileTaken if the path leads to another file, or others have changed this one."""
        with os_errors_as(self._unwritable):
            what = self._change()
            if what is None:
                self._rescue = None
                return
            if self._rescue is None and self._is_lost():
                self._rescue = what, self._save_lines()
            raise FileTaken(self.path, *(self._rescue or (what, self._advice())))

    def _change(self) -> str | None:
        """Return the change of the file by somebody else; None if it is as this process left it."""
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
        if self._lines is not None and self._content() != self._lines:
            return 'was changed by somebody else'
        return None

    def _advice(self) -> str:
        number = self.file.fileno()
        if os.fstat(number).st_nlink > 1:
            return 'put a copy in its place, and start again'
        now = os.readlink(f'/proc/self/fd/{number}')
        if now == os.path.realpath(self.path) or not os.path.exists(now):
            return 'see to it that nobody else uses the file, and start again'
        return f'its lines are in {now}; move that back, or start again'

    def _is_lost(self) -> bool:
        """Return whether lines are gone, or will be when this process ends."""
        if not self._lines:
            return False
        is_deleted = os.fstat(self.file.fileno()).st_nlink == 0
        return is_deleted or not self._content().startswith(self._lines)

    def _save_lines(self) -> str:
        """Save the lines in a new file at the path, or elsewhere if that fails; return advice."""
        directory = os.path.dirname(self.path)
        try:
            copy = self._save_lines_in(directory)
        except OSError:  # it was taken away as well, or is full
            copy = self._save_lines_in(tempfile.gettempdir())
        try:
            os.link(copy, self.path)
        except OSError:  # there is a file of that name, or no such directory
            return f'its lines are in {copy}; move that to {self.path}, and start again'
        os.remove(copy)
        storage.sync_directory(directory)
        return 'its lines are in a new file of that name; start again'

    def _save_lines_in(self, directory: str) -> str:
        assert self._lines is not None
        name = f'{os.path.basename(self.path)}.'
        number, path = tempfile.mkstemp('.saved', name, directory)
        with open(number, 'wb', buffering=0) as file:
            os.fchmod(number, stat.S_IMODE(os.fstat(self.file.fileno()).st_mode))
            storage.append(file, bytes(self._lines), sync=True)
        return path

    def close(self) -> None:
        self.file.close()
