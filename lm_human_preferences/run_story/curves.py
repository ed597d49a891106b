"""The last values of a run's curves, read from TensorBoard's events."""

from __future__ import annotations

import glob
import math
import os
from typing import NamedTuple

from lm_human_preferences import storage


class Value(NamedTuple):
    """The last value of a curve. steps: how many values it has."""

    last: float
    steps: int


def last_values(run: str, events: str) -> dict[str, Value]:
    """{tag: Value} of the events in the directory `events` of a run.

    Nothing where there are none, and for a remote run that this machine has no copy of.
    """
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import (
        Event,  # pyright: ignore[reportAttributeAccessIssue]  protobuf makes it at run time
    )

    found: dict[str, dict[int, float]] = {}
    directory = storage.staging_dir(run) if storage.is_remote(run) else run
    pattern = os.path.join(glob.escape(directory), events, 'events.out.tfevents.*')
    for path in sorted(glob.glob(pattern)):  # a later file continues an earlier one
        try:
            for record in RawEventFileLoader(path).Load():
                event = Event.FromString(record)
                for value in event.summary.value:
                    found.setdefault(value.tag, {})[event.step] = value.simple_value
        except Exception:  # whatever a damaged file makes of these libraries
            continue
    return {
        tag: Value(values[max(values)], len(values))
        for tag, values in found.items()
        if math.isfinite(values[max(values)])
    }
