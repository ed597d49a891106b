"""Hooks of a reward model's training: table, held-out labels and alarms."""

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
    # The finished model is saved once it is normalised.
    interval = phase.settings.run.save_interval
    return [
        ProgressBar(trainer, name=phase.name, unit='batch', per_step=1, shown=shown),
        reward_table(trainer),
        HealthMonitor(phase.run.on_anomaly, trainer, checkpointer, ['loss']),
        HeldOut(trainer),
        Checkpoints(trainer, checkpointer, interval),
    ]


def reward_table(trainer: RewardModelTrainer) -> Table:
    """Return the hook that prints a reward model's table: the mean loss since the last line."""
    batches = trainer.batches
    printed = 0  # number of batches that earlier lines have covered

    def amounts() -> tuple[int, int]:
        return trainer.labels_done, trainer.total_labels

    def values(stats: Mapping[str, float]) -> list[float]:
        """Return the mean loss of the batches since the last line."""
        nonlocal printed
        loss = mean_loss(batches[printed:])
        printed = len(batches)
        return [loss]

    return Table(trainer, 'labels', amounts, {'loss': (8, '.3f')}, values)


class HeldOut(Hook):
    """Hook that measures held-out accuracy after each epoch."""

    def __init__(self, trainer: RewardModelTrainer) -> None:
        self.trainer = trainer

    def after_step(self, step: int, stats: Mapping[str, float]) -> None:
        """Log the accuracy after an epoch, and print the last one; all ranks take part."""
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
