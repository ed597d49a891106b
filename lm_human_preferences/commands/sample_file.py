"""The file of `./sample.py sample --output`: one JSON object a line, written at once."""

import io
import json
from collections.abc import Mapping
from typing import Any

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError, about_option
from lm_human_preferences.storage import outputs


class SampleFile:
    """A file that is made when the first sample is written: a run that fails before leaves none.

    path: None for no file.
    """

    def __init__(self, path: str | None) -> None:
        self.path = path
        self.file: io.FileIO | None = None
        self.count = 0
        if path is not None:
            with about_option('--output'):
                outputs.check_new_file(path)

    def write(self, sample: Mapping[str, Any]) -> None:
        """Add a line, which is in the file when this returns; UserError where that fails."""
        if self.path is None:
            return
        line = json.dumps(sample, ensure_ascii=False, allow_nan=False).encode() + b'\n'
        try:
            if self.file is None:
                self.file = open(self.path, 'xb', buffering=0)
            storage.append(self.file, line, sync=False)
        except OSError as e:
            raise UserError(
                f'--output {self.path} cannot be written: {e.strerror}; it has {self.count} samples'
            ) from e
        self.count += 1
