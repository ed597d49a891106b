"""How long a command of several phases has taken, and how long it still takes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lm_human_preferences.hparams.policy_options import HParams


class TimeLeft:
    """Estimates the time that is left from the speed so far.

    work: {phase: amount of work}, in the order of the phases, such as training a reward model,
    training a policy and evaluating it. The unit is arbitrary, but the same for all phases: the
    speed of the present phase tells how long the later ones take. clock: returns seconds.
    """

    def __init__(
        self, work: Mapping[str, float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.work = dict(work)
        self.clock = clock
        self.phase = ''
        self.started = self.share_at_start = 0.0
        self.paused_seconds = 0.0  # in all `pause` blocks

    def begin(self, phase: str, share: float = 0.0) -> None:
        """Begin `phase`, or resume it where this share of it (0 to 1) is done already."""
        self.phase = phase
        self.started = self.clock()
        self.share_at_start = share

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """The time within the block does not count, as a wait for people says nothing of speed."""
        begun = self.clock()
        try:
            yield
        finally:
            seconds = self.clock() - begun
            self.started += seconds
            self.paused_seconds += seconds

    def seconds(self, share: float) -> float | None:
        """Seconds until the last phase is done, if this share of the present one is done.

        None as long as it has no speed yet.
        """
        done = share - self.share_at_start
        if done <= 0:
            return None
        seconds_per_unit = (self.clock() - self.started) / (done * self.work[self.phase])
        phases = list(self.work)
        later = phases[phases.index(self.phase) + 1 :]
        units = (1 - share) * self.work[self.phase] + sum(self.work[phase] for phase in later)
        return units * seconds_per_unit

    def per_second(self, share: float, total: float) -> float:
        """Speed of this phase, which has `total` things to do, if this share of them is done."""
        seconds = max(self.clock() - self.started, 1e-9)
        return (share - self.share_at_start) * total / seconds


def as_text(seconds: float | None) -> str:
    """A duration for people: 0:07, 12:34 or 3:05:09 (hours, minutes, seconds); '?' for None."""
    if seconds is None:
        return '?'
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours:
        return f'{hours}:{minute:02}:{second:02}'
    return f'{minute}:{second:02}'


def elapsed_stats(
    hparams: HParams, steps: int, step_seconds: float, seconds: float
) -> dict[str, float]:
    """How far a policy's training is after `steps`, and how fast, in the original's units.

    hparams: train_policy's. step_seconds: that the last step took; seconds: that all took.
    """
    episodes = hparams.ppo.batch_size
    length = hparams.task.response_length
    return {
        'elapsed/updates': steps,
        'elapsed/steps/serial': steps * length,
        'elapsed/steps/total': steps * episodes * length,
        'elapsed/episodes': steps * episodes,
        'elapsed/fps': int(episodes * length / max(step_seconds, 1e-9)),
        'elapsed/time': seconds,
    }
