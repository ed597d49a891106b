"""Curves, alarms and interruptions of a run, read from its TensorBoard events."""

import contextlib
import dataclasses
import itertools
import math

from lm_human_preferences import storage
from lm_human_preferences.utils import event_files
from lm_human_preferences.utils.logging import ALARMS


@dataclasses.dataclass(frozen=True)
class Log:
    """Log of a run. curves: {tag: {step: finite value}}.

    broken: tags whose last value is not finite. alarms: (step, text). resumed: steps at which the
    run was resumed.
    """

    curves: dict[str, dict[int, float]] = dataclasses.field(default_factory=dict)
    broken: frozenset[str] = frozenset()
    alarms: tuple[tuple[int, str], ...] = ()
    resumed: tuple[int, ...] = ()


def read(run: str, events: str) -> Log:
    """Return a run's log; without event files, the log is empty. events: the event directory."""
    values: dict[str, dict[int, float]] = {}
    alarms: set[tuple[int, str]] = set()
    resumed: set[int] = set()
    for event, _ in itertools.chain.from_iterable(map(event_files.read, _files(run, events))):
        if event.HasField('session_log'):
            resumed.add(event.step)
        for value in event.summary.value:
            if value.metadata.plugin_data.plugin_name != 'text':
                values.setdefault(value.tag, {})[event.step] = value.simple_value
            elif value.tag == ALARMS:
                for text in value.tensor.string_val:
                    alarms.add((event.step, text.decode(errors='replace')))
    curves = {}
    for tag, by_step in values.items():
        if math.isfinite(by_step[max(by_step)]):
            steps = [step for step in sorted(by_step) if math.isfinite(by_step[step])]
            curves[tag] = {step: by_step[step] for step in steps}
    broken = frozenset(values.keys() - curves.keys())
    return Log(curves, broken, tuple(sorted(alarms)), tuple(sorted(resumed)))


def _files(run: str, events: str) -> list[str]:
    """Return the local paths of a run's event files in order; download a remote run's files."""
    directory = storage.join(run, events)
    if not storage.is_remote(run):
        return event_files.paths(directory)
    with contextlib.suppress(storage.StorageError):
        names = (name for name in storage.listing(directory) if name.startswith(event_files.PREFIX))
        return [storage.cached_path(storage.join(directory, name)) for name in sorted(names)]
    return []
