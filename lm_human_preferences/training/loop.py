"""Training loop, and its hooks for progress, alarms (--run.on_anomaly) and checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

from tqdm import tqdm

from lm_human_preferences.checkpointing import checkpointer as checkpointing
from lm_human_preferences.checkpointing.checkpointer import Checkpointer
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.policy_options import Training
from lm_human_preferences.runs import run_dir
from lm_human_preferences.utils.logging import ALARMS, announce, log_in_summary, progress

REPEAT_AFTER = 100  # steps until the same alarm is reported again
KL, KL_COEF = 'objective/kl', 'objective/kl_coef'
WIDTH = 9  # smallest width of a column, in characters


class Trainer(checkpointing.Trainer, Protocol):
    """Interface of a trainer that takes steps, and that can be saved between two steps."""

    comm: Comm
    steps_done: int
    is_undone: bool  # whether a step failed, on any rank, before it changed weights

    @property
    def total_steps(self) -> int: ...

    def step(self) -> dict[str, float]:
        """Take the next step; return its statistics, the same on every rank."""
        ...


class FailedElsewhere(Exception):
    """A step failed on another rank; that rank reports the error and ends all ranks."""


class Hook(contextlib.AbstractContextManager):
    """Hook of `training_loop`: a context manager around all steps, with methods for each step."""

    def before_step(self, step: int) -> None:
        """Prepare the next step. step: number of steps done."""

    def after_step(self, step: int, stats: Mapping[str, float]) -> None:
        """Act after a step. step: number of steps done. stats: statistics of the last step."""

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave the context; by default, there is nothing to clean up."""


def training_loop(trainer: Trainer, hooks: Sequence[Hook]) -> None:
    """Take the remaining steps; before and after each step, call all hooks in their order."""
    with contextlib.ExitStack() as stack:
        stack.callback(trainer.logger.close)
        for hook in hooks:
            stack.enter_context(hook)
        while trainer.steps_done < trainer.total_steps:
            for hook in hooks:
                hook.before_step(trainer.steps_done)
            stats = trainer.step()
            for hook in hooks:
                hook.after_step(trainer.steps_done, stats)


class Progress(Hook):
    """Hook that shows a progress bar and, on rank 0, a table (a line per `log_interval` steps).

    name: name of the training. unit: what it learns from, such as 'episodes'. units_after: maps a
    number of steps to the number of units learned from. columns: {heading: (statistic, format)}.
    """

    def __init__(
        self,
        trainer: Trainer,
        name: str,
        unit: str,
        units_after: Callable[[int], int],
        columns: Mapping[str, tuple[str, str]],
    ) -> None:
        self.trainer = trainer
        self.unit = unit
        self.units_after = units_after
        self.columns = columns
        self.is_first = True
        self.before, self.total = map(units_after, (trainer.steps_done, trainer.total_steps))
        self.began = time.monotonic()
        self.bar = progress(
            total=self.total, initial=self.before, comm=trainer.comm, desc=name, unit=f' {unit}'
        )

    def after_step(self, step: int, stats: Mapping[str, float]) -> None:
        """Advance the progress bar; print the next line of the table if that line is due."""
        done, steps = self.units_after(step), self.trainer.total_steps
        self.bar.update(done - self.bar.n)
        is_due = step in (1, steps) or step % self.trainer.logger.log_interval == 0
        if self.trainer.comm.rank != 0 or not is_due:
            return
        rate = (done - self.before) / max(time.monotonic() - self.began, 1e-9)
        cells = {'step': f'{step}/{steps}', self.unit: str(done)}
        for head, (name, number_format) in self.columns.items():
            cells[head] = format(stats[name], number_format)
        cells[f'{self.unit}/s'] = f'{rate:.0f}'
        cells['time left'] = tqdm.format_interval((self.total - done) / rate)
        if self.is_first:
            log_in_summary('', ' '.join(f'{head:>{WIDTH}}' for head in cells))
            self.is_first = False
        log_in_summary(' '.join(f'{cell:>{max(WIDTH, len(head))}}' for head, cell in cells.items()))

    def __exit__(self, *error: object) -> None:
        self.bar.close()


