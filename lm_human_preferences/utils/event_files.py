"""Reader and writer of event files. TensorBoard's code is slow, and crashes on a full disk."""

import contextlib
import glob
import io
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from typing import Any

from tensorboard.compat.proto.event_pb2 import (
    Event,  # pyright: ignore[reportAttributeAccessIssue]
    SessionLog,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboard.compat.proto.summary_pb2 import (
    Summary,  # pyright: ignore[reportAttributeAccessIssue]
)

from lm_human_preferences.storage.files import masked_crc

_STRING = 7  # number of TensorFlow's data type DT_STRING
PREFIX = 'events.out.tfevents.'  # prefix of the names of event files


def create(directory: str, first_step: int | None) -> io.FileIO:
    """Create and return an unbuffered event file. first_step: step at which a run is resumed."""
    os.makedirs(directory, exist_ok=True)
    # TensorBoard sorts files by name: make the new one the last, even if the clock was set back.
    second = int(time.time())
    for path in paths(directory):
        other = os.path.basename(path).split('.')[3]
        if other.isdecimal():
            second = max(second, int(other) + 1)
    name = f'{PREFIX}{second}.{socket.gethostname()}.{os.getpid()}'
    file = open(os.path.join(directory, name), 'ab', buffering=0)
    file.write(_encode(Event(wall_time=time.time(), file_version='brain.Event:2')))
    if first_step is not None:
        start = SessionLog(status=SessionLog.START)
        event = Event(wall_time=time.time(), step=first_step, session_log=start)
        file.write(_encode(event))
    return file


def record_of(stats: Mapping[str, float], step: int) -> bytes:
    values = [Summary.Value(tag=tag, simple_value=value) for tag, value in stats.items()]
    return _encode(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))


def record_of_text(tag: str, text: str, step: int) -> bytes:
    """Return the record for a text, which TensorBoard shows as Markdown."""
    summary = Summary()
    value = summary.value.add(tag=tag)
    value.metadata.plugin_data.plugin_name = 'text'
    value.tensor.dtype = _STRING
    value.tensor.string_val.append(text.encode(errors='replace'))
    value.tensor.tensor_shape.dim.add(size=1)
    return _encode(Event(wall_time=time.time(), step=step, summary=summary))


def read(path: str) -> Iterator[tuple[Any, int]]:
    """Yield (event, position of its end) for each event in a file before the first damaged one."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader

    end = 0
    with contextlib.suppress(Exception):  # a damaged file may cause any error in a library
        for record in RawEventFileLoader(path).Load():
            end += len(record) + 16  # a record's length and two CRCs take 16 bytes
            yield Event.FromString(record), end


def purge(directory: str, step: int) -> None:
    """Delete events of `step` and later, and damaged events, from all files in a directory."""
    for path in paths(directory):
        kept = 0
        for event, end in read(path):
            if event.step >= step:
                break
            kept = end
        if kept:
            os.truncate(path, kept)
        else:
            os.remove(path)


def paths(directory: str) -> list[str]:
    """Return the paths of a directory's event files in order, leaving out links and pipes."""
    found = glob.glob(os.path.join(glob.escape(directory), f'{PREFIX}*'))
    return sorted(path for path in found if os.path.isfile(path) and not os.path.islink(path))


def _encode(event: Event) -> bytes:
    """Encode an event as its length, a CRC of the length, the event, and a CRC of the event."""
    data = event.SerializeToString()
    length = struct.pack('<Q', len(data))
    length_crc = struct.pack('<I', masked_crc(length))
    return length + length_crc + data + struct.pack('<I', masked_crc(data))
