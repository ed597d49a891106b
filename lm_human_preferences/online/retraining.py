"""Retraining a reward model while a policy trains."""

from __future__ import annotations

import dataclasses

import torch

from lm_human_preferences import label_types, lm_tasks
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.hparams import reward_options
from lm_human_preferences.labels.held_out import Prediction, predict, split
from lm_human_preferences.policy import Policy
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
    seed: of the run.
    """

    def __init__(
        self,
        *,
        reward_model: RewardModel,
        ref_policy: Policy,
        hparams: reward_options.HParams,
        comm: Comm,
        seed: int,
    ) -> None:
        self.reward_model, self.ref_policy = reward_model, ref_policy
        self.hparams, self.comm, self.seed = hparams, comm, seed
        self.optimizer = Adam(reward_model.parameters_by_name(), comm=comm)
        reward_model.model.gradient_checkpointing = hparams.run.gradient_checkpointing

    def train(self, labels: Labels, step: int) -> Outcome:
        """Train on `labels` {field: (labels, ...)}, the same on all ranks, before `step` of the
        policy."""
        with (
            memory.explain_oom('--rewards.train_new_model.micro_batch_size'),
            random_stream(self.seed, 'reward model', step, self.comm.rank),
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
        return predict(
            self.reward_model.get_rewards,
            labels,
            label_types.get(self.hparams.labels.type),
            self.hparams.micro_batch_size or self.hparams.batch_size,
            self.comm,
        )
