"""The file of `./sample.py sample --output`: one JSON object a line, written at once."""

import io
import json
import os
from collections.abc import Mapping
from typing import Any

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError


def check(path: str) -> None:
    """Raise UserError unless `path` is a file that can be made: nothing is ever written over."""
    directory = os.path.dirname(path) or '.'
    if storage.is_remote(path):
        raise UserError(f'--output {path}: give a local path')
    if os.path.lexists(path):
        raise UserError(f'--output {path} exists: give another name')
    if not os.path.isdir(directory):
        raise UserError(f'--output {path}: there is no directory {directory}')
    if not path or not os.access(directory, os.W_OK | os.X_OK):
        raise UserError(f'--output {path!r}: you may not write there, give another name')


class SampleFile:
    """A file that is made when the first sample is written: a run that fails before leaves none.

    path: None for no file.
    """

    def __init__(self, path: str | None) -> None:
        self.path = path
        self.file: io.FileIO | None = None
        self.count = 0
        if path is not None:
            check(path)

    def write(self, sample: Mapping[str, Any]) -> None:
        """Add a line, which is in the file when this returns; UserError where that fails."""
        if self.path is None:
            return
        line = json.dumps(sample, ensure_ascii=False, allow_nan=False).encode() + b'\n'
        try:
            if self.file is None:
                self.file = open(self.path, 'xb', buffering=0)
            self._append(line)
        except OSError as e:
            raise UserError(
                f'--output {self.path} cannot be written: {e.strerror}; it has {self.count} samples'
            ) from e
        self.count += 1

    def _append(self, line: bytes) -> None:
        """Write all of `line`, or nothing of it."""
        assert self.file is not None
        begin = self.file.tell()
        rest = memoryview(line)
        try:
            while rest:  # a disk that becomes full takes a part, and fails the next time
                rest = rest[self.file.write(rest) :]
        except BaseException:
            self.file.truncate(begin)
            raise
