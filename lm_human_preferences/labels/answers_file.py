"""The file of a labeller's answers while they are at work: what it had survives its deletion."""

from __future__ import annotations

import os
import stat
import tempfile

from lm_human_preferences import storage
from lm_human_preferences.labels import json_lines


class AnswersFile(json_lines.Writer):
    """A file of answers, open for writing by nobody else.

    It remembers its lines. Where somebody deletes the file or writes over it, FileTaken is raised
    as by any Writer, and the lines are saved once more: under the same name if that is free, else
    beside it, or in the temporary directory if there is no such directory any more.
    """

    def __init__(self, path: str, labeller: str) -> None:
        in_use = f'{path} is in use: {labeller} is labelling already; take another --labeller'
        super().__init__(path, in_use)
        self._lines = bytearray(self._content())
        self._rescue: tuple[str, str] | None = None  # what happened, and what to do

    def _content(self) -> bytes:
        self.file.seek(0)
        return self.file.readall()

    def remember(self, data: bytes) -> None:
        """Note that the file has grown by `data`."""
        super().remember(data)
        self._lines += data

    def what_happened(self) -> str | None:
        """What somebody has done to the file, whose lines are then safe; None: nothing."""
        what = super().what_happened()
        if what is None:
            self._rescue = None
            return None
        if self._rescue is None and self._is_lost():
            self._rescue = what, self._save_again()
        # Once the lines are saved under the same name, the file looks replaced, by ourselves.
        return what if self._rescue is None else self._rescue[0]

    def _is_lost(self) -> bool:
        """Whether the file goes when this process ends, or lacks some of its lines."""
        if os.fstat(self.file.fileno()).st_nlink == 0:
            return bool(self._lines)
        return not self._content().startswith(self._lines)

    def advice(self) -> str:
        """What to do about it."""
        return super().advice() if self._rescue is None else self._rescue[1]

    def _save_again(self) -> str:
        """Save the lines in another file; returns what to do."""
        directory = os.path.dirname(self.path)
        try:
            copy = self._copy_in(directory)
        except OSError:  # it was taken away as well, or is full
            copy = self._copy_in(tempfile.gettempdir())
        try:
            os.link(copy, self.path)
        except OSError:  # there is a file of that name, or no such directory
            return f'its lines are in {copy}; move that to {self.path}, and start again'
        os.remove(copy)
        storage.sync_directory(directory)
        return 'its lines are in a new file of that name; start again'

    def _copy_in(self, directory: str) -> str:
        """The path of a new file in a directory, which has the lines."""
        number, path = tempfile.mkstemp('.saved', f'{os.path.basename(self.path)}.', directory)
        try:
            with open(number, 'wb') as file:
                os.fchmod(number, stat.S_IMODE(os.fstat(self.file.fileno()).st_mode))
                file.write(self._lines)
                file.flush()
                os.fsync(number)
        except BaseException:
            os.remove(path)
            raise
        return path
