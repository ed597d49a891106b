"""Hook that collects labels while a policy trains (paper, section 2.3)."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Any

from lm_human_preferences import shell, storage
from lm_human_preferences.errors import UserError
from lm_human_preferences.frozen_head.reward import FrozenReward
from lm_human_preferences.labels.held_out import Labels
from lm_human_preferences.online import progress
from lm_human_preferences.online.retraining import HeadRetrainer, Retrainer
from lm_human_preferences.online.run_labels import RunLabels
from lm_human_preferences.reward_models.locations import SCOPE
from lm_human_preferences.runs.run_files import LABELS, REWARD
from lm_human_preferences.trainers.policy_trainer import PPOTrainer
from lm_human_preferences.training import memory
from lm_human_preferences.training.loop import Hook
from lm_human_preferences.utils.logging import announce

if TYPE_CHECKING:
    from lm_human_preferences.checkpointing.checkpointer import Checkpointer
    from lm_human_preferences.plan.phases import TrainPolicy, TrainReward

POLL_SECONDS = 1.0  # seconds between two checks for new answers
HOUR = 3600.0


class Collection(Hook):
    """Hook to collect labels while `trainer` trains; a context manager, entered on every rank."""

    def __init__(self, trainer: PPOTrainer, phase: TrainPolicy, checkpointer: Checkpointer) -> None:
        self.phase, online = phase, phase.settings.rewards.online
        assert online is not None and phase.retraining is not None
        assert checkpointer.seed is not None
        self.trainer, self.checkpointer, self.comm = trainer, checkpointer, trainer.comm
        self.online, self.seed = online, checkpointer.seed
        self.schedule = online.schedule(trainer.total_steps)
        self.retrainer = self._retrainer(phase.retraining, checkpointer.seed)
        self.labels: RunLabels | None = None  # stays None except on rank 0
        self._stack = contextlib.ExitStack()

    def _retrainer(self, phase: TrainReward, seed: int) -> Retrainer | HeadRetrainer:
        trainer = self.trainer
        common: dict[str, Any] = dict(
            ref_policy=trainer.ref_policy, phase=phase, comm=trainer.comm, seed=seed
        )
        reward: Any = trainer.networks[SCOPE]
        if isinstance(reward, FrozenReward):
            directory = self.phase.run.directory
            place = directory and storage.join(directory, REWARD.network)
            return HeadRetrainer(reward=reward, place=place, **common)
        reward_models: Any = [trainer.networks[scope] for scope in trainer.roles.retrained]
        return Retrainer(reward_models=reward_models, **common)

    def __enter__(self) -> Collection:
        if self.comm.rank == 0:
            with contextlib.ExitStack() as stack:
                self.labels = RunLabels(self.trainer, self.phase, self.seed, stack)
                self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def before_step(self, step: int) -> None:
        """Ask questions, wait for the labels that `step` needs, and retrain if it is time.

        UserError if labels are missing after --rewards.online.patience hours.
        """
        self.comm.on_rank_0(lambda: self._on_rank_0.ask(step))
        self._wait(step)
        if self.schedule.is_trained_at(step):
            self._train(step)
        elif not self.retrainer.is_trained:  # after a resume, as checkpoints do not hold the head
            last = max(each for each in self.schedule.training_steps() if each < step)
            self.retrainer.train(self._labels_of(last)[0], last)

    @property
    def _on_rank_0(self) -> RunLabels:
        assert self.labels is not None
        return self.labels

    def _wait(self, step: int) -> None:
        """Wait for the labels of `step`; ranks meet every second, since collectives time out."""
        begin = time.monotonic()
        while True:
            missing = self.labels.missing(step) if self.labels is not None else 0
            waited = time.monotonic() - begin
            stop_requested = self.checkpointer.stop_requested
            states = self.comm.all_gather_object((missing, waited, stop_requested))
            missing, waited, _ = states[0]
            if missing <= 0:
                return
            if any(stop for _, _, stop in states):
                self.checkpointer.after_step(self.trainer)  # saves, and raises KeyboardInterrupt
            if self.online.patience is not None and waited >= self.online.patience * HOUR:
                self._give_up(missing, step)
            if self.labels is not None:
                self.labels.report_waiting(step, missing)
            time.sleep(POLL_SECONDS)

    def _give_up(self, missing: int, step: int) -> None:
        """Save, and raise a UserError that says how to resume."""
        self.checkpointer.save(self.trainer)
        self.checkpointer.wait()
        self.comm.barrier()
        run = self.phase.run
        how = 'nothing is saved, because --save_dir is None'
        if run.directory is not None:
            folder = os.path.join(run.directory, LABELS)
            how = (
                f'step {step} is saved: {progress.label_command(folder)} answers, then'
                f' {shell.typed("./launch.py resume", str(run.save_dir))} goes on'
            )
        raise UserError(
            f'--rewards.online.patience {self.online.patience:g}: {missing} of'
            f' {self.schedule.labels_at(step)} labels are still missing; {how}'
        )

    def _labels_of(self, step: int) -> tuple[Labels, Labels | None]:
        """Return, on every rank, the result of RunLabels.learn on rank 0."""
        return self.comm.on_rank_0(lambda: self._on_rank_0.learn(step))

    def _train(self, step: int) -> None:
        """Retrain the reward model, and log how it went."""
        labels, new = self._labels_of(step)
        previous = self.retrainer.predict(new) if new is not None else None
        option = self.retrainer.settings.option_name('micro_batch_size')
        with memory.explain_oom(option):
            outcome = self.retrainer.train(labels, step)
        if self.labels is not None:
            batch = self.labels.decisions.batches[step]
            report = progress.Report(batch, outcome.loss, outcome.held_out, previous)
            self.trainer.logger.log(report.statistics(), step, tag_prefix=progress.TAG)
            announce(report.line(self.schedule.retrainings + 1))
