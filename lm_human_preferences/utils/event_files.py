"""Event files for TensorBoard, whose own writers import slowly and crash on a full disk."""

import glob
import io
import math
import os
import socket
import struct
import time
from collections.abc import Mapping

from tensorboard.compat.proto.event_pb2 import (
    Event,  # pyright: ignore[reportAttributeAccessIssue]
    SessionLog,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboard.compat.proto.summary_pb2 import (
    Summary,  # pyright: ignore[reportAttributeAccessIssue]
)

from lm_human_preferences.storage.crc import masked_crc

_STRING = 7  # TensorFlow's data type DT_STRING
_PREFIX = 'events.out.tfevents.'  # prefix of the names of TensorBoard's files


def create(directory: str, first_step: int | None) -> io.FileIO:
    """Create and return an unbuffered event file. first_step: where a run is resumed, or None."""
    os.makedirs(directory, exist_ok=True)
    # TensorBoard reads files by name: a new one comes last, even if the clock was set back.
    second = int(time.time())
    for path in _paths(directory):
        other = os.path.basename(path).split('.')[3]
        if other.isdecimal():
            second = max(second, int(other) + 1)
    name = f'{_PREFIX}{second}.{socket.gethostname()}.{os.getpid()}'
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
    """Return the record of a text, which TensorBoard shows as Markdown."""
    summary = Summary()
    value = summary.value.add(tag=tag)
    value.metadata.plugin_data.plugin_name = 'text'
    value.tensor.dtype = _STRING
    value.tensor.string_val.append(text.encode(errors='replace'))
    value.tensor.tensor_shape.dim.add(size=1)
    return _encode(Event(wall_time=time.time(), step=step, summary=summary))


def purge(directory: str, step: int) -> None:
    """Delete the events of `step` and later from all files of a directory."""
    for path in _paths(directory):
        _cut(path, step)


def _paths(directory: str) -> list[str]:
    return glob.glob(os.path.join(glob.escape(directory), f'{_PREFIX}*'))


def _encode(event: Event) -> bytes:
    """Return an event as a record: length, CRC of the length, event, CRC of the event."""
    data = event.SerializeToString()
    length = struct.pack('<Q', len(data))
    length_crc = struct.pack('<I', masked_crc(length))
    return length + length_crc + data + struct.pack('<I', masked_crc(data))


def _cut(path: str, step: int) -> None:
    """Truncate a file before its first event that is damaged, or at `step` or later."""
    if os.path.islink(path) or not os.path.isfile(path):  # not written by this program
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
    """Return the step of a serialized event; infinity if it cannot be parsed."""
    try:
        return Event.FromString(event).step
    except Exception:  # protobuf's DecodeError, but only tensorboard imports protobuf
        return math.inf
