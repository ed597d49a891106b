"""Retraining a reward model while a policy trains."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from lm_human_preferences import label_types, lm_tasks
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.hparams import reward_options
from lm_human_preferences.labels.held_out import Prediction, Rewards, predict, split
from lm_human_preferences.policy import Policy
from lm_human_preferences.reward_models.ensemble import EnsembleReward
from lm_human_preferences.reward_trainer import RewardModelTrainer
from lm_human_preferences.rewards import RewardModel
from lm_human_preferences.training import memory
from lm_human_preferences.training.optimizer import Adam
from lm_human_preferences.utils.core import exact_div, random_stream, weighted_mean

Labels = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How the training of a reward model went.

    loss: the mean over the last steps, see RewardModelTrainer.judged_steps, before each label was
    learned. held_out: how the model predicts the labels held out; None if there are none.
    """

    loss: float
    held_out: Prediction | None


class Retrainer:
    """Trains a reward model on all labels so far, from the beginning (paper, section 2.3).

    It starts each time as the initial model with a random head, goes through the labels once, and
    is normalised on the initial model's samples. Random numbers are drawn from a stream of its own,
    so that those of everything else go on as if nothing had happened. hparams: train_reward's.
    seed: of the run. member: the number of the reward model in its ensemble, from 0.
    """

    def __init__(
        self,
        *,
        reward_model: RewardModel,
        ref_policy: Policy,
        hparams: reward_options.HParams,
        comm: Comm,
        seed: int,
        member: int = 0,
    ) -> None:
        self.reward_model, self.ref_policy = reward_model, ref_policy
        self.hparams, self.comm, self.seed = hparams, comm, seed
        self.own_stream = (member,) if member else ()  # the first one's is that of a single model
        self.optimizer = Adam(reward_model.parameters_by_name(), comm=comm)
        reward_model.model.gradient_checkpointing = hparams.run.gradient_checkpointing

    def train(self, labels: Labels, step: int) -> Outcome:
        """Train on `labels` {field: (labels, ...)}, the same on all ranks, before `step` of the
        policy."""
        with (
            memory.explain_oom('--rewards.train_new_model.micro_batch_size'),
            random_stream(self.seed, 'reward model', step, self.comm.rank, *self.own_stream),
        ):
            return self._train(labels)

    def _train(self, labels: Labels) -> Outcome:
        self.reward_model.restart(self.ref_policy.model)
        self.comm.broadcast_(self.reward_model.get_params())  # the head, which each rank has drawn
        self.optimizer.reset()
        learned, held_out, _ = split(labels, self.hparams)
        query_sampler = lm_tasks.make_query_sampler(
            hparams=self.hparams.task,
            encoder=self.ref_policy.encoder,
            comm=self.comm,
            labels=self.hparams.labels.source,
            batch_size=exact_div(self.hparams.rollout_batch_size, self.comm.size),
        )
        trainer = RewardModelTrainer(
            reward_model=self.reward_model,
            policy=self.ref_policy,
            query_sampler=query_sampler,
            labels=learned,
            held_out=held_out,
            hparams=self.hparams,
            comm=self.comm,
            optimizer=self.optimizer,
        )
        trainer.prepare()
        losses, counts = [], []
        for step in range(trainer.total_steps):
            losses.append(trainer.step()['loss'])
            counts.append(trainer.labels_after(step + 1) - trainer.labels_after(step))
        trainer.finish()
        self.optimizer.reset()
        judged = slice(-trainer.judged_steps, None)
        loss = weighted_mean(losses[judged], counts[judged])
        return Outcome(loss, trainer.predict_held_out())

    def predict(self, labels: Labels) -> Prediction | None:
        """How well the present reward model predicts `labels`; None if there are none."""
        return self.predict_by(self.reward_model.get_rewards, labels)

    def predict_by(self, get_rewards: Rewards, labels: Labels) -> Prediction | None:
        """The same of rewards that need not be this model's."""
        return predict(
            get_rewards,
            labels,
            label_types.get(self.hparams.labels.type),
            self.hparams.micro_batch_size or self.hparams.batch_size,
            self.comm,
        )


class EnsembleRetrainer:
    """Does as Retrainer for all members of an ensemble, one after another.

    members: those of each of them. Between trainings they keep neither gradients nor moments.
    """

    def __init__(self, members: Sequence[Retrainer]) -> None:
        self.members = members
        self.reward = EnsembleReward([member.reward_model for member in members])

    def train(self, labels: Labels, step: int) -> Outcome:
        """See Retrainer.train. The loss is the mean of the members'; what was held out is predicted
        by the mean of their rewards."""
        losses = [member.train(labels, step).loss for member in self.members]
        _, held_out, _ = split(labels, self.members[0].hparams)
        prediction = None if held_out is None else self.predict(held_out)
        return Outcome(sum(losses) / len(losses), prediction)

    def predict(self, labels: Labels) -> Prediction | None:
        """See Retrainer.predict."""
        return self.members[0].predict_by(self.reward.get_rewards, labels)


def retrainer_of(
    reward_models: Sequence[RewardModel], **settings: Any
) -> Retrainer | EnsembleRetrainer:
    """What retrains these reward models; settings: see Retrainer."""
    members = [
        Retrainer(reward_model=reward_model, member=member, **settings)
        for member, reward_model in enumerate(reward_models)
    ]
    return members[0] if len(members) == 1 else EnsembleRetrainer(members)
