"""Training a reward model from human labels (the original's train_reward.py; paper, section
2.1)."""

import functools
import shlex
import shutil
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from lm_human_preferences import label_types, lm_tasks, rewards, storage
from lm_human_preferences.checkpointing import checkpoints
from lm_human_preferences.checkpointing.checkpointer import Checkpointer
from lm_human_preferences.checkpointing.checkpoints import COUNT
from lm_human_preferences.distributed import comm as comms
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.model import HParams as Sizes
from lm_human_preferences.hparams.train_reward import HParams, LabelHParams, RunHParams
from lm_human_preferences.labels import files as label_files
from lm_human_preferences.labels import simulated
from lm_human_preferences.language import trained_models
from lm_human_preferences.language.parameters import in_tf_shapes
from lm_human_preferences.policy import Policy
from lm_human_preferences.runs import run_dir, run_files, run_settings
from lm_human_preferences.training import console, health, memory, precision
from lm_human_preferences.training.micro_batches import map_micro_batches
from lm_human_preferences.training.optimizer import Adam
from lm_human_preferences.training.time_left import TimeLeft, as_text
from lm_human_preferences.utils import hyperparams
from lm_human_preferences.utils.core import ceil_div, default_device, exact_div
from lm_human_preferences.utils.logging import (
    Logger,
    announce,
    configure_console,
    console_is,
    log_line,
    progress,
    say_as_recorded,
)

__all__ = ['HParams', 'LabelHParams', 'RewardModelTrainer', 'RunHParams', 'train']

STATE = {'step': COUNT, 'optimizer_steps': COUNT, 'order': [COUNT], 'queries': (COUNT, COUNT)}


def mean_and_std(values: np.ndarray | torch.Tensor) -> tuple[float, float]:
    """Mean and standard deviation of `values`, in two passes and float64 so that a large mean costs
    no digits."""
    values = np.asarray(values, np.float64)
    return float(values.mean()), float(values.std())


