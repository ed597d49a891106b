"""What happened while a run trained: alarms, interruptions, new reward models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from lm_human_preferences.run_story.curves import Log

ALARM, RESUMED, RETRAINED = 'alarm', 'resumed', 'retrained'
_RETRAINED = 'online/model'  # the tag of their numbers, at the steps before which they were trained


class Mark(NamedTuple):
    """Something at a step. kind: ALARM, RESUMED or RETRAINED."""

    step: int
    kind: str
    text: str


def marks(log: Log) -> Iterator[Mark]:
    """What a log says of its training, kind by kind."""
    for step, text in log.alarms:
        for line in text.splitlines():  # one for each alarm of a step
            if line.strip():
                yield Mark(step, ALARM, ' '.join(line.split()))
    for step in log.resumed:
        yield Mark(step, RESUMED, 'resumed')
    if _RETRAINED in log.curves:
        curve = log.curves[_RETRAINED]
        for step, model in zip(curve.steps, curve.values, strict=True):
            yield Mark(step, RETRAINED, f'reward model {model:.0f}')
