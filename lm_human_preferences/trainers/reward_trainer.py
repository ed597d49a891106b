"""Trainer of a reward model (paper, section 2.1), and the labels that the model learns from."""

import dataclasses
import functools
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from lm_human_preferences import label_types, lm_tasks
from lm_human_preferences.checkpointing.names import VariableNames
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.errors import OptionError, UserError
from lm_human_preferences.hparams.reward_options import LabelHParams as LabelHParams
from lm_human_preferences.labels import training_data
from lm_human_preferences.labels.held_out import Labels, Prediction, predict, split
from lm_human_preferences.language.networks.scopes import REWARD_NETWORKS
from lm_human_preferences.lm_tasks import QuerySampler
from lm_human_preferences.plan.phases import TrainReward
from lm_human_preferences.policy import Policy
from lm_human_preferences.rewards import RewardModel
from lm_human_preferences.runs import run_record
from lm_human_preferences.training.optimizer import Adam
from lm_human_preferences.utils.core import (
    ceil_div,
    exact_div,
    map_micro_batches,
    mean_and_std,
)
from lm_human_preferences.utils.logging import Logger, announce, log_as_original


@dataclasses.dataclass(kw_only=True, eq=False)
class RewardModelTrainer:
    """Trainer of a reward model: call `prepare`, then `step` `total_steps` times, then `finish`.

    policy: the initial policy, on whose samples rewards are normalised. labels: {field:
    (num_train, ...)}, the same on every rank. given_optimizer: used instead of a new Adam.
    """

    reward_model: RewardModel
    policy: Policy
    query_sampler: QuerySampler
    labels: Labels
    phase: TrainReward
    logger: Logger
    comm: Comm
    held_out: Labels | None = None
    given_optimizer: dataclasses.InitVar[Adam | None] = None

    def __post_init__(self, given_optimizer: Adam | None) -> None:
        self.settings = self.phase.settings
        self.label_type = label_types.get(self.settings.labels.type)
        self.num_train = len(self.labels['query'])
        self.steps_done = 0
        self.is_undone = False  # a failed step never counts as undone: it may have changed weights
        self.order: np.ndarray | None = None  # indices of labels, in the order of learning
        self.prediction: Prediction | None = None  # last measured accuracy on held-out labels
        self.networks = {'reward_model': self.reward_model, 'ref_policy': self.policy}
        learning = REWARD_NETWORKS.learning_parameters(self.networks)
        self.optimizer = given_optimizer or Adam(learning, comm=self.comm)

    def prepare(self) -> None:
        """Normalise rewards and draw the order of the labels, unless the training was resumed."""
        if self.order is None:
            if self.settings.normalize_before:
                self.normalize(*self.target_mean_std())
            # All ranks use the order that rank 0 draws, so that an epoch learns each label once.
            epochs = [np.random.permutation(self.num_train) for _ in range(self.settings.epochs)]
            own = torch.from_numpy(np.concatenate(epochs))
            self.order = self.comm.all_gather_object(own)[0].numpy()
        batch_size = exact_div(self.settings.batch_size, self.comm.size)
        log_as_original(f'{self.comm.rank} training on {self.num_train} in batches of {batch_size}')

    def step(self) -> dict[str, float]:
        """Learn from the next batch of labels; return the logged statistics."""
        assert self.order is not None, 'see prepare'
        done = self.labels_after(self.steps_done)
        batch = self.order[done : self.labels_after(self.steps_done + 1)]
        lr = (1 - self.steps_done / self.total_steps) * self.settings.lr
        stats = self.train_batch(batch[self.comm.rank :: self.comm.size], lr=lr)
        if self.held_out is not None and self.steps_done % self.steps_of_epoch == 0:
            self._predict(self.held_out)
        return stats

    def labels_after(self, steps: int) -> int:
        """Return the number of labels learned in `steps` steps; every epoch learns all labels."""
        epoch, steps_of_this = divmod(steps, self.steps_of_epoch)
        return epoch * self.num_train + steps_of_this * self.settings.batch_size

    def finish(self) -> None:
        """If normalize_after is set, scale the initial policy's rewards to mean 0 and std 1."""
        if self.settings.normalize_after:
            self.normalize(0.0, 1.0)

    def train_batch(self, indices: np.ndarray, lr: float) -> dict[str, float]:
        """Update on this rank's labels at `indices (n,)`; return {statistic: mean over ranks}."""
        labels_of_ranks = self.comm.all_gather_object(len(indices))
        weight = len(indices) * self.comm.size / sum(labels_of_ranks)
        numbers: dict[str, float] = {}
        if weight == 0:
            self.optimizer.minimize(None, lr)
        else:
            numbers = self._learn(indices, weight, lr)
        means = self.comm.all_reduce_mean(numbers, weight)
        self.logger.log(means, self.steps_done)
        self.steps_done += 1
        return means

    def _learn(self, indices: np.ndarray, weight: float, lr: float) -> dict[str, float]:
        """Take a step on the loss of the labels at `indices`, times `weight`; return statistics."""
        rows = torch.as_tensor(indices)
        batch = {field: values[rows] for field, values in self.labels.items()}
        responses = torch.stack([batch[sample] for sample in self.label_type.samples], dim=1)
        rewards = self._differentiable_rewards(batch['query'], responses)
        stats = self.label_type.loss_of(rewards, batch)
        self.optimizer.minimize(weight * stats['loss'], lr)
        return {name: stats[name].item() for name in sorted(stats)}

    def _predict(self, held_out: Labels) -> None:
        """Log the accuracy on `held_out` labels after an epoch; print the last epoch's accuracy."""
        size = self.settings.micro_batch_size or self.settings.batch_size
        get_rewards = self.reward_model.get_rewards
        self.prediction = predict(get_rewards, held_out, self.label_type, size, self.comm)
        if self.prediction is None:
            return
        statistics = self.prediction.statistics()
        self.logger.log(statistics, self.steps_done - 1, tag_prefix='train_reward/held_out/')
        if self.steps_done == self.total_steps and self.comm.rank == 0:
            announce(f'held out: {self.prediction}')

    def _differentiable_rewards(
        self, queries: torch.Tensor, responses: torch.Tensor
    ) -> torch.Tensor:
        """Return differentiable rewards (batch, n); a micro-batch's activations are recomputed."""
        get_rewards = self.reward_model.get_rewards_op
        size = self.settings.micro_batch_size
        if size is None:
            return get_rewards(queries, responses)
        recomputed = functools.partial(checkpoint, get_rewards, use_reentrant=False)
        return map_micro_batches(recomputed, size, queries, responses)

    def normalize(self, target_mean: float, target_std: float) -> None:
        """Scale rewards to the target mean and std over samples of the initial policy."""
        if not self.settings.normalize_samples:
            return
        self.reward_model.reset_reward_scale()
        mean, std = self.sampled_mean_std(self.settings.normalize_samples)
        if self.comm.rank == 0:
            log_as_original(
                f'targets: {target_mean} +- {target_std}', f'before normalize: {mean} +- {std}'
            )
        if std == 0 or not np.isfinite((mean, std)).all():
            raise UserError(
                f'the rewards of {self.settings.normalize_samples} samples are {mean} +- {std}, so'
                ' they cannot be normalised: check the labels, or lower the learning rate of the'
                ' reward model'
            )
        self.reward_model.set_reward_norm(
            old_mean=mean, old_std=std, new_mean=target_mean, new_std=target_std
        )
        if self.settings.debug_normalize:
            mean, std = self.sampled_mean_std(self.settings.debug_normalize)
            if self.comm.rank == 0:
                announce(f'after normalize: {mean} +- {std}')

    def target_mean_std(self) -> tuple[float, float]:
        """Return the (mean, std) to normalise rewards to: (0, 1) unless the labels imply others."""
        scales = self.label_type.target_scales(self.labels)
        return (0.0, 1.0) if scales is None else mean_and_std(scales)

    def sampled_mean_std(self, n_samples: int) -> tuple[float, float]:
        """Sample `n_samples` responses of the initial policy; return the rewards' mean and std."""
        batch_count = ceil_div(n_samples, self.settings.rollout_batch_size)
        batches = [self.sampled_rewards() for _ in range(batch_count)]
        return mean_and_std(torch.cat(self.comm.all_gather_object(torch.cat(batches).cpu())))

    def sampled_rewards(self) -> torch.Tensor:
        """Sample from the initial policy; return rewards (rollout_batch_size / ranks,)."""
        queries = self.query_sampler()['tokens']
        return map_micro_batches(self._sample_and_score, self.settings.micro_batch_size, queries)

    def _sample_and_score(self, queries: torch.Tensor) -> torch.Tensor:
        length = self.settings.task.response_length
        responses = self.policy.respond(queries, length=length)['responses']
        return self.reward_model.get_rewards(queries, responses)

    @property
    def total_steps(self) -> int:
        """Return the number of steps in the whole training."""
        return self.settings.epochs * self.steps_of_epoch

    @property
    def steps_of_epoch(self) -> int:
        """Return the number of steps of an epoch; its last step may have fewer labels."""
        return ceil_div(self.num_train, self.settings.batch_size)

    @property
    def variable_names(self) -> VariableNames:
        """Return the converter from the names in `tensors` to names in checkpoints."""
        return self.reward_model.model.variable_names

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return a checkpoint's tensors by name: parameters, Adam's moments, step counts."""
        return {
            **REWARD_NETWORKS.parameters(self.networks),
            **self.optimizer.moments(),
            'train_reward/optimizer_steps': torch.tensor(self.optimizer.steps),
            'train_reward/step': torch.tensor(self.steps_done),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the JSON values that a resumed run needs besides the tensors."""
        assert self.order is not None
        return {
            'step': self.steps_done,
            'optimizer_steps': self.optimizer.steps,
            'queries': self.query_sampler.position,
            'order': self.order.tolist(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; a checkpointer loads the weights and moments."""
        self.steps_done = state['step']
        self.order = np.array(state['order'])
        self.optimizer.start_at(state['optimizer_steps'])
        self.query_sampler.seek(state['queries'])


def trainer_of(
    phase: TrainReward,
    comm: Comm,
    reward_model: RewardModel,
    ref_policy: Policy,
    labels: Labels,
    **more: Any,
) -> RewardModelTrainer:
    """Return a trainer of `reward_model` on `labels`. more: arguments of RewardModelTrainer."""
    query_sampler = lm_tasks.make_query_sampler(
        hparams=phase.settings.task,
        encoder=ref_policy.encoder,
        comm=comm,
        labels=phase.settings.labels.source,
        batch_size=exact_div(phase.settings.rollout_batch_size, comm.size),
    )
    return RewardModelTrainer(
        reward_model=reward_model,
        policy=ref_policy,
        query_sampler=query_sampler,
        labels=labels,
        phase=phase,
        comm=comm,
        **more,
    )


class TrainingLabels(NamedTuple):
    """Labels to learn from, held-out labels, notes for the user, and facts for run.json."""

    learned: Labels
    held_out: Labels | None
    notes: list[str]
    about: dict[str, Any]


def read_labels(phase: TrainReward, policy: Policy, comm: Comm) -> TrainingLabels:
    """Load the labels, or make labels for samples of `policy`; hold some labels out.

    A resumed training learns from the labels with which it began; UserError if they have changed.
    """
    settings, labels = phase.settings, phase.settings.labels
    directory, before = settings.run.directory, {}
    if phase.run.resume and directory is not None:
        command = phase.command.command
        before = comm.on_rank_0(lambda: run_record.training(directory, command)['labels'])
    if labels.are_sampled:
        loaded = training_data.made_up(training_data.simulated_labels(settings, policy, comm))
    else:
        lines = before.get('answers')  # a resumed run reads no answers that were added later
        encoding = policy.trained_model.encoding
        loaded = training_data.load_labels(settings, encoding, comm, lines)
    learned, held_out, notes = loaded.tensors, None, []
    if labels.held_out:
        learned, held_out, notes = split(learned, settings, policy.encoder)
    about = {
        'source': labels.source,
        **loaded.about,
        **label_counts(learned, held_out),
        'digest': loaded.digest,
    }
    # Rounding may change labels that are made again, so their digest is not compared.
    is_sampled = labels.are_sampled and before.get('source') == labels.source
    if before and not is_sampled and about['digest'] != before.get('digest'):
        raise OptionError(
            f'{labels.setting("source")}: these are not the labels with which the run began'
            f' ({before.get("found")} of {before.get("source")}): restore the earlier labels, or'
            ' begin again with --overwrite',
        )
    return TrainingLabels(learned, held_out, [*loaded.notes, *notes], about)


def label_counts(learned: Labels, held_out: Labels | None) -> dict[str, int]:
    """Return the numbers of learned labels, held-out labels, held-out queries and all queries."""
    queries = learned['query']
    found = {'learned_from': len(queries), 'held_out': 0, 'held_out_queries': 0}
    if held_out is not None:
        queries = torch.cat([queries, held_out['query']])
        found['held_out'] = len(held_out['query'])
        found['held_out_queries'] = len(held_out['query'].unique(dim=0))
    return {**found, 'queries': len(queries.unique(dim=0))}
