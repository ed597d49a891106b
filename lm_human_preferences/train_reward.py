"""Training a reward model from human labels (paper, section 2.1)."""

import functools
import shutil
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from lm_human_preferences import label_types, lm_tasks, plans, session, storage
from lm_human_preferences.checkpointing import checkpoints
from lm_human_preferences.checkpointing.checkpointer import Checkpointer
from lm_human_preferences.checkpointing.checkpoints import COUNT
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.train_reward import HParams, LabelHParams, RunHParams
from lm_human_preferences.labels import files as label_files
from lm_human_preferences.labels import simulated
from lm_human_preferences.labels.folder_labels import answers_so_far, recorded_answers
from lm_human_preferences.labels.held_out import Prediction, predict, split
from lm_human_preferences.language.parameters import in_tf_shapes
from lm_human_preferences.language.trained_models import TrainedModel
from lm_human_preferences.policy import Policy
from lm_human_preferences.rewards import RewardModel
from lm_human_preferences.runs import run_dir, run_files, run_settings
from lm_human_preferences.training import console, memory
from lm_human_preferences.training.hooks import reward_hooks
from lm_human_preferences.training.loop import training_loop
from lm_human_preferences.training.micro_batches import map_micro_batches
from lm_human_preferences.training.optimizer import Adam
from lm_human_preferences.training.time_left import TimeLeft
from lm_human_preferences.utils.core import ceil_div, exact_div, mean_and_std
from lm_human_preferences.utils.logging import Logger, announce, log_as_original, log_line

__all__ = ['HParams', 'LabelHParams', 'RewardModelTrainer', 'RunHParams', 'train']

# What RewardModelTrainer.state_dict must have, for checkpoints.matches_schema
STATE = {'step': COUNT, 'optimizer_steps': COUNT, 'order': [COUNT], 'queries': (COUNT, COUNT)}


