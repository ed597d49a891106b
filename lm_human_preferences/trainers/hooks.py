"""Hooks of both trainings: console output, alarms, checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lm_human_preferences.hparams.reward_options import BEST, RunHParams
from lm_human_preferences.trainers import health
from lm_human_preferences.trainers.policy_trainer import PPOTrainer
from lm_human_preferences.trainers.reward_trainer import RewardModelTrainer, mean_loss
from lm_human_preferences.training import console
from lm_human_preferences.training.loop import Hook, Trainer
from lm_human_preferences.training.time_left import TimeLeft, as_text
from lm_human_preferences.utils.logging import log_as_original, log_line, progress

if TYPE_CHECKING:
    from types import TracebackType

    from lm_human_preferences.checkpointing.checkpointer import Checkpointer


def policy_hooks(
    trainer: PPOTrainer,
    checkpointer: Checkpointer,
    clock: TimeLeft,
    decoder: console.Decoder,
    run: RunHParams,
    limits: health.PolicyLimits,
    has_spread: bool,
) -> list[Hook]:
    """Return the hooks of a policy's training.

    clock: of the whole command, with 'policy'. has_spread: the reward is an ensemble's.
    """
    clock.begin('policy', trainer.share_done)
    bar = ProgressBar(
        trainer,
        clock,
        name='policy',
        unit='episode',
        done=trainer.episodes_done,
        per_step=trainer.ppo.batch_size,
        shown={'score': ('objective/score', '.2f'), 'kl': ('objective/kl', '.2f')},
    )
    return [
        Samples(trainer, decoder),
        bar,
        PolicyTable(trainer, clock, has_spread=has_spread),
        health.PolicyHealth(run.on_anomaly, trainer, checkpointer, limits),
        Checkpoints(trainer, checkpointer, run.save_interval, saves_end=True),
    ]


def reward_hooks(
    trainer: RewardModelTrainer,
    checkpointer: Checkpointer,
    run: RunHParams,
    clock: TimeLeft,
    phase: str = 'reward model',
) -> list[Hook]:
    """Return the hooks of a reward model's training. clock: of the command, with this phase."""
    clock.begin(phase, trainer.labels_done / trainer.total_labels)
    shown = {'loss': ('loss', '.3f')}
    return [
        ProgressBar(trainer, clock, name=phase, unit='batch', per_step=1, shown=shown),
        RewardTable(trainer, clock),
        health.RewardHealth(run.on_anomaly, trainer, checkpointer),
        HeldOut(trainer),
        # The model is saved once it is normalised.
        Checkpoints(trainer, checkpointer, run.save_interval, saves_end=False),
    ]


class Samples(Hook):
    """Shows the first few episodes of a PPO step and, as the original did, how long it took."""

    def __init__(self, trainer: PPOTrainer, decoder: console.Decoder) -> None:
        self.trainer = trainer
        self.decoder = decoder

    def after_step(self, step: int, stats: Mapping[str, float]) -> None:
        """Print samples on rank 0 if they are due; steps are counted from 0 there."""
        trainer = self.trainer
        rollout = trainer.rollout
        if rollout is None or trainer.comm.rank != 0:
            return
        kl = (rollout.logprobs - rollout.ref_logprobs).sum(1)
        cut = (rollout.responses != rollout.scored_responses).sum(1)
        console.show_samples(
            self.decoder,
            (rollout.queries, rollout.scored_responses, rollout.scores, kl, cut),
            step=step - 1,
            total_steps=trainer.total_steps,
            is_logged=trainer.logger.is_due(step - 1),
            kl_coef=stats['objective/kl_coef'],
            means=stats,
        )
        seconds = trainer.step_seconds
        episodes_per_second = trainer.ppo.batch_size / max(seconds, 1e-9)
        log_as_original(
            f'[ppo_step {step - 1}] step_time={seconds:.2f}s, eps/s={episodes_per_second:.2f}'
        )


class ProgressBar(Hook):
    """Bar that a step advances by `per_step` of `unit`; shown: {label: (statistic, format)}.

    done: units before the first step; None: as if all steps before were of this size.
    """

    def __init__(
        self,
        trainer: Trainer,
        clock: TimeLeft,
        *,
        name: str,
        unit: str,
        per_step: int,
        shown: Mapping[str, tuple[str, str]],
        done: int | None = None,
    ) -> None:
        self.clock = clock
        self.paused_seconds = clock.paused_seconds  # up to the last step
        self.per_step = per_step
        self.shown = shown
        if done is None:
            done = trainer.steps_done * per_step
        self.bar = progress(
            total=done + (trainer.total_steps - trainer.steps_done) * per_step,
            initial=done,
            comm=trainer.comm,
            desc=name,
            unit=unit,
        )

    def before_step(self, step: int) -> None:
        """Leave out the pauses since the last step."""
        seconds = self.clock.paused_seconds - self.paused_seconds
        self.paused_seconds = self.clock.paused_seconds
        if not self.bar.disable:
            self.bar.start_t += seconds
            self.bar.last_print_t += seconds

    def after_step(self, step: int, stats: Mapping[str, float]) -> None:
        """Advance the bar."""
        texts = {}
        for label, (name, number_format) in self.shown.items():
            texts[label] = format(stats[name], number_format)
        self.bar.set_postfix(texts, refresh=False)
        self.bar.update(self.per_step)

    def __exit__(self, *error: object) -> None:
        self.bar.close()


