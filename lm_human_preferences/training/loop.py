"""The loop of both trainings: one step after another, and the hooks that are called after each."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from lm_human_preferences.checkpointing import checkpointer as checkpointing

if TYPE_CHECKING:
    from types import TracebackType


class Trainer(checkpointing.Trainer, Protocol):
    """A training that goes step by step, and can be saved between two of them."""

    @property
    def steps_done(self) -> int: ...

    @property
    def total_steps(self) -> int: ...

    def step(self) -> dict[str, float]:
        """Take the next step; returns its statistics, the same on every rank."""
        ...


class Hook(contextlib.AbstractContextManager):
    """What happens beside the steps of a training.

    It is entered before the first step, and left after the last one or at an error.
    """

    def before_step(self, step: int) -> None:
        """step: how many steps are done, and so the number of the next one, from 0."""

    def after_step(self, step: int, stats: Mapping[str, float]) -> None:
        """step: how many steps are done; stats: of the last one."""

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Nothing to clean up."""


def training_loop(trainer: Trainer, hooks: Sequence[Hook]) -> None:
    """Take the steps that are left, and call each hook before and after every step, in order."""
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
