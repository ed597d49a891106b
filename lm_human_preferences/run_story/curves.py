"""A run's curves and the texts beside them, read from TensorBoard's events."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import math
import os
from collections.abc import Iterator
from typing import Any

from lm_human_preferences import storage
from lm_human_preferences.utils.logging import ALARMS

_TEXT = 'text'  # TensorBoard's plugin
_PREFIX = 'events.out.tfevents.'  # of the names of its files


@dataclasses.dataclass(frozen=True)
class Curve:
    """Numbers of steps, in the steps' order; those that are not finite are left out."""

    steps: tuple[int, ...]
    values: tuple[float, ...]

    @property
    def last(self) -> float:
        """The number of the last step that has one."""
        return self.values[-1]


@dataclasses.dataclass(frozen=True)
class Log:
    """What the events of a training say.

    curves: {tag: Curve}. broken: {tag: first step whose number is not finite, where the last one is
    not}: these have no curve. alarms: (step, what was told). resumed: the steps at which it went
    on.
    """

    curves: dict[str, Curve] = dataclasses.field(default_factory=dict)
    broken: dict[str, int] = dataclasses.field(default_factory=dict)
    alarms: tuple[tuple[int, str], ...] = ()
    resumed: tuple[int, ...] = ()


def read(run: str, events: str) -> Log:
    """The events in the directory `events` of a run.

    An empty log where there are none, or those of a remote run cannot be had.
    """
    curves: dict[str, dict[int, float]] = {}
    alarms: dict[tuple[int, str], None] = {}
    resumed: list[int] = []
    for event in _events(run, events):
        if event.HasField('session_log'):
            resumed.append(event.step)
        for value in event.summary.value:
            if value.metadata.plugin_data.plugin_name != _TEXT:
                curves.setdefault(value.tag, {})[event.step] = value.simple_value
            elif value.tag == ALARMS:
                for text in value.tensor.string_val:
                    alarms[event.step, text.decode(errors='replace')] = None
    broken = {}
    for tag, values in curves.items():
        if not math.isfinite(values[max(values)]):
            broken[tag] = min(step for step in values if not math.isfinite(values[step]))
    return Log(
        {tag: _curve(values) for tag, values in curves.items() if tag not in broken},
        broken,
        tuple(sorted(alarms)),
        tuple(sorted(set(resumed))),
    )


def _curve(values: dict[int, float]) -> Curve:
    steps = tuple(sorted(step for step in values if math.isfinite(values[step])))
    return Curve(steps, tuple(values[step] for step in steps))


def _events(run: str, events: str) -> Iterator[Any]:
    """Those of all files of a run, one after another; of a damaged file those before the damage."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import (
        Event,  # pyright: ignore[reportAttributeAccessIssue]  protobuf makes it at run time
    )

    for path in _files(run, events):
        with contextlib.suppress(Exception):  # whatever a damaged file makes of these libraries
            for record in RawEventFileLoader(path).Load():
                yield Event.FromString(record)


def _files(run: str, events: str) -> list[str]:
    """The paths of a run's files of events, in their order: a later one continues an earlier one.

    Those of a remote run are the copy that it was written to, else they are fetched.
    """
    if not storage.is_remote(run):
        return _files_in(os.path.join(run, events))
    with contextlib.suppress(storage.StorageError):
        found = _files_in(os.path.join(storage.staging_dir(run), events))
        if found:
            return found
        directory = storage.join(run, events)
        names = [name for name in storage.listing(directory) if name.startswith(_PREFIX)]
        return [storage.cached_path(storage.join(directory, name)) for name in sorted(names)]
    return []


def _files_in(directory: str) -> list[str]:
    return sorted(glob.glob(os.path.join(glob.escape(directory), f'{_PREFIX}*')))