class RewardModelTrainer:
    """Trains a reward model on every label once, and normalises its rewards before and after.

    Call `prepare`, then `step` as often as there are steps, then `finish`.

    policy: the initial policy, whose samples set the scale. query_sampler: see
    lm_tasks.make_query_sampler. labels: {field: tensor (num_train, ...)}, the same on every rank.
    held_out: labels to measure the reward model by, see labels.held_out; None for none. optimizer:
    of the reward model, with no update yet; None: a new one. label_notes: lines that tell the user
    about the labels. answers: if the labels are those of a folder, {labeller: how many lines of the
    answers count}, so that a resumed run has the same.
    """

    def __init__(
        self,
        *,
        reward_model: RewardModel,
        policy: Policy,
        query_sampler: lm_tasks.QuerySampler,
        labels: dict[str, torch.Tensor],
        hparams: HParams,
        comm: Comm,
        held_out: dict[str, torch.Tensor] | None = None,
        optimizer: Adam | None = None,
        label_notes: Sequence[str] = (),
        answers: dict[str, int] | None = None,
    ) -> None:
        self.reward_model = reward_model
        self.policy = policy
        self.query_sampler = query_sampler
        self.labels = labels
        self.held_out = held_out
        self.label_notes = label_notes
        self.answers = answers
        self.label_type = label_types.get(hparams.labels.type)
        self.num_train = len(labels['query'])
        self.hparams = hparams
        self.comm = comm
        self.train_step = 0
        self.order: np.ndarray | None = None  # of the labels, once it is drawn
        # How far the rewards of the last batch agreed with its labels before it was learned.
        self.agreement: float | None = None
        self.networks = {'reward_model': reward_model, 'ref_policy': policy}
        learning = plans.REWARD_NETWORKS.learning_parameters(self.networks)
        self.optimizer = optimizer or Adam(learning, comm=comm)
        self.logger = Logger(
            hparams.run.directory,
            'reward_model',
            log_interval=hparams.run.log_interval,
            comm=comm,
            tag_prefix='train_reward/minibatch/',
        )

    def prepare(self) -> None:
        """Normalise and draw the order of the labels, unless the training was resumed."""
        if self.order is None:
            idle = ' and '.join(self.hparams.idle_normalization())
            if idle and self.comm.rank == 0:
                announce(f'WARNING: {idle} without effect: --normalize_samples is 0')
            if self.hparams.normalize_before:
                self.normalize(*self.target_mean_std())
            # Every rank draws, but rank 0's order counts: each label is learned exactly once.
            self.order = self.comm.all_gather_object(np.random.permutation(self.num_train))[0]
        batch_size = exact_div(self.hparams.batch_size, self.comm.size)
        log_as_original(f'{self.comm.rank} training on {self.num_train} in batches of {batch_size}')

    def step(self) -> dict[str, float]:
        """Learn from the next batch of labels; returns the logged statistics."""
        assert self.order is not None, 'see prepare'
        start = self.train_step * self.hparams.batch_size
        batch = self.order[start : start + self.hparams.batch_size]
        lr = (1 - start / self.num_train) * self.hparams.lr
        return self.train_batch(batch[self.comm.rank :: self.comm.size], lr=lr)

    def finish(self) -> None:
        """Give the rewards of the initial policy's samples mean 0 and deviation 1, if asked for."""
        if self.hparams.normalize_after:
            self.normalize(0.0, 1.0)

    def train_batch(self, indices: np.ndarray, lr: float) -> dict[str, float]:
        """One update on the labels at `indices` (batch / ranks,).

        Returns and logs the statistics before it, averaged over ranks.
        """
        rows = torch.as_tensor(indices)
        batch = {field: values[rows] for field, values in self.labels.items()}
        responses = torch.stack([batch[sample] for sample in self.label_type.samples], dim=1)
        rewards = self._differentiable_rewards(batch['query'], responses)
        stats = self.label_type.loss_of(rewards, batch)
        self.optimizer.minimize(stats['loss'], lr)
        agreement = self.label_type.agreement(rewards.detach().cpu(), batch)
        numbers = {name: stat.item() for name, stat in stats.items()}
        numbers['agreement'] = agreement.item()
        means = self.comm.all_reduce_mean(dict(sorted(numbers.items())))
        self.agreement = means.pop('agreement')  # which the original did not log
        self.logger.log(means, self.train_step)
        self.train_step += 1
        return means

    def predict_held_out(self) -> Prediction | None:
        """How well the rewards predict the labels held out, if there are any. All ranks call it."""
        if self.held_out is None:
            return None
        size = self.hparams.micro_batch_size or self.hparams.batch_size
        get_rewards = self.reward_model.get_rewards
        return predict(get_rewards, self.held_out, self.label_type, size, self.comm)

    def guessing_loss(self) -> float:
        """The loss on these labels of a model that does not look at the responses."""
        return self.label_type.guessing_loss(self.labels)

    def _differentiable_rewards(
        self, queries: torch.Tensor, responses: torch.Tensor
    ) -> torch.Tensor:
        """Rewards (batch, n) of n responses to each query, with gradients.

        Micro-batches save memory by forgetting what the gradient needs: it is computed again then.
        """
        get_rewards = self.reward_model.get_rewards_op
        size = self.hparams.micro_batch_size
        if size is None:
            return get_rewards(queries, responses)
        get_and_forget = functools.partial(checkpoint, get_rewards, use_reentrant=False)
        return map_micro_batches(get_and_forget, size, queries, responses)

    def normalize(self, target_mean: float, target_std: float) -> None:
        """Set gain and bias so that the initial policy's samples score target_mean +- target_std.

        UserError where all of them have the same reward.
        """
        if not self.hparams.normalize_samples:
            return
        self.reward_model.reset_reward_scale()
        mean, std = self.sampled_mean_std(self.hparams.normalize_samples)
        if self.comm.rank == 0:
            log_as_original(
                f'targets: {target_mean} +- {target_std}', f'before normalize: {mean} +- {std}'
            )
        if std == 0:
            raise UserError(
                f'all {self.hparams.normalize_samples} sampled rewards are {mean}, so they cannot'
                ' be normalised; check the labels or set --normalize_samples 0'
            )
        self.reward_model.set_reward_norm(
            old_mean=mean, old_std=std, new_mean=target_mean, new_std=target_std
        )
        if self.hparams.debug_normalize:
            mean, std = self.sampled_mean_std(self.hparams.debug_normalize)
            if self.comm.rank == 0:
                log_line(f'after normalize: {mean} +- {std}')

    def target_mean_std(self) -> tuple[float, float]:
        """The scale that rewards get before training: that of the labels, if any, else 0 +- 1."""
        scales = self.label_type.target_scales(self.labels)
        if scales is None:
            return 0.0, 1.0
        return mean_and_std(scales)

    def sampled_mean_std(self, n_samples: int) -> tuple[float, float]:
        """Mean and deviation of the rewards of `n_samples` responses of the initial policy.

        They are sampled on all ranks, and rounded up to whole batches.
        """
        batch_count = ceil_div(n_samples, self.hparams.rollout_batch_size)
        batches = [self.sampled_rewards() for _ in range(batch_count)]
        of_this_rank = torch.cat(batches).cpu().numpy()
        return mean_and_std(np.concatenate(self.comm.all_gather_object(of_this_rank)))

    def sampled_rewards(self) -> torch.Tensor:
        """Rewards of rollout_batch_size / ranks responses of the initial policy: (responses,)."""
        queries = self.query_sampler()['tokens']
        return map_micro_batches(self._sample_and_score, self.hparams.micro_batch_size, queries)

    def _sample_and_score(self, queries: torch.Tensor) -> torch.Tensor:
        sampled = self.policy.respond(queries, length=self.hparams.task.response_length)
        return self.reward_model.get_rewards(queries, sampled['responses'])

    @property
    def steps_done(self) -> int:
        """Steps that have been taken, before an interruption too."""
        return self.train_step

    @property
    def total_steps(self) -> int:
        """Steps of the whole training."""
        return self.num_train // self.hparams.batch_size

    @property
    def planned_saves(self) -> int:
        """How many checkpoints the whole training writes, the finished model among them."""
        return 1 + self.total_steps // self.hparams.run.save_interval

    def tf_variables(self) -> dict[str, torch.Tensor]:
        """Everything that the original's checkpoint of this run holds, tensors by variable name."""
        return in_tf_shapes(
            {
                **plans.REWARD_NETWORKS.parameters(self.networks),
                **self.optimizer.tf_slots('train_reward/minibatch/opt'),
                'global_step': torch.tensor(0),
                'train_step': torch.tensor(self.train_step),
            }
        )

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs besides the variables, as JSON."""
        assert self.order is not None
        return {
            'step': self.train_step,
            'optimizer_steps': self.optimizer.steps,
            'queries': self.query_sampler.position,
            'order': self.order.tolist(),
            'answers': self.answers,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned; the caller then fills in the variables."""
        label_files.check_order(state['order'], self.num_train, self.hparams)
        self.train_step = state['step']
        self.order = np.array(state['order'])
        self.optimizer.start_at(state['optimizer_steps'])
        self.query_sampler.seek(state['queries'])