class RewardModelTrainer:
    """One epoch over the labels, with the rewards normalised before and after.

    policy: the fixed initial policy, whose samples set the scale. query_sampler: see
    lm_tasks.make_query_sampler. labels: {field: tensor (num_train, ...)}, the same on every rank.
    """

    def __init__(
        self,
        *,
        reward_model: rewards.RewardModel,
        policy: Policy,
        query_sampler: lm_tasks.QuerySampler,
        labels: dict[str, torch.Tensor],
        hparams: HParams,
        comm: Comm,
    ) -> None:
        self.reward_model, self.policy, self.query_sampler = reward_model, policy, query_sampler
        self.labels, self.label_type = labels, label_types.get(hparams.labels.type)
        self.num_train = len(labels['query'])
        self.hparams, self.comm, self.train_step = hparams, comm, 0
        self.order: np.ndarray | None = None  # of the labels, once it is drawn
        # Of each batch before it was learned: how far its rewards agreed with its labels, and its
        # loss.
        self.agreements: list[float] = []
        self.losses: list[float] = []
        self.optimizer = Adam(reward_model.tf_parameters(), comm=comm)
        self.logger = Logger(
            hparams.run.directory,
            'reward_model',
            log_interval=hparams.run.log_interval,
            comm=comm,
            tag_prefix='train_reward/minibatch/',
        )

    def train(
        self, checkpointer: Checkpointer, mode: str = 'warn', clock: TimeLeft | None = None
    ) -> None:
        """Normalise, train on every label once, normalise again; or what is left of that.

        mode: of --run.on_anomaly. clock: of the whole command, which has a phase 'reward model'.
        """
        if self.order is None:
            self._warn_of_idle_normalization()
            if self.hparams.normalize_before:
                self.normalize(*self.target_mean_std())
            # Every rank draws, rank 0's order counts: each label is trained on exactly once.
            self.order = self.comm.all_gather_object(np.random.permutation(self.num_train))[0]
        self._train_epoch(
            checkpointer,
            health.HealthMonitor(mode, self.comm),
            clock or TimeLeft({'reward model': 1}),
        )
        if self.hparams.normalize_after:
            self.normalize(0.0, 1.0)
        self.logger.close()

    def _train_epoch(
        self, checkpointer: Checkpointer, health_monitor: health.HealthMonitor, clock: TimeLeft
    ) -> None:
        assert self.order is not None
        batch_size = self.hparams.batch_size
        steps = self.num_train // batch_size
        say_as_recorded(
            f'{self.comm.rank} training on {self.num_train} in batches of '
            f'{exact_div(batch_size, self.comm.size)}'
        )
        guessing_loss = self.label_type.guessing_loss(self.labels)
        table = console.reward_table()
        shown = 0  # losses that the lines of the table have averaged so far
        bar = progress(
            total=steps, initial=self.train_step, comm=self.comm, desc='reward model', unit='batch'
        )
        clock.begin('reward model', self.train_step / steps)
        with bar, checkpointer.defer_signals():
            while self.train_step < steps:
                start = self.train_step * batch_size
                indices = self.order[start : start + batch_size][self.comm.rank :: self.comm.size]
                stats = self.train_batch(indices, lr=(1 - start / self.num_train) * self.hparams.lr)
                bar.set_postfix(loss=f'{stats["loss"]:.3f}', refresh=False)
                bar.update()
                if self.comm.rank == 0 and console.is_due(
                    self.train_step, steps, self.hparams.run.log_interval
                ):
                    recent = self.losses[shown:]
                    shown = len(self.losses)
                    share = self.train_step / steps
                    table.add(
                        step=f'{self.train_step}/{steps}',
                        labels=self.train_step * batch_size,
                        loss=sum(recent) / len(recent),
                        labels_per_second=clock.per_second(share, self.num_train),
                        time_left=as_text(clock.seconds(share)),
                    )
                health_monitor.report(self._alarms(stats, steps, guessing_loss), self, checkpointer)
                checkpointer.after_step(self)
                if self.train_step % self.hparams.run.save_interval == 0:
                    checkpointer.save(self)

    def _alarms(
        self, stats: dict[str, float], steps: int, guessing_loss: float
    ) -> list[health.Alarm]:
        """The alarms of the last step; those about the outcome come with the last of all
        `steps`."""
        is_last = self.train_step == steps
        count = len(self.losses)  # of this process: what came before an interruption is not known
        quarter = slice(-(count // 4 or count), None) if is_last else slice(0)
        return health.reward_alarms(
            stats,
            self.agreements[quarter],
            self.losses[quarter],
            batch_size=self.hparams.batch_size,
            guessing_loss=guessing_loss,
        )

    def train_batch(self, indices: np.ndarray, lr: float) -> dict[str, float]:
        """One update on the labels at `indices` (batch / ranks,); returns and logs the statistics
        before it."""
        batch = {field: values[torch.as_tensor(indices)] for field, values in self.labels.items()}
        responses = torch.stack([batch[sample] for sample in self.label_type.samples], dim=1)
        rewards = self._differentiable_rewards(batch['query'], responses)
        stats = self.label_type.loss_of(rewards, batch)
        self.optimizer.minimize(stats['loss'], lr)
        agreement = self.label_type.agreement(rewards.detach().cpu(), batch)
        stats = self.comm.all_reduce_mean(
            {name: stat.item() for name, stat in sorted({**stats, 'agreement': agreement}.items())}
        )
        self.agreements.append(stats.pop('agreement'))
        self.losses.append(stats['loss'])
        self.logger.log(stats, self.train_step)
        self.train_step += 1
        return stats

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

    def _warn_of_idle_normalization(self) -> None:
        asked = [
            f'--{name}'
            for name in ('normalize_before', 'normalize_after')
            if getattr(self.hparams, name)
        ]
        if asked and not self.hparams.normalize_samples and self.comm.rank == 0:
            announce(f'WARNING: {" and ".join(asked)} without effect: --normalize_samples is 0')

    def normalize(self, target_mean: float, target_std: float) -> None:
        """Set gain and bias so that rewards of the initial policy's samples have the target mean
        and deviation."""
        if not self.hparams.normalize_samples:
            return
        self.reward_model.reset_reward_scale()
        mean, std = self.sampled_mean_std(self.hparams.normalize_samples)
        if self.comm.rank == 0:
            say_as_recorded(
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
        """The scale that rewards should have before training: that of the labels where they tell
        one, else 0 +- 1."""
        scales = self.label_type.target_scales(self.labels)
        return (0.0, 1.0) if scales is None else mean_and_std(scales)

    def sampled_mean_std(self, n_samples: int) -> tuple[float, float]:
        """Mean and deviation of the rewards of `n_samples` over all ranks, rounded up to whole
        batches."""
        batches = [
            self.sampled_rewards()
            for _ in range(ceil_div(n_samples, self.hparams.rollout_batch_size))
        ]
        return mean_and_std(
            np.concatenate(self.comm.all_gather_object(torch.cat(batches).cpu().numpy()))
        )

    def sampled_rewards(self) -> torch.Tensor:
        """Rewards of rollout_batch_size / ranks responses of the initial policy: (responses,)."""
        queries = self.query_sampler()['tokens']
        return map_micro_batches(self._sample_and_score, self.hparams.micro_batch_size, queries)

    def _sample_and_score(self, queries: torch.Tensor) -> torch.Tensor:
        sampled = self.policy.respond(queries, length=self.hparams.task.response_length)
        return self.reward_model.get_rewards(queries, sampled['responses'])

    def tf_variables(self) -> dict[str, torch.Tensor]:
        """Everything that the original's checkpoint of this run holds, tensors by variable name."""
        return in_tf_shapes(
            {
                **self.policy.tf_parameters(),
                **self.reward_model.tf_parameters(),
                **self.optimizer.tf_slots('train_reward/minibatch/opt'),
                'global_step': torch.tensor(0),
                'train_step': torch.tensor(self.train_step),
            }
        )

    def state_dict(self) -> dict[str, Any]:
        """What else has to be kept to go on from here, as JSON."""
        assert self.order is not None
        return {
            'step': self.train_step,
            'optimizer_steps': self.optimizer.steps,
            'queries': self.query_sampler.position,
            'order': self.order.tolist(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned; the variables are filled in afterwards."""
        if sorted(state['order']) != list(range(self.num_train)):
            raise UserError(
                f'the run was begun with {len(state["order"])} labels, not {self.num_train}: name'
                ' them as before, or begin again with --overwrite'
            )
        self.train_step, self.order = state['step'], np.array(state['order'])
        self.optimizer.start_at(state['optimizer_steps'])
        self.query_sampler.seek(state['queries'])


def train(hparams: HParams, comm: Comm | None = None) -> None:
    """Train a reward model and save it to SAVE_DIR/reward_model; the whole of `./launch.py
    train_reward`."""
    comm = comm or comms.init_comm(hparams.run.allreduce)
    configure_console(hparams.run.console)
    hparams.check_ranks(comm.size)
    with run_dir.lock_run_dir(hparams, comm):
        records = {'train_reward_hparams.json': run_settings.to_record(hparams)}
        train_in_run(hparams, comm, hparams.run, records, TimeLeft({'reward model': 1}))
    if comm.rank == 0:
        _announce_end(hparams.run.save_dir)


def _announce_end(save_dir: str | None) -> None:
    if save_dir is None:
        console.announce_next('Nothing was saved, because --save_dir is None.')
        return
    path = shlex.quote(save_dir)
    console.announce_next(
        f'The reward model is in {storage.join(save_dir, "reward_model")}',
        train_a_policy=(
            './launch.py train_policy EXPERIMENT NAME --rewards.train_new_model off '
            f'--rewards.trained_model {path}'
        ),
        look_at_its_curves=f'tensorboard --logdir {shlex.quote(storage.join(save_dir, "tb"))}',
    )


def train_in_run(
    hparams: HParams,
    comm: Comm,
    run: RunHParams,
    records: dict[str, dict],
    clock: TimeLeft,
) -> None:
    """The training itself, in a directory that is held; what was done before `run` was interrupted
    stays.

    records: JSON files of the run by name, written when all is ready. clock: of the whole command.
    """
    is_whole_run = run is hparams.run
    if console_is('original'):
        hyperparams.dump(hparams)
    run_directory = hparams.run.directory
    directory = storage.join(run_directory, 'reward_model') if run_directory else None
    saved, unfinished = (
        directory and storage.join(directory, name)
        for name in ('checkpoints', run_files.UNFINISHED)
    )
    if comm.all_gather_object(run.resume and saved and checkpoints.latest(saved))[0]:
        if comm.rank == 0:
            assert unfinished is not None
            log_line(f'The reward model in {directory} is finished')
            shutil.rmtree(unfinished, ignore_errors=True)
        return
    prefix = '--' if is_whole_run else '--rewards.train_new_model.'
    with (
        memory.explain_oom(f'{prefix}micro_batch_size'),
        Checkpointer(
            unfinished if run.save_dir else None,
            comm,
            resume=run.resume,
            schema=STATE,
            frozen_scopes=['ref_policy'],
            max_to_keep=2,
        ) as checkpointer,
    ):
        precision.configure(hparams.run.precision, default_device())
        checkpointer.set_seed(hparams.run.seed)
        trained_model = lm_tasks.initial_model(hparams.task.policy.initial_model)
        if console_is('original'):
            hyperparams.dump(trained_model.hparams(), name='model_hparams')
        sizes = trained_model.hparams()
        lm_tasks.check_task(hparams.task, trained_model.encoding, sizes.n_ctx)
        memory.check(memory_plan(hparams, sizes, comm.size, prefix), comm, default_device())
        trainer, notes = build_trainer(hparams, trained_model, comm)
        checkpointer.restore(
            trainer, saves=1 + trainer.num_train // hparams.batch_size // hparams.run.save_interval
        )
        if comm.rank == 0:
            if directory:
                assert run_directory is not None
                say_as_recorded(f'Will save to {hparams.run.save_dir}')
                for name, record in records.items():
                    storage.write_json(storage.join(run_directory, name), record)
                trained_model.write_files(directory)
            if is_whole_run:
                console.show_start('train_reward', hparams, comm)
            log_line(*notes)
        trainer.train(checkpointer, run.on_anomaly, clock)
    if comm.rank == 0 and directory:
        assert saved is not None and unfinished is not None
        checkpoints.save(saved, 'model.ckpt', trainer.tf_variables())
        shutil.rmtree(unfinished, ignore_errors=True)


def memory_plan(
    hparams: HParams,
    sizes: Sizes,
    ranks: int,
    prefix: str = '--',
) -> memory.MemoryEstimate:
    """What takes memory in a step, for networks of `sizes`: memory.MemoryEstimate; prefix: of these
    options' names."""
    task, responses = hparams.task, len(label_types.get(hparams.labels.type).samples)
    return memory.MemoryEstimate(
        sizes,
        networks=2,
        rows=exact_div(hparams.batch_size, ranks),
        tokens=task.query_length + responses * task.response_length,
        sampled_rows=exact_div(hparams.rollout_batch_size, ranks),
        sampled_tokens=task.query_length + task.response_length,
        micro_batch_size=hparams.micro_batch_size,
        option=f'{prefix}micro_batch_size',
        batch_options=(f'{prefix}batch_size', f'{prefix}rollout_batch_size'),
        gradient_checkpointing=hparams.run.gradient_checkpointing,
        reduced=hparams.run.precision == 'bf16',
    )


def build_trainer(
    hparams: HParams,
    trained_model: trained_models.TrainedModel,
    comm: Comm,
) -> tuple[RewardModelTrainer, list[str]]:
    """The models and the trainer of a run: (RewardModelTrainer, what is to be said of the
    labels)."""
    encoder = trained_model.encoding.get_encoder()
    is_mock = hparams.labels.source == 'mock'
    labels, notes = (
        (None, []) if is_mock else label_files.load_labels(hparams, trained_model.encoding)
    )
    ref_policy = Policy(
        trained_model,
        scope='ref_policy',
        temperature=hparams.task.policy.temperature,
        embed_queries=lm_tasks.query_formatter(hparams.task, encoder),
    )
    reward_model = rewards.RewardModel(trained_model)
    reward_model.model.gradient_checkpointing = hparams.run.gradient_checkpointing
    comm.broadcast_(ref_policy.get_params() + reward_model.get_params())
    if is_mock:
        labels = simulated.simulated_labels(hparams, ref_policy, comm)
    assert labels is not None
    query_sampler = lm_tasks.make_query_sampler(
        hparams=hparams.task,
        encoder=encoder,
        comm=comm,
        labels=hparams.labels.source,
        batch_size=exact_div(hparams.rollout_batch_size, comm.size),
    )
    return (
        RewardModelTrainer(
            reward_model=reward_model,
            policy=ref_policy,
            labels=labels,
            hparams=hparams,
            comm=comm,
            query_sampler=query_sampler,
        ),
        notes,
    )
