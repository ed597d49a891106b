"""Alarms (--run.on_anomaly): rules on means over all ranks, so that all ranks decide alike."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lm_human_preferences.checkpointing.checkpointer import Checkpointer
from lm_human_preferences.errors import UserError
from lm_human_preferences.training.loop import Hook, Trainer
from lm_human_preferences.utils.logging import ALARMS, announce

REPEAT_AFTER = 100  # steps until an alarm is reported again
KL = 'objective/kl'


class Alarm(NamedTuple):
    """Sign that a training goes wrong. text: the value of the statistic, and advice."""

    statistic: str
    text: str


class HealthMonitor(Hook):
    """Warns of alarms, or saves `trainer` and stops.

    mode: value of --run.on_anomaly. finite: names of the statistics that must be finite.
    most_kl: largest accepted KL divergence of a policy, in nats per response.
    """

    def __init__(
        self,
        mode: str,
        trainer: Trainer,
        checkpointer: Checkpointer,
        finite: Sequence[str],
        most_kl: float = math.inf,
    ) -> None:
        self.mode = mode
        self.trainer = trainer
        self.checkpointer = checkpointer
        self.finite = finite
        self.most_kl = most_kl
        self.quiet_until: dict[str, int] = {}  # {statistic: step of the next alarm}

    def after_step(self, step: int, stats: Mapping[str, float]) -> None:
        """Warn of the last step's alarm; in mode 'stop', save and raise UserError."""
        alarm = self.alarm(stats)
        if alarm is None:
            return
        if self.mode == 'stop':
            self._log(step, alarm)
            self.checkpointer.save_on_error(self.trainer)
            raise UserError(f'stopped at step {step} by --run.on_anomaly stop: {alarm.text}')
        if step >= self.quiet_until.get(alarm.statistic, 0) and self.trainer.comm.rank == 0:
            announce(f'WARNING: step {step}: {alarm.text}')
            self._log(step, alarm)
            self.quiet_until[alarm.statistic] = step + REPEAT_AFTER

    def alarm(self, stats: Mapping[str, float]) -> Alarm | None:
        """Return the alarm of a step by its statistics; None if all is well."""
        for name in self.finite:
            if not math.isfinite(stats[name]):
                return Alarm(name, f'{name} is {stats[name]}: lower the learning rate')
        kl = stats.get(KL, 0.0)
        if kl <= self.most_kl:
            return None
        return Alarm(
            KL,
            f'{KL} is {kl:.4g}, above {self.most_kl:.4g}: the policy has moved far from the initial'
            ' language model: lower --ppo.lr or raise --rewards.kl_coef',
        )

    def _log(self, step: int, alarm: Alarm) -> None:
        """Write the alarm to TensorBoard with the last of `step` steps."""
        indented = f'    {alarm.text}'  # so that nothing in it is markup
        self.trainer.logger.log_text(ALARMS, indented, max(step - 1, 0))
