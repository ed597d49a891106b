"""Alarms and --run.on_anomaly: rules on means over all ranks, so that all decide the same."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from lm_human_preferences.checkpointing.checkpointer import Checkpointer
from lm_human_preferences.errors import UserError
from lm_human_preferences.training.loop import Hook, Trainer
from lm_human_preferences.utils.logging import ALARMS, announce

REPEAT_AFTER = 100  # steps until an alarm is reported again

NOT_FINITE = 'the loss is NaN or infinite: lower the learning rate'


class Alarm(NamedTuple):
    """Statistic beyond its limit, and advice; interval: 95 % confidence of an estimate."""

    statistic: str
    value: float
    limit: float
    text: str
    interval: tuple[float, float] | None = None

    def __str__(self) -> str:
        found = f'{self.statistic} is {self.value:.4g}, the limit {self.limit:.4g}'
        if self.interval is not None:
            low, high = self.interval
            found += f', the 95 % interval {low:.3f} to {high:.3f}'
        return f'{self.text} ({found})'


def not_finite(stats: Mapping[str, float], names: Iterable[str]) -> list[Alarm]:
    """Return an alarm for the first of `names` whose statistic is NaN or infinite."""
    for name in names:
        if not math.isfinite(stats[name]):
            return [Alarm(name, stats[name], math.inf, NOT_FINITE)]
    return []


class HealthMonitor(Hook):
    """Warns of alarms, or saves `trainer` and stops. mode: --run.on_anomaly."""

    def __init__(self, mode: str, trainer: Trainer, checkpointer: Checkpointer) -> None:
        self.mode = mode
        self.trainer = trainer
        self.checkpointer = checkpointer
        self.quiet_until: dict[str, int] = {}  # {statistic: step}

    def raise_alarms(self, step: int, alarms: Sequence[Alarm]) -> None:
        """Warn of `alarms` after `step` steps; in mode 'stop', save and raise UserError."""
        if not alarms or self.mode == 'off':
            return
        if self.mode == 'stop':
            self._log(step, alarms)
            self.checkpointer.save_on_error(self.trainer)
            reasons = '; '.join(map(str, alarms))
            raise UserError(f'stopped at step {step} by --run.on_anomaly stop: {reasons}')
        for alarm in alarms:
            if step >= self.quiet_until.get(alarm.statistic, 0) and self.trainer.comm.rank == 0:
                announce(f'WARNING: step {step}: {alarm}')
                self._log(step, [alarm])
                self.quiet_until[alarm.statistic] = step + REPEAT_AFTER

    def _log(self, step: int, alarms: Sequence[Alarm]) -> None:
        """Write the alarms to TensorBoard with the last of `step` steps."""
        text = '\n'.join(f'    {alarm}' for alarm in alarms)  # indented: nothing in it is markup
        self.trainer.logger.log_text(ALARMS, text, max(step - 1, 0))