@dataclasses.dataclass(eq=False)
class HealthMonitor(Hook):
    """Hook that checks statistics; at an alarm, it prints a warning, or saves and stops.

    Alarms depend only on means over all ranks, so that all ranks decide alike.
    """

    mode: str  # value of --run.on_anomaly
    trainer: Trainer
    checkpointer: Checkpointer
    finite: Sequence[str]  # names of the statistics that must be finite
    most_kl: float = math.inf  # largest accepted KL of a policy, in nats per response
    # {statistic: step until which its alarm is not repeated}
    quiet_until: dict[str, int] = dataclasses.field(default_factory=dict)

    def after_step(self, step: int, stats: Mapping[str, float]) -> None:
        """Warn if the step's statistics give an alarm; in mode 'stop', save and raise UserError."""
        name, text = self.alarm(stats)
        if not text or step < self.quiet_until.get(name, 0):
            return
        self.quiet_until[name] = step + REPEAT_AFTER
        # In TensorBoard, indented text is shown verbatim, and steps are counted from 0.
        self.trainer.logger.log_text(ALARMS, f'    {text}', step - 1)
        if self.mode == 'stop':
            self.checkpointer.save_on_error(self.trainer)
            raise UserError(f'stopped at step {step} by --run.on_anomaly stop: {text}')
        if self.trainer.comm.rank == 0:
            announce(f'WARNING: step {step}: {text}')

    def alarm(self, stats: Mapping[str, float]) -> tuple[str, str]:
        """Return (statistic, warning) if a statistic gives an alarm; otherwise ('', '')."""
        for name in self.finite:
            if not math.isfinite(stats[name]):
                return name, f'{name} is {stats[name]}: lower the learning rate'
        kl = stats.get(KL, 0.0)
        if kl <= self.most_kl:
            return '', ''
        return KL, (
            f'{KL} is {kl:.4g}, above {self.most_kl:.4g}: the policy has moved far from the initial'
            ' language model: lower --ppo.lr or raise --rewards.kl_coef'
        )


class Checkpoints(Hook):
    """Hook that saves a checkpoint every `interval` steps, and defers signals to the end of a step.

    settings: the run's, for the printed resume command; None: do not save at the end or on errors.
    """

    def __init__(
        self,
        trainer: Trainer,
        checkpointer: Checkpointer,
        interval: int,
        settings: Training | None = None,
    ) -> None:
        self.trainer = trainer
        self.checkpointer = checkpointer
        self.interval = interval
        self.settings = settings
        self.begun: dict[str, Any] = {}
        self.signals = checkpointer.defer_signals()

    def __enter__(self) -> Checkpoints:
        self.signals.__enter__()
        return self

    def before_step(self, step: int) -> None:
        """Remember where the step begins, so that it can be repeated if it fails."""
        if self.settings is not None:
            self.begun = self.checkpointer.position(self.trainer)

    def after_step(self, step: int, stats: Mapping[str, float]) -> None:
        """Save if a checkpoint is due; raise AllStopped after a signal to stop."""
        self.checkpointer.after_step(self.trainer)
        is_last = step == self.trainer.total_steps
        if step % self.interval == 0 or (self.settings is not None and is_last):
            self.checkpointer.save(self.trainer)

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.signals.__exit__(error_type, error, traceback)
        if error is None or self.settings is None:
            return
        if not self.trainer.is_undone:
            self.checkpointer.save_on_error(self.trainer)
            return
        if self.checkpointer.saved_step != self.trainer.steps_done:
            self.checkpointer.save(self.trainer, self.begun)
        self.checkpointer.wait()
        if self.trainer.comm.rank == 0 and not isinstance(error, KeyboardInterrupt):
            announce(run_dir.resume_hint(self.settings))
        self.trainer.comm.barrier()  # wait until rank 0 has written the checkpoint
        if isinstance(error, FailedElsewhere):
            self.trainer.comm.barrier()  # wait until the launcher ends this process
