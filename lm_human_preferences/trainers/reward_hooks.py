"""Hooks of a reward model's training: table, held-out accuracy, alarms, checkpoints."""

from collections.abc import Mapping

from lm_human_preferences.checkpointing.checkpointer import Checkpointer
from lm_human_preferences.plan.phases import TrainReward
from lm_human_preferences.trainers.hooks import Checkpoints, HealthMonitor, ProgressBar, Table
from lm_human_preferences.trainers.reward_trainer import RewardModelTrainer, mean_loss
from lm_human_preferences.training.loop import Hook
from lm_human_preferences.utils.logging import announce


def reward_hooks(
    trainer: RewardModelTrainer, checkpointer: Checkpointer, phase: TrainReward
) -> list[Hook]:
    """Return the hooks of a reward model's training."""
    shown = {'loss': ('loss', '.3f')}
    # No checkpoint at the end: the finished model is saved after it is normalised.
    interval = phase.settings.run.save_interval
    return [
        ProgressBar(trainer, name=phase.name, unit='batch', per_step=1, shown=shown),
        RewardTable(trainer),
        HealthMonitor(phase.run.on_anomaly, trainer, checkpointer, ['loss']),
        HeldOut(trainer),
        Checkpoints(trainer, checkpointer, interval),
    ]


class RewardTable(Table):
    """Table of progress, with the mean loss since the previous line."""

    def __init__(self, trainer: RewardModelTrainer) -> None:
        super().__init__(trainer, 'labels', trainer.labels_after, {'loss': ('loss', 8, '.3f')})
        self.batches = trainer.batches
        self.printed = 0  # number of batches that earlier lines have covered

    def values(self, stats: Mapping[str, float]) -> list[float]:
        new = self.batches[self.printed :]
        self.printed += len(new)
        return [mean_loss(new)]


class HeldOut(Hook):
    """Hook that measures held-out accuracy after each epoch."""

    def __init__(self, trainer: RewardModelTrainer) -> None:
        self.trainer = trainer

    def after_step(self, step: int, stats: Mapping[str, float]) -> None:
        """Log the accuracy after each epoch and print the final one; all ranks must call this."""
        trainer = self.trainer
        if step % trainer.steps_of_epoch != 0:
            return
        prediction = trainer.predict_held_out()
        if prediction is None:
            return
        trainer.prediction = prediction
        trainer.logger.log(prediction.statistics(), step - 1, tag_prefix='train_reward/held_out/')
        if step == trainer.total_steps and trainer.comm.rank == 0:
            announce(f'held out: {prediction}')
