"""TensorBoard's files of events.

They are written here rather than by TensorBoard's own writer, torch's SummaryWriter: that one takes
longer to import and to write, and its `purge_step` only hides the events that a resumed run logs
again, while they stay in the files (benchmarks/README.md has the figures). What is imported here
takes a tenth of a second, so only a rank that writes such a file imports this module.
"""

from __future__ import annotations

import glob
import math
import os
import socket
import struct
import time
from collections.abc import Mapping
from typing import BinaryIO

from tensorboard.compat.proto.event_pb2 import (
    Event,  # pyright: ignore[reportAttributeAccessIssue]
    SessionLog,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboard.compat.proto.summary_pb2 import (
    Summary,  # pyright: ignore[reportAttributeAccessIssue]
)

from lm_human_preferences.storage.crc import masked_crc

_STRING = 7  # DT_STRING of TensorFlow's types
_PREFIX = 'events.out.tfevents.'  # of the names of TensorBoard's files


def create(directory: str, first_step: int | None) -> BinaryIO:
    """A new file in a directory, which is made.

    first_step: that a resumed run begins with, for a TensorBoard that is running; else None.
    """
    os.makedirs(directory, exist_ok=True)
    # TensorBoard reads files in the order of their names. The clock alone may get that wrong: it
    # may have been set back, and another machine's may be behind.
    second = int(time.time())
    for path in _paths(directory):
        other = os.path.basename(path).split('.')[3]
        if other.isdecimal():
            second = max(second, int(other) + 1)
    name = f'{_PREFIX}{second}.{socket.gethostname()}.{os.getpid()}'
    file = open(os.path.join(directory, name), 'ab')
    file.write(_encode(Event(wall_time=time.time(), file_version='brain.Event:2')))
    if first_step is not None:
        start = SessionLog(status=SessionLog.START)
        event = Event(wall_time=time.time(), step=first_step, session_log=start)
        file.write(_encode(event))
    return file


def record_of(stats: Mapping[str, float], step: int) -> bytes:
    """What a file holds of the numbers `stats` {tag: number} of a step."""
    summary = Summary()
    for tag, value in stats.items():
        summary.value.add(tag=tag, simple_value=value)
    return _encode(Event(wall_time=time.time(), step=step, summary=summary))


def record_of_text(tag: str, text: str, step: int) -> bytes:
    """What a file holds of a text, which TensorBoard shows as Markdown."""
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
    """The paths of TensorBoard's files in a directory."""
    return glob.glob(os.path.join(glob.escape(directory), f'{_PREFIX}*'))


def _encode(event: Event) -> bytes:
    """An event as a record of TensorBoard's files: its length, CRC of that, the event, its CRC."""
    data = event.SerializeToString()
    length = struct.pack('<Q', len(data))
    length_crc = struct.pack('<I', masked_crc(length))
    return length + length_crc + data + struct.pack('<I', masked_crc(data))


def _cut(path: str, step: int) -> None:
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
