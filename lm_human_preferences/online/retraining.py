"""Retraining the reward model while a policy trains."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from lm_human_preferences import label_types, train_reward
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.frozen_head.reward import FrozenReward
from lm_human_preferences.labels.held_out import Labels, Prediction, predict, split
from lm_human_preferences.plan.phases import TrainReward
from lm_human_preferences.policy import Policy
from lm_human_preferences.rewards import EnsembleReward, RewardModel
from lm_human_preferences.trainers import head_training
from lm_human_preferences.training.optimizer import Adam
from lm_human_preferences.utils.core import random_stream
from lm_human_preferences.utils.logging import Logger, announce


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Mean loss of the last batches, and accuracy of the mean reward on held-out labels.

    Without held-out labels, held_out is None; for a head, it is the accuracy in cross-validation.
    """

    loss: float
    held_out: Prediction | None


@dataclasses.dataclass(kw_only=True, eq=False)
class Retrainer:
    """Trainer of new reward models on all labels so far (paper, section 2.3).

    It uses separate random streams, so that the policy's training draws the same numbers.
    is_trained: whether the models are trained when a run resumes; see HeadRetrainer.
    """

    reward_models: Sequence[RewardModel]
    ref_policy: Policy
    phase: TrainReward
    comm: Comm
    seed: int
    is_trained: ClassVar[bool] = True  # checkpoints hold the models

    def __post_init__(self) -> None:
        self.settings = self.phase.settings
        self.reward = EnsembleReward(self.reward_models)
        # Log to the console only: steps in TensorBoard are those of the policy.
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

    def train(self, labels: Labels, step: int) -> Outcome:
        """Train on `labels` {field: (labels, ...)}, the same on all ranks, before policy `step`."""
        learned, held_out, _ = split(labels, self.settings, self.ref_policy.encoder)
        losses = []
        for number in range(len(self.reward_models)):
            # The first model of an ensemble draws the same numbers as a single model.
            own_stream = (number,) if number else ()
            with random_stream(self.seed, 'reward model', step, self.comm.rank, *own_stream):
                losses.append(self._train(number, learned, held_out))
        prediction = None if held_out is None else self.predict(held_out)
        return Outcome(sum(losses) / len(losses), prediction)

    def _train(self, number: int, labels: Labels, held_out: Labels | None) -> float:
        """Train one model; return its loss, see Outcome."""
        reward_model, optimizer = self.reward_models[number], self.optimizers[number]
        reward_model.restart(self.ref_policy.model)
        self.comm.broadcast_(reward_model.get_params())  # each rank has drawn another head
        optimizer.reset()
        parts = (reward_model, self.ref_policy, labels, held_out, optimizer)
        trainer = train_reward.trainer_of(self.phase, self.comm, self.logger, *parts)
        trainer.prepare()
        while trainer.steps_done < trainer.total_steps:
            trainer.step()
        trainer.finish()
        optimizer.reset()
        return trainer.last_loss()

    def predict(self, labels: Labels) -> Prediction | None:
        """Return the accuracy of the mean reward on `labels`; None without any."""
        return predict(
            self.reward.get_rewards,
            labels,
            label_types.get(self.settings.labels.type),
            self.settings.micro_batch_size or self.settings.batch_size,
            self.comm,
        )


@dataclasses.dataclass(kw_only=True, eq=False)
class HeadRetrainer:
    """Retrainer that fits a head on frozen hidden states to all labels so far.

    Checkpoints need not hold the head: the same labels give it again. place: the head's directory.
    """

    reward: FrozenReward
    ref_policy: Policy
    phase: TrainReward
    comm: Comm
    seed: int
    place: str | None
    is_trained: bool = False

    def __post_init__(self) -> None:
        self.settings = self.phase.settings

    def train(self, labels: Labels, step: int) -> Outcome:
        """Fit the head to `labels`, the same on all ranks, before policy `step`."""
        learned, held_out, _ = split(labels, self.settings, self.ref_policy.encoder)
        with random_stream(self.seed, 'reward model', step, self.comm.rank):
            fitted = head_training.fit(
                self.phase, self.ref_policy, learned, self.comm, may_be_constant=True
            )
        self.reward.set_head(fitted.head)
        self.is_trained = True
        if (warning := fitted.warning()) and self.comm.rank == 0:
            announce(warning)
        if self.comm.rank == 0 and self.place is not None:
            self.ref_policy.trained_model.write_files(self.place)
            count = len(learned['query'])
            about = head_training.about(self.phase, fitted, self.ref_policy, count)
            fitted.head.save(self.place, about)
        prediction = fitted.prediction if held_out is None else self.predict(held_out)
        return Outcome(fitted.loss, prediction)

    def predict(self, labels: Labels) -> Prediction | None:
        """Return the accuracy of the head on `labels`; None without any."""
        label_type = label_types.get(self.settings.labels.type)
        rows = head_training.ROWS
        return predict(self.reward.get_rewards, labels, label_type, rows, self.comm)
