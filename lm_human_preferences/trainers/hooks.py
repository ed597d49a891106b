"""Hooks of both trainings: progress bar, table, alarms (--run.on_anomaly), checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple

from tqdm import tqdm

from lm_human_preferences.checkpointing.checkpointer import Checkpointer
from lm_human_preferences.errors import UserError
from lm_human_preferences.training.loop import FailedElsewhere, Hook, Trainer
from lm_human_preferences.utils.logging import ALARMS, announce, log_in_summary, progress

REPEAT_AFTER = 100  # steps until the same alarm is reported again
KL = 'objective/kl'


class ProgressBar(Hook):
    """Progress bar that each step advances by `per_step` units.

    shown: statistics beside the bar, {label: (name of the statistic, format)}.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        name: str,
        unit: str,
        per_step: int,
        shown: Mapping[str, tuple[str, str]],
    ) -> None:
        self.per_step = per_step
        self.shown = shown
        self.bar = progress(
            total=trainer.total_steps * per_step,
            initial=trainer.steps_done * per_step,
            comm=trainer.comm,
            desc=name,
            unit=unit,
        )

    def after_step(self, step: int, stats: Mapping[str, float]) -> None:
        """Advance the bar."""
        texts = {}
        for label, (name, number_format) in self.shown.items():
            texts[label] = format(stats[name], number_format)
        self.bar.set_postfix(texts, refresh=False)
        self.bar.update(self.per_step)

    def __exit__(self, *error: object) -> None:
        self.bar.close()


class Table(Hook):
    """Hook that prints a table on rank 0: the first step, every `log_interval` steps, and the last.

    unit: what a training learns from, such as 'episodes'. units_after: maps a number of steps to
    the number of units learned from. columns: {heading: (statistic, width, number format)}.
    """

    def __init__(
        self,
        trainer: Trainer,
        unit: str,
        units_after: Callable[[int], int],
        columns: Mapping[str, tuple[str, int, str]],
    ) -> None:
        self.trainer = trainer
        self.units_after = units_after
        self.statistics = [name for name, _, _ in columns.values()]
        speed = f'{unit}/s'
        self.formats = {'step': (11, ''), unit: (9, '')}
        for head, (_, width, number_format) in columns.items():
            self.formats[head] = width, number_format
        self.formats |= {speed: (max(9, len(speed)), '.0f'), 'time left': (9, '')}
        self.has_head = False
        self.before = units_after(trainer.steps_done)
        self.began = time.monotonic()

    def values(self, stats: Mapping[str, float]) -> list[float]:
        """Return the numbers of a line from the statistics of the last step."""
        return [stats[name] for name in self.statistics]

    def after_step(self, step: int, stats: Mapping[str, float]) -> None:
        """Print a line if it is due."""
        steps, interval = self.trainer.total_steps, self.trainer.logger.log_interval
        is_due = step in (1, steps) or step % interval == 0
        if self.trainer.comm.rank != 0 or not is_due:
            return
        done, total = self.units_after(step), self.units_after(steps)
        rate = (done - self.before) / max(time.monotonic() - self.began, 1e-9)
        left = tqdm.format_interval((total - done) / rate)
        cells = []
        values = (f'{step}/{steps}', done, *self.values(stats), rate, left)
        for value, (width, number_format) in zip(values, self.formats.values(), strict=True):
            cells.append(f'{format(value, number_format):>{width}}')
        if not self.has_head:
            heads = (f'{head:>{width}}' for head, (width, _) in self.formats.items())
            log_in_summary('', ' '.join(heads))
            self.has_head = True
        log_in_summary(' '.join(cells))


class Alarm(NamedTuple):
    """Alarm about a statistic. text: the statistic's value, and advice for the user."""

    statistic: str
    text: str


class HealthMonitor(Hook):
    """Hook that, at an alarm, prints a warning, or saves `trainer` and stops.

    Alarms depend only on means over all ranks, so that all ranks decide alike.

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
        """Check the last step; at an alarm, warn, or in mode 'stop' save and raise UserError."""
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
        """Return the alarm that a step's statistics give; None if all is well."""
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
        """Write the alarm to TensorBoard. step: number of steps done."""
        indented = f'    {alarm.text}'  # so that TensorBoard shows the text verbatim
        self.trainer.logger.log_text(ALARMS, indented, max(step - 1, 0))


class Checkpoints(Hook):
    """Hook that saves a checkpoint every `interval` steps, and defers signals to the end of a step.

    resume_hint: returns the line that says how to resume, see run_dir; None: save neither at the
    end nor after an error.
    """

    def __init__(
        self,
        trainer: Trainer,
        checkpointer: Checkpointer,
        interval: int,
        resume_hint: Callable[[], str] | None = None,
    ) -> None:
        self.trainer = trainer
        self.checkpointer = checkpointer
        self.interval = interval
        self.resume_hint = resume_hint
        self.begun: dict[str, Any] = {}
        self.signals = checkpointer.defer_signals()

    def __enter__(self) -> Checkpoints:
        self.signals.__enter__()
        return self

    def before_step(self, step: int) -> None:
        """Remember where the step begins, so that it can be repeated if it fails."""
        if self.resume_hint is not None:
            self.begun = self.checkpointer.position(self.trainer)

    def after_step(self, step: int, stats: Mapping[str, float]) -> None:
        """Save if a checkpoint is due; raise AllStopped after a signal to stop."""
        self.checkpointer.after_step(self.trainer)
        is_last = step == self.trainer.total_steps
        if step % self.interval == 0 or (self.resume_hint is not None and is_last):
            self.checkpointer.save(self.trainer)

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.signals.__exit__(error_type, error, traceback)
        if error is None or self.resume_hint is None:
            return
        if not self.trainer.is_undone:
            self.checkpointer.save_on_error(self.trainer)
            return
        if self.checkpointer.saved_step != self.trainer.steps_done:
            self.checkpointer.save(self.trainer, self.begun)
        self.checkpointer.wait()
        if self.trainer.comm.rank == 0 and not isinstance(error, KeyboardInterrupt):
            announce(self.resume_hint())
        self.trainer.comm.barrier()  # until rank 0 has written the checkpoint
        if isinstance(error, FailedElsewhere):
            self.trainer.comm.barrier()  # until the rank that failed makes the launcher end all
