"""Time left of a command of several phases, and its speed."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping


class TimeLeft:
    """Time left by the speed of the present phase; work: {phase: amount}, in order, in one unit."""

    def __init__(
        self, work: Mapping[str, float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.work = dict(work)
        self.clock = clock
        self.phase = ''
        self.started = self.share_at_start = 0.0
        self.paused_seconds = 0.0  # in all `pause` blocks

    def begin(self, phase: str, share: float = 0.0) -> None:
        """Begin `phase`, of which `share` (0 to 1) is done already."""
        self.phase = phase
        self.started = self.clock()
        self.share_at_start = share

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Leave out the time within the block, such as a wait for people."""
        begun = self.clock()
        try:
            yield
        finally:
            seconds = self.clock() - begun
            self.started += seconds
            self.paused_seconds += seconds

    def seconds(self, share: float) -> float | None:
        """Return the seconds left if this share of the phase is done; None without a speed yet."""
        done = share - self.share_at_start
        if done <= 0:
            return None
        seconds_per_unit = (self.clock() - self.started) / (done * self.work[self.phase])
        phases = list(self.work)
        later = phases[phases.index(self.phase) + 1 :]
        units = (1 - share) * self.work[self.phase] + sum(self.work[phase] for phase in later)
        return units * seconds_per_unit

    def per_second(self, share: float, total: float) -> float:
        """Return the speed of this phase if this share of its `total` things is done."""
        seconds = max(self.clock() - self.started, 1e-9)
        return (share - self.share_at_start) * total / seconds


def as_text(seconds: float | None) -> str:
    """Format a duration: 0:07, 12:34 or 3:05:09 (hours, minutes, seconds); '?' for None."""
    if seconds is None:
        return '?'
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours:
        return f'{hours}:{minute:02}:{second:02}'
    return f'{minute}:{second:02}'
