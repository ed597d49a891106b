"""Logging: numbers to TensorBoard and the console, lines of text to the console."""

import io
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np
from tqdm import tqdm

from lm_human_preferences import storage
from lm_human_preferences.errors import os_errors_as
from lm_human_preferences.utils import streams

ALARMS = 'alarms'  # TensorBoard's tag for warnings about a training that goes wrong
# Tags of statistics of responses: mean length in tokens, fraction ended, and fraction valid
LENGTH, ENDED, VALID = 'responses/length', 'responses/ended', 'responses/valid'
_console = 'summary'  # value of --run.console


class Rank(Protocol):
    """Part of the interface of `distributed.comm.Comm` that suffices to print on rank 0 only."""

    rank: int


def configure_console(console: str) -> None:
    global _console
    _console = console


def console_is(console: str) -> bool:
    return _console == console


def log_in_summary(*lines: object) -> None:
    """Print lines if --run.console is `summary`."""
    if _console == 'summary':
        announce(*lines)


def log_as_original(*lines: object) -> None:
    """Print `lines`, which are in the original's format, if --run.console is `original`."""
    if _console == 'original':
        announce(*lines)


def announce(*lines: object) -> None:
    """Print lines, above a progress bar if there is one, whatever --run.console is."""
    if not lines:
        return
    text = '\n'.join(map(str, lines))
    with streams.lost_output_is_reported():
        if sys.stderr.isatty():
            tqdm.write(text)
        else:
            print(text, flush=True)


def progress(iterable: Iterable[Any] | None = None, *, comm: Rank, **settings: Any) -> tqdm:
    """Return a tqdm progress bar, which is shown only on rank 0 and on a terminal."""
    is_hidden = comm.rank != 0 or not sys.stderr.isatty()
    return tqdm(iterable, disable=is_hidden, mininterval=0.5, **settings)


class Logger:
    """Logger of rank 0, which writes all steps to SAVE_DIR/tb/SUBDIR and prints some steps."""

    def __init__(
        self,
        save_dir: str | None,
        subdir: str,
        *,
        log_interval: int,
        comm: Rank,
        tag_prefix: str = '',
    ) -> None:
        self.log_interval = log_interval
        self.tag_prefix = tag_prefix
        self.active = comm.rank == 0
        self.directory: str | None = None
        if self.active and save_dir:
            self.directory = os.path.join(save_dir, 'tb', subdir)
        self.file: io.FileIO | None = None
        self.first_step: int | None = None

    def purge_from(self, step: int) -> None:
        """Delete an interrupted run's events from `step` on; to be called before `log`."""
        if self.directory:
            with os_errors_as(f'cannot write to {self.directory}'):
                _event_files().purge(self.directory, step)
        self.first_step = step  # tells a running TensorBoard to drop its events from this step on

    def is_due(self, step: int) -> bool:
        """Return whether this rank prints the statistics of `step`."""
        return self.active and step % self.log_interval == 0

    def log(self, stats: Mapping[str, float], step: int, *, tag_prefix: str | None = None) -> None:
        """Log {name: number} of `step`, counted from 0. Default tag_prefix: the logger's prefix."""
        prefix = self.tag_prefix if tag_prefix is None else tag_prefix
        if self.directory:
            named = {prefix + name: value for name, value in stats.items()}
            self._write(_event_files().record_of(named, step))
        if self.is_due(step):
            for name, value in stats.items():
                # Print floats as float32, without meaningless digits.
                shown = str(np.float32(value)) if isinstance(value, float) else value
                log_as_original(f'k =  {name} , v =  {shown}')

    def log_text(self, tag: str, text: str, step: int) -> None:
        if self.directory:
            self._write(_event_files().record_of_text(tag, text, step))

    def _write(self, record: bytes) -> None:
        """Append a record to the unbuffered event file; the first record creates the file."""
        assert self.directory is not None
        with os_errors_as(f'cannot write to {self.directory}'):
            if self.file is None:
                self.file = _event_files().create(self.directory, self.first_step)
            assert self.file is not None
            storage.append(self.file, record, sync=False)

    def close(self) -> None:
        if self.file:
            self.file.close()


def _event_files() -> Any:
    """Import event_files only when events are written, because the import is slow."""
    from lm_human_preferences.utils import event_files

    return event_files
