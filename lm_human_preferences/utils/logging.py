"""Logging: numbers to TensorBoard's files and the console, and which lines are printed at all."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO, Protocol

import numpy as np
from tqdm import tqdm

from lm_human_preferences.errors import UserError

ALARMS = 'alarms'  # the tag, in TensorBoard, of warnings about a training that goes wrong
_console = 'summary'  # a value of --run.console


class Rank(Protocol):
    """One of the processes of a run, as `distributed.comm.Comm`: only rank 0 prints."""

    rank: int


def configure_console(console: str) -> None:
    """Have this process print as `console`, a value of --run.console, wants it."""
    global _console
    _console = console


def console_is(console: str) -> bool:
    """Whether this process prints as `console`, a value of --run.console, wants it."""
    return _console == console


def log_line(*lines: object) -> None:
    """Print lines above a running progress bar; nothing where the console is quiet."""
    if _console != 'quiet':
        announce(*lines)


def log_in_summary(*lines: object) -> None:
    """Print lines that the original did not print in any form: for the console `summary` only."""
    if _console == 'summary':
        announce(*lines)


def log_as_original(*lines: object) -> None:
    """Print the original's lines that tell a person little: for the console `original` only."""
    if _console == 'original':
        announce(*lines)


def announce(*lines: object) -> None:
    """Print lines whatever the console is: warnings, and results at the end."""
    if not lines:
        return
    text = '\n'.join(map(str, lines))
    if sys.stderr.isatty():
        tqdm.write(text)
    else:
        print(text, flush=True)


def progress(iterable: Iterable[Any] | None = None, *, comm: Rank, **settings: Any) -> tqdm:
    """A tqdm bar on rank 0, unless the console is quiet; a file gets fewer lines than a terminal.

    settings: those of tqdm.
    """
    is_hidden = comm.rank != 0 or _console == 'quiet'
    seconds = 0.5 if sys.stderr.isatty() else 30
    return tqdm(iterable, disable=is_hidden, mininterval=seconds, **settings)


class Logger:
    """Writes every step to SAVE_DIR/tb/SUBDIR, and prints every `log_interval`-th one.

    Only rank 0 does anything. The original lost its last events; this one flushes with each printed
    step and when it is closed.
    """

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
        self.file: BinaryIO | None = None
        self.first_step: int | None = None

    def purge_from(self, step: int) -> None:
        """Delete what an interrupted run has logged from `step` on; call it before `log`."""
        if self.directory:
            from lm_human_preferences.utils import event_files

            with self._translate_errors():
                event_files.purge(self.directory, step)
        self.first_step = step  # is logged, for a TensorBoard that is running

    def is_due(self, step: int) -> bool:
        """Whether this rank prints at `step`."""
        return self.active and step % self.log_interval == 0

    def log(self, stats: Mapping[str, float], step: int, *, tag_prefix: str | None = None) -> None:
        """Record `stats`, a dict of numbers, under `step` (from 0).

        tag_prefix: of their names in TensorBoard; None: that of the logger.
        """
        prefix = self.tag_prefix if tag_prefix is None else tag_prefix
        if self.directory:
            from lm_human_preferences.utils import event_files

            named = {prefix + name: value for name, value in stats.items()}
            self._write(event_files.record_of(named, step))
        if self.is_due(step):
            lines = [f'k =  {name} , v =  {_as_float32(value)}' for name, value in stats.items()]
            log_as_original(*lines)
            self.flush()

    def log_text(self, tag: str, text: str, step: int) -> None:
        """Record a text in Markdown under `step`, for TensorBoard only."""
        if self.directory:
            from lm_human_preferences.utils import event_files

            self._write(event_files.record_of_text(tag, text, step))

    def _write(self, record: bytes) -> None:
        """Add a record to the file, which is made for the first one."""
        assert self.directory is not None
        with self._translate_errors():
            if self.file is None:
                from lm_human_preferences.utils import event_files

                self.file = event_files.create(self.directory, self.first_step)
            self.file.write(record)

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            raise UserError(f'cannot write to {self.directory}: {e.strerror}') from e

    def flush(self) -> None:
        """Write what was logged so far."""
        if self.file:
            with self._translate_errors():
                self.file.flush()

    def close(self) -> None:
        """Write what is still buffered."""
        if self.file:
            with self._translate_errors():
                self.file.close()


def _as_float32(value: object) -> object:
    """A float as numpy prints it in float32, without digits that mean nothing."""
    return str(np.float32(value)) if isinstance(value, float) else value