def train(hparams: HParams, comm: Comm | None = None) -> None:
    """Train a reward model and save it to SAVE_DIR/reward_model: `./launch.py train_reward`."""
    comm = session.connect(hparams, comm)
    with run_dir.lock_run_dir(hparams, comm):
        records = {run_files.REWARD.settings: run_settings.to_record(hparams)}
        train_in_run(hparams, comm, hparams.run, records, TimeLeft({'reward model': 1}))
    if comm.rank == 0:
        console.announce_reward_model(hparams.run.save_dir)


def train_in_run(
    hparams: HParams,
    comm: Comm,
    run: RunHParams,
    records: dict[str, dict],
    clock: TimeLeft,
) -> None:
    """Train a reward model in a run directory that is locked already; resumes what is there.

    run: settings of the command, of which this may be the first half. records: JSON files of the
    run by name, written before the first step. clock: of the command, with a phase 'reward model'.
    """
    console.dump(hparams)
    directory = None
    finished_dir = unfinished_dir = None  # of checkpoints
    if hparams.run.directory is not None:
        directory = storage.join(hparams.run.directory, run_files.REWARD.network)
        finished_dir = storage.join(hparams.run.directory, run_files.REWARD.finished)
        unfinished_dir = storage.join(hparams.run.directory, run_files.REWARD.unfinished)
    if run.resume and _is_finished(finished_dir, comm):
        if comm.rank == 0:
            log_line(f'The reward model in {directory} is finished')
            _delete_checkpoints(unfinished_dir)
        return
    is_whole_run = run is hparams.run
    prefix = '--' if is_whole_run else '--rewards.train_new_model.'
    with (
        memory.explain_oom(f'{prefix}micro_batch_size'),
        Checkpointer(
            unfinished_dir if run.save_dir else None,
            comm,
            resume=run.resume,
            schema=STATE,
            frozen_scopes=plans.REWARD_NETWORKS.frozen,
            max_to_keep=2,
            stop_timeout=run.stop_timeout,
        ) as checkpointer,
    ):
        session.check(
            hparams, comm, lambda sizes: plans.reward_memory(hparams, sizes, comm.size, prefix)
        )
        answers = recorded_answers(checkpointer.state)
        trainer = session.start(
            lambda initial_model: build_trainer(hparams, initial_model, comm, answers),
            hparams,
            checkpointer,
            comm,
            records=records,
            model_dir=run_files.REWARD.network,
        )
        if comm.rank == 0:
            if is_whole_run:
                console.show_start('train_reward', hparams, comm)
            log_line(*trainer.label_notes)
        trainer.prepare()
        training_loop(trainer, reward_hooks(trainer, checkpointer, run.on_anomaly, clock))
        trainer.finish()
    if comm.rank == 0 and finished_dir is not None:
        checkpoints.save(finished_dir, 'model.ckpt', trainer.tf_variables())
        _delete_checkpoints(unfinished_dir)


