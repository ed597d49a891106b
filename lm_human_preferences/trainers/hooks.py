"""Hooks of both trainings: the progress bar, and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from lm_human_preferences.checkpointing.checkpointer import Checkpointer
from lm_human_preferences.training.loop import FailedElsewhere, Hook, Trainer
from lm_human_preferences.utils.logging import announce, progress


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


class Checkpoints(Hook):
    """Hook that saves a checkpoint every `interval` steps, and defers signals to the end of a step.

    resume_hint: returns the line that says how to resume, see run_dir; None for a training that is
    not saved at its end and at an error.
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
        """Keep the position from which a failed step can be repeated."""
        if self.resume_hint is not None:
            self.begun = self.checkpointer.position(self.trainer)

    def after_step(self, step: int, stats: Mapping[str, float]) -> None:
        """Save if a checkpoint is due; raise AllStopped after a signal."""
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
        self.trainer.comm.barrier()  # rank 0 has written it
        if isinstance(error, FailedElsewhere):
            self.trainer.comm.barrier()  # until the rank that failed has ended all
