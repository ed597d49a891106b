"""Logging: numbers to TensorBoard's files and to the console, and which lines are printed at all.

TensorBoard's files are written here rather than by TensorBoard's own writer, torch's SummaryWriter:
that one takes longer to import and to write, and its `purge_step` only hides the events that a
resumed run logs again, while they stay in the files (benchmarks/README.md has the figures).
"""

from __future__ import annotations

import contextlib
import glob
import math
import os
import socket
import struct
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO, Protocol

import numpy as np
from tensorboard.compat.proto.event_pb2 import (
    Event,  # pyright: ignore[reportAttributeAccessIssue]
    SessionLog,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboard.compat.proto.summary_pb2 import (
    Summary,  # pyright: ignore[reportAttributeAccessIssue]
)
from tqdm import tqdm

from lm_human_preferences.errors import UserError
from lm_human_preferences.storage.crc import masked_crc

_console = 'summary'  # a value of --run.console
_PREFIX = 'events.out.tfevents.'  # of the names of TensorBoard's files


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
            with self._translate_errors():
                for path in _event_files(self.directory):
                    _cut_events(path, step)
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
            summary = Summary()
            for name, value in stats.items():
                summary.value.add(tag=prefix + name, simple_value=value)
            with self._translate_errors():
                if self.file is None:
                    self.file = self._open()
                self.file.write(_encode(Event(wall_time=time.time(), step=step, summary=summary)))
        if self.is_due(step):
            lines = [f'k =  {name} , v =  {_as_float32(value)}' for name, value in stats.items()]
            log_as_original(*lines)
            self.flush()

    def _open(self) -> BinaryIO:
        assert self.directory is not None
        os.makedirs(self.directory, exist_ok=True)
        # TensorBoard reads files in the order of their names. The clock alone may get that wrong:
        # it may have been set back, and another machine's may be behind.
        second = int(time.time())
        for path in _event_files(self.directory):
            other = os.path.basename(path).split('.')[3]
            if other.isdecimal():
                second = max(second, int(other) + 1)
        name = f'{_PREFIX}{second}.{socket.gethostname()}.{os.getpid()}'
        file = open(os.path.join(self.directory, name), 'ab')
        file.write(_encode(Event(wall_time=time.time(), file_version='brain.Event:2')))
        if self.first_step is not None:
            start = SessionLog(status=SessionLog.START)
            event = Event(wall_time=time.time(), step=self.first_step, session_log=start)
            file.write(_encode(event))
        return file

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


def _event_files(directory: str) -> list[str]:
    """The paths of TensorBoard's files in a directory."""
    return glob.glob(os.path.join(glob.escape(directory), f'{_PREFIX}*'))


def _encode(event: Event) -> bytes:
    """An event as a record of TensorBoard's files: its length, CRC of that, the event, its CRC."""
    data = event.SerializeToString()
    length = struct.pack('<Q', len(data))
    length_crc = struct.pack('<I', masked_crc(length))
    return length + length_crc + data + struct.pack('<I', masked_crc(data))


def _cut_events(path: str, step: int) -> None:
    """Cut a file off before the first event of `step` or later, or of which a kill left a part."""
    if os.path.islink(path) or not os.path.isfile(path):  # somebody else has put it there
        return
    with open(path, 'rb+') as f:
        data = f.read()
        end = 0
        while end < len(data):
            next_end = end + 16 + int.from_bytes(data[end : end + 8], 'little')
            event = data[end + 12 : next_end - 4]
            crc = int.from_bytes(data[next_end - 4 : next_end], 'little')
            if masked_crc(event) != crc or _step_of(event) >= step:
                break
            end = next_end
        f.truncate(end)
    if end == 0:
        os.remove(path)


def _step_of(event: bytes) -> float:
    """The step of a serialized event; infinity if it is none."""
    try:
        return Event.FromString(event).step
    except Exception:  # protobuf's DecodeError, but only tensorboard imports protobuf
        return math.inf


def _as_float32(value: object) -> object:
    """A float as numpy prints it in float32, without digits that mean nothing."""
    return str(np.float32(value)) if isinstance(value, float) else value