def _is_finished(directory: str | None, comm: Comm) -> bool:
    """Whether rank 0 sees a finished reward model's checkpoint in `directory`."""
    latest = checkpoints.latest(directory) if directory is not None else None
    return comm.all_gather_object(latest is not None)[0]


def _delete_checkpoints(directory: str | None) -> None:
    if directory is not None:
        shutil.rmtree(directory, ignore_errors=True)


def build_trainer(
    hparams: HParams,
    initial_model: TrainedModel,
    comm: Comm,
    answers: dict[str, int] | None = None,
) -> RewardModelTrainer:
    """The trainer of a run, whose reward model begins as `initial_model`, the same on all ranks.

    answers: see RewardModelTrainer; None: all that a folder has.
    """
    encoding = initial_model.encoding
    labels, label_notes = None, []
    source = hparams.labels.source
    if answers is None:
        answers = answers_so_far(source, comm)
    if source != 'mock':
        labels, label_notes = label_files.load_labels(hparams, encoding, answers)
    ref_policy = Policy(
        initial_model,
        scope='ref_policy',
        temperature=hparams.task.policy.temperature,
        embed_queries=lm_tasks.query_formatter(hparams.task, encoding.get_encoder()),
    )
    reward_model = RewardModel(initial_model)
    reward_model.model.gradient_checkpointing = hparams.run.gradient_checkpointing
    plans.REWARD_NETWORKS.broadcast({'reward_model': reward_model, 'ref_policy': ref_policy}, comm)
    if labels is None:
        labels = simulated.simulated_labels(hparams, ref_policy, comm)
    labels, held_out, split_notes = split(labels, hparams)
    query_sampler = lm_tasks.make_query_sampler(
        hparams=hparams.task,
        encoder=encoding.get_encoder(),
        comm=comm,
        labels=source,
        batch_size=exact_div(hparams.rollout_batch_size, comm.size),
    )
    return RewardModelTrainer(
        reward_model=reward_model,
        policy=ref_policy,
        labels=labels,
        held_out=held_out,
        label_notes=[*label_notes, *split_notes],
        answers=answers,
        hparams=hparams,
        comm=comm,
        query_sampler=query_sampler,
    )
