"""Retraining the reward model while a policy trains."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from lm_human_preferences import label_types, storage
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.labels.held_out import Labels, Prediction, predict, split
from lm_human_preferences.plan.phases import TrainPolicy, TrainReward
from lm_human_preferences.policy import Policy
from lm_human_preferences.reward_sources.frozen_head.reward import FrozenReward
from lm_human_preferences.rewards import SCOPE, EnsembleReward, RewardModel
from lm_human_preferences.runs.run_files import REWARD
from lm_human_preferences.trainers import reward_trainer
from lm_human_preferences.trainers.additions import head_training
from lm_human_preferences.trainers.policy_trainer import PPOTrainer
from lm_human_preferences.training.optimizer import Adam
from lm_human_preferences.utils.core import ceil_div, random_stream
from lm_human_preferences.utils.logging import Logger, announce


@dataclasses.dataclass(kw_only=True, eq=False)
class Retrainer:
    """Trainer of the reward model on all labels collected so far (paper, section 2.3).

    It uses separate random streams, so that the policy's training draws the same numbers.
    """

    reward: Any  # EnsembleReward of RewardModels, or FrozenReward
    ref_policy: Policy
    phase: TrainReward
    comm: Comm
    seed: int
    is_trained: bool = True  # False before the first training, if checkpoints omit the reward

    def __post_init__(self) -> None:
        self.settings = self.phase.settings

    def train(self, labels: Labels, step: int) -> tuple[float, Prediction | None]:
        """Train the reward on `labels`, the same on all ranks, before the policy takes `step`.

        Return the mean loss of the last batches, and the accuracy of the reward on held-out labels.
        Without these, it is None; for a head, it is the accuracy in cross-validation.
        """
        learned, held_out, _ = split(labels, self.settings, self.ref_policy.encoder)
        loss, prediction = self._train(learned, step)
        self.is_trained = True
        return loss, prediction if held_out is None else self.predict(held_out)

    def _train(self, labels: Labels, step: int) -> tuple[float, Prediction | None]:
        raise NotImplementedError

    def predict(self, labels: Labels) -> Prediction | None:
        """Return the accuracy of the reward on `labels`; None if there are no labels."""
        label_type = label_types.get(self.settings.labels.type)
        size = self.settings.micro_batch_size or self.settings.batch_size
        return predict(self.reward.get_rewards, labels, label_type, size, self.comm)


class ModelRetrainer(Retrainer):
    """Retrainer of reward models, each of which starts as the initial model with a new head."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reward_models: Sequence[RewardModel] = self.reward.members
        # Log to the console only, as TensorBoard counts the policy's steps.
        self.logger = Logger(
            None,
            'reward_model',
            log_interval=self.settings.run.log_interval,
            comm=self.comm,
            tag_prefix='train_reward/minibatch/',
        )
        self.optimizers = []
        for model in self.reward_models:
            self.optimizers.append(Adam(model.parameters_by_name(), comm=self.comm))
            model.model.gradient_checkpointing = self.settings.run.gradient_checkpointing

    def _train(self, labels: Labels, step: int) -> tuple[float, Prediction | None]:
        losses = []
        for number in range(len(self.reward_models)):
            # The first model of an ensemble draws the same numbers as a single model.
            own_stream = (number,) if number else ()
            with random_stream(self.seed, 'reward model', step, self.comm.rank, *own_stream):
                losses.append(self._train_one(number, labels))
        return sum(losses) / len(losses), None

    def _train_one(self, number: int, labels: Labels) -> float:
        """Train one reward model; return its mean loss in the last quarter of the last epoch."""
        reward_model, optimizer = self.reward_models[number], self.optimizers[number]
        reward_model.restart(self.ref_policy.model)
        self.comm.broadcast_(reward_model.get_params())  # gives all ranks the same random head
        optimizer.reset()
        parts = (reward_model, self.ref_policy, labels)
        more = {'logger': self.logger, 'given_optimizer': optimizer}
        trainer = reward_trainer.trainer_of(self.phase, self.comm, *parts, **more)
        trainer.prepare()
        losses = []
        while trainer.steps_done < trainer.total_steps:
            losses.append(trainer.step()['loss'])
        trainer.finish()
        optimizer.reset()
        last = losses[-ceil_div(trainer.steps_of_epoch, 4) :]
        return sum(last) / len(last)


@dataclasses.dataclass(kw_only=True, eq=False)
class HeadRetrainer(Retrainer):
    """Retrainer that fits a head on frozen hidden states. place: directory of the head, or None.

    Checkpoints need not hold the head: the same labels give it again.
    """

    place: str | None
    is_trained: bool = False

    def _train(self, labels: Labels, step: int) -> tuple[float, Prediction | None]:
        with random_stream(self.seed, 'reward model', step, self.comm.rank):
            fitted = head_training.fit(
                self.phase, self.ref_policy, labels, self.comm, may_be_constant=True
            )
        self.reward.set_head(fitted.head)
        if (warning := fitted.warning()) and self.comm.rank == 0:
            announce(warning)
        if self.comm.rank == 0 and self.place is not None:
            self.ref_policy.trained_model.write_files(self.place)
            count = len(labels['query'])
            about = head_training.about(self.phase, fitted, self.ref_policy, count)
            fitted.head.save(self.place, about)
        return fitted.loss, fitted.prediction


def retrainer_of(trainer: PPOTrainer, phase: TrainPolicy, seed: int) -> Retrainer:
    """Return the retrainer of the reward that `trainer` learns from."""
    common: dict[str, Any] = dict(
        ref_policy=trainer.ref_policy, phase=phase.retraining, comm=trainer.comm, seed=seed
    )
    reward: Any = trainer.networks[SCOPE]
    if isinstance(reward, FrozenReward):
        directory = phase.run.directory
        place = directory and storage.join(directory, REWARD.network)
        return HeadRetrainer(reward=reward, place=place, **common)
    models: Any = [trainer.networks[scope] for scope in trainer.roles.retrained]
    return ModelRetrainer(reward=EnsembleReward(models), **common)
