"""Loop of both trainings: one step after another, with hooks before and after each."""

import contextlib
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Protocol

from lm_human_preferences.checkpointing import checkpointer as checkpointing
from lm_human_preferences.distributed.comm import Comm


class Trainer(checkpointing.Trainer, Protocol):
    """Trainer that takes one step after another, and can be saved between two steps."""

    comm: Comm
    steps_done: int
    is_undone: bool  # whether a step has failed, on any rank, before weights changed

    @property
    def total_steps(self) -> int: ...

    def step(self) -> dict[str, float]:
        """Take the next step; return its statistics, the same on every rank."""
        ...


class FailedElsewhere(Exception):
    """A step failed on another rank, which reports the error and ends all ranks."""


class Hook(contextlib.AbstractContextManager):
    """Hook of a training, entered before the first step and left at the end or at an error."""

    def before_step(self, step: int) -> None:
        """Prepare the next step. step: number of steps done."""

    def after_step(self, step: int, stats: Mapping[str, float]) -> None:
        """React to a step. step: number of steps done. stats: statistics of the step just done."""

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Do nothing: there is nothing to clean up."""


def training_loop(trainer: Trainer, hooks: Sequence[Hook]) -> None:
    """Take the remaining steps, and call the hooks before and after each one, in order."""
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
