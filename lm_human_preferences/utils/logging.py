"""A dict of named numbers in, TensorBoard and the original's console lines out; and what is printed
at all."""

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
from typing import TYPE_CHECKING, Any, BinaryIO

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
from lm_human_preferences.utils.crc import masked_crc

if TYPE_CHECKING:
    from lm_human_preferences.distributed.comm import Comm

_console = 'summary'  # a value of --run.console


def configure_console(console: str) -> None:
    """Set what this process prints from now on to `console`, a value of --run.console: see
    CONSOLES."""
    global _console
    _console = console


def console_is(console: str) -> bool:
    """Whether that is what this process prints."""
    return _console == console


def log_line(*lines: object) -> None:
    """Print lines of news, above a running progress bar; nothing where the console is quiet."""
    if _console != 'quiet':
        announce(*lines)


def say_in_summary(*lines: object) -> None:
    """Print lines that the original did not print in any form: not for the console `original`."""
    if _console == 'summary':
        announce(*lines)


def say_as_recorded(*lines: object) -> None:
    """Print lines of the original's that tell a person little: for the console `original` only."""
    if _console == 'original':
        announce(*lines)


def announce(*lines: object) -> None:
    """Print lines whatever the console is: warnings, and what there is at the end."""
    if not lines:
        return
    text = '\n'.join(map(str, lines))
    if sys.stderr.isatty():
        tqdm.write(text)
    else:
        print(text, flush=True)


def progress(iterable: Iterable[Any] | None = None, *, comm: Comm, **settings: Any) -> tqdm:
    """A tqdm bar on rank 0, unless the console is quiet; drawn often on a terminal, seldom into a
    file."""
    is_hidden = comm.rank != 0 or _console == 'quiet'
    return tqdm(
        iterable, disable=is_hidden, mininterval=0.5 if sys.stderr.isatty() else 30, **settings
    )


class Logger:
    """Writes every step to SAVE_DIR/tb/SUBDIR, prints every `log_interval`-th; silent on other
    ranks than 0.

    The original lost its last events; this one flushes with each printed step and when closed.
    """

    def __init__(
        self,
        save_dir: str | None,
        subdir: str,
        *,
        log_interval: int,
        comm: Comm,
        tag_prefix: str = '',
    ) -> None:
        self.log_interval, self.tag_prefix = log_interval, tag_prefix
        self.active = comm.rank == 0
        self.directory = os.path.join(save_dir, 'tb', subdir) if self.active and save_dir else None
        self.file: BinaryIO | None = None
        self.first_step: int | None = None

    def purge_from(self, step: int) -> None:
        """Forget what a run that was interrupted has logged from `step` on; before anything is
        logged."""
        if self.directory:
            with self._translate_errors():
                _cut_events(self.directory, step)
        self.first_step = step  # tells a TensorBoard that is running

    def is_due(self, step: int) -> bool:
        """Whether this rank prints at `step`."""
        return self.active and step % self.log_interval == 0

    def log(self, stats: Mapping[str, float], step: int) -> None:
        """Record `stats`, a dict of numbers, under `step` (from 0)."""
        if self.directory:
            values = [
                Summary.Value(tag=self.tag_prefix + name, simple_value=value)
                for name, value in stats.items()
            ]
            with self._translate_errors():
                self.file = self.file or self._open()
                self.file.write(
                    _record(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
                )
        if self.is_due(step):
            say_as_recorded(
                *(f'k =  {name} , v =  {_as_float32(value)}' for name, value in stats.items())
            )
            self.flush()

    def _open(self) -> BinaryIO:
        assert self.directory is not None
        os.makedirs(self.directory, exist_ok=True)
        # TensorBoard reads files in the order of their names, which clocks and process ids alone
        # may get wrong.
        others = [
            name.split('.')[3]
            for name in os.listdir(self.directory)
            if name.startswith('events.out.tfevents.')
        ]
        second = max([int(time.time()), *(int(other) + 1 for other in others if other.isdecimal())])
        name = f'events.out.tfevents.{second}.{socket.gethostname()}.{os.getpid()}'
        file = open(os.path.join(self.directory, name), 'ab')
        file.write(_record(Event(wall_time=time.time(), file_version='brain.Event:2')))
        if self.first_step is not None:
            start = SessionLog(status=SessionLog.START)
            file.write(
                _record(Event(wall_time=time.time(), step=self.first_step, session_log=start))
            )
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


def _record(event: Event) -> bytes:
    """An event as TensorBoard's files hold it: its length, a checksum of that, the event, a
    checksum of that."""
    data = event.SerializeToString()
    size = struct.pack('<Q', len(data))
    return b''.join(
        [size, struct.pack('<I', masked_crc(size)), data, struct.pack('<I', masked_crc(data))]
    )


def _cut_events(directory: str, step: int) -> None:
    """Cut TensorBoard's files off before the first event of `step` or later, or where a kill has
    left half of one."""
    for path in glob.glob(os.path.join(glob.escape(directory), 'events.out.tfevents.*')):
        if os.path.islink(path) or not os.path.isfile(path):  # which is not ours to cut
            continue
        with open(path, 'rb+') as f:
            data, end = f.read(), 0
            while end < len(data):
                after = end + 16 + int.from_bytes(data[end : end + 8], 'little')
                event, crc = data[end + 12 : after - 4], data[after - 4 : after]
                if masked_crc(event) != int.from_bytes(crc, 'little') or _step_of(event) >= step:
                    break
                end = after
            f.truncate(end)
        if not end:
            os.remove(path)


def _step_of(event: bytes) -> float:
    """The step of a serialized event; beyond all others of what is none."""
    try:
        return Event.FromString(event).step
    except Exception:  # a DecodeError of protobuf, which is for tensorboard to import
        return math.inf


def _as_float32(value: object) -> object:
    """A number as numpy prints it: in float32 the digits end where the information does."""
    return str(np.float32(value)) if isinstance(value, float) else value
