"""Hooks of a reward model's training: table, held-out labels and alarms."""

import math
from collections.abc import Mapping, Sequence

from lm_human_preferences.checkpointing.checkpointer import Checkpointer
from lm_human_preferences.plan.phases import TrainReward
from lm_human_preferences.trainers.health import Alarm, HealthMonitor, not_finite
from lm_human_preferences.trainers.hooks import Checkpoints, ProgressBar
from lm_human_preferences.trainers.reward_trainer import (
    LearnedBatch,
    RewardModelTrainer,
    mean_loss,
)
from lm_human_preferences.training import console
from lm_human_preferences.training.loop import Hook
from lm_human_preferences.training.time_left import TimeLeft, as_text
from lm_human_preferences.utils.core import weighted_mean
from lm_human_preferences.utils.logging import announce, console_is

SIGNIFICANT = 2  # standard deviations of chance
FAR_ABOVE_GUESSING = 1.5  # the limit of a reward model's last loss, in multiples of guessing's
WORSE_THAN_CHANCE = (
    'the reward model is worse than chance on the labels of its last batches: is their sign the'
    ' wrong way round, or the learning rate too high?'
)


def reward_hooks(
    trainer: RewardModelTrainer, checkpointer: Checkpointer, clock: TimeLeft, phase: TrainReward
) -> list[Hook]:
    """Return the hooks of a reward model's training. clock: of the command, with this phase."""
    clock.begin(phase.name, trainer.labels_done / trainer.total_labels)
    shown = {'loss': ('loss', '.3f')}
    # The finished model is saved once it is normalised.
    interval = phase.settings.run.save_interval
    return [
        ProgressBar(trainer, clock, name=phase.name, unit='batch', per_step=1, shown=shown),
        RewardTable(trainer, clock),
        RewardHealth(phase.run.on_anomaly, trainer, checkpointer),
        HeldOut(trainer),
        Checkpoints(trainer, checkpointer, interval, saves_end=False),
    ]


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
        if trainer.settings.keeps_best:
            kept = f'that of epoch {trainer.best_epoch} is kept'
            trainer.restore_best()
            assert trainer.prediction is not None
            numbers = trainer.prediction.statistics()
            trainer.logger.log(numbers, step - 1, tag_prefix='train_reward/held_out_of_kept/')
        if trainer.comm.rank != 0:
            return
        announce(f'held out: {trainer.prediction}')
        if trainer.settings.epochs > 1:
            measured = ', '.join(format(number, '.3f') for number in trainer.held_out_by_epoch)
            announce(
                f'held out, after each epoch: {measured}; {kept}, and differences within the'
                ' interval are chance'
            )


def reward_alarms(
    stats: Mapping[str, float], judged: Sequence[LearnedBatch], guessing_loss: float
) -> list[Alarm]:
    """Return the alarms of a step; judged: the last quarter of batches, after the last step."""
    alarms = not_finite(stats, ['loss'])
    if not judged or alarms:
        return alarms
    labels = [batch.labels for batch in judged]
    agreement = weighted_mean([batch.agreement for batch in judged], labels)
    least_agreement = -SIGNIFICANT / math.sqrt(sum(labels))
    if agreement < least_agreement:
        alarms.append(Alarm('agreement', agreement, least_agreement, WORSE_THAN_CHANCE))
    loss = mean_loss(judged)
    most_loss = FAR_ABOVE_GUESSING * guessing_loss
    if loss > most_loss:
        text = (
            'the loss of the reward model ended far above that of guessing, '
            f'{guessing_loss:.4g}: lower its learning rate'
        )
        alarms.append(Alarm('loss', loss, most_loss, text))
    return alarms


class RewardHealth(HealthMonitor):
    """Watches the training of a reward model in this process; see reward_alarms."""

    trainer: RewardModelTrainer

    def after_step(self, step: int, stats: Mapping[str, float]) -> None:
        """Compare the last batch with the limits; after the last step, the last quarter of all."""
        trainer = self.trainer
        judged = trainer.judged_batches() if step == trainer.total_steps else []
        guessing_loss = trainer.label_type.guessing_loss(trainer.labels)
        alarms = reward_alarms(stats, judged, guessing_loss)
        self.raise_alarms(step, alarms)
        # The original's lines are as they were recorded, and of labels made up nothing is learned.
        is_left_out = console_is('original') or trainer.settings.labels.source == 'test'
        is_shown = self.mode != 'off' and trainer.comm.rank == 0 and not is_left_out
        if judged and not alarms and is_shown and (loss := mean_loss(judged)) >= guessing_loss:
            # No alarm: labels on which people disagree allow little more.
            announce(
                f'WARNING: the reward model ended no better than by guessing (loss {loss:.4g}, of'
                f' guessing {guessing_loss:.4g}): change its learning rate or epochs'
            )