class PolicyTable(Hook):
    """Prints a line of the policy's table when one is due. clock: with a phase 'policy'."""

    def __init__(self, trainer: PPOTrainer, clock: TimeLeft, *, has_spread: bool) -> None:
        self.trainer = trainer
        self.clock = clock
        self.table = console.policy_table(has_spread=has_spread)

    def after_step(self, step: int, stats: Mapping[str, float]) -> None:
        """Print the line, on rank 0."""
        steps = self.trainer.total_steps
        is_printed = console.is_due(step, steps, self.trainer.logger.log_interval)
        if self.trainer.comm.rank != 0 or not is_printed:
            return
        share = self.trainer.share_done
        self.table.add(
            step=f'{step}/{steps}',
            episodes=self.trainer.episodes_done,
            score=stats['objective/score'],
            spread=stats.get('objective/score_std', 0.0),
            KL=stats['objective/kl'],
            KL_coef=stats['objective/kl_coef'],
            loss=stats['ppo/loss/total'],
            episodes_per_second=self.clock.per_second(share, self.trainer.total_episodes),
            time_left=as_text(self.clock.seconds(share)),
        )


class RewardTable(Hook):
    """Prints a line of the reward model's table when one is due: the mean loss since the last."""

    def __init__(self, trainer: RewardModelTrainer, clock: TimeLeft) -> None:
        self.trainer = trainer
        self.clock = clock
        self.table = console.reward_table()
        self.printed = 0  # batches

    def after_step(self, step: int, stats: Mapping[str, float]) -> None:
        """Print the line, on rank 0."""
        trainer, steps = self.trainer, self.trainer.total_steps
        is_printed = console.is_due(step, steps, trainer.logger.log_interval)
        if trainer.comm.rank != 0 or not is_printed:
            return
        share = trainer.labels_done / trainer.total_labels
        self.table.add(
            step=f'{step}/{steps}',
            labels=trainer.labels_done,
            loss=mean_loss(trainer.batches[self.printed :]),
            labels_per_second=self.clock.per_second(share, trainer.total_labels),
            time_left=as_text(self.clock.seconds(share)),
        )
        self.printed = len(trainer.batches)


class HeldOut(Hook):
    """Measures the held-out labels after each epoch, and in the first also after fewer labels."""

    def __init__(self, trainer: RewardModelTrainer) -> None:
        self.trainer = trainer
        size, steps = trainer.settings.batch_size, trainer.steps_of_epoch
        self.due = [steps // part * size for part in (2, 4, 8)]  # numbers of labels
        self.learned = trainer.labels_done

    def after_step(self, step: int, stats: Mapping[str, float]) -> None:
        """Log the accuracy when it is due, and print the last; collective."""
        trainer = self.trainer
        before, self.learned = self.learned, trainer.labels_done
        ends_epoch = self.learned % trainer.num_train == 0
        if not ends_epoch and not any(before < due <= self.learned for due in self.due):
            return
        prediction = trainer.predict_held_out()
        if prediction is None:
            return
        trainer.prediction = prediction
        trainer.logger.log(prediction.statistics(), step - 1, tag_prefix='train_reward/held_out/')
        if ends_epoch:
            trainer.end_epoch(prediction)
        if step == trainer.total_steps:
            self._end(step)

    def _end(self, step: int) -> None:
        """Choose the epoch, and print how well it predicts; collective."""
        trainer, kept = self.trainer, 'the last is kept'
        if trainer.settings.keep == BEST:
            kept = f'that of epoch {trainer.best_epoch} is kept'
            trainer.restore_best()
            assert trainer.prediction is not None
            numbers = trainer.prediction.statistics()
            trainer.logger.log(numbers, step - 1, tag_prefix='train_reward/held_out_of_kept/')
        if trainer.comm.rank != 0:
            return
        log_line(f'held out: {trainer.prediction}')
        if trainer.settings.epochs > 1:
            measured = ', '.join(format(number, '.3f') for number in trainer.held_out_by_epoch)
            log_line(
                f'held out, after each epoch: {measured}; {kept}, and differences within the'
                ' interval are chance'
            )


class Checkpoints(Hook):
    """Saves every `interval` steps, and defers signals; saves_end: also at the end or an error."""

    def __init__(
        self, trainer: Trainer, checkpointer: Checkpointer, interval: int, *, saves_end: bool
    ) -> None:
        self.trainer = trainer
        self.checkpointer = checkpointer
        self.interval = interval
        self.saves_end = saves_end
        self.signals = checkpointer.defer_signals()

    def __enter__(self) -> Checkpoints:
        self.signals.__enter__()
        return self

    def after_step(self, step: int, stats: Mapping[str, float]) -> None:
        """Save when it is due; KeyboardInterrupt if a signal has come."""
        self.checkpointer.after_step(self.trainer)
        is_last = step == self.trainer.total_steps
        if step % self.interval == 0 or (self.saves_end and is_last):
            self.checkpointer.save(self.trainer)

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.signals.__exit__(error_type, error, traceback)
        if error is not None and self.saves_end:
            self.checkpointer.save_on_error(self.trainer)
