"""Fine-tuning a language model against a reward model by PPO (the original's train_policy.py;
paper, section 2.2)."""

import shlex
import tempfile
import time
from typing import Any

import numpy as np
import torch

from lm_human_preferences import label_types, lm_tasks, ppo, storage, train_reward
from lm_human_preferences.checkpointing.checkpointer import Checkpointer
from lm_human_preferences.checkpointing.checkpoints import COUNT
from lm_human_preferences.distributed import comm as comms
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.errors import UserError
from lm_human_preferences.evaluation import evaluate, measure
from lm_human_preferences.hparams.model import HParams as Sizes
from lm_human_preferences.hparams.train_policy import (
    AdaptiveKLParams,
    HParams,
    PpoHParams,
    RewardHParams,
)
from lm_human_preferences.language import trained_models
from lm_human_preferences.language.parameters import in_tf_shapes
from lm_human_preferences.policy import Policy
from lm_human_preferences.ppo import Minibatch, Rollout
from lm_human_preferences.rewards import (
    ScoreFn,
    TrainedRewardModel,
    get_reward_model,
    label_source,
    make_score_fn,
)
from lm_human_preferences.runs import run_dir, run_settings
from lm_human_preferences.synthetic.known_reward import MockRewardModel
from lm_human_preferences.training import console, health, memory, precision
from lm_human_preferences.training.micro_batches import map_micro_batches, micro_batches
from lm_human_preferences.training.optimizer import Adam
from lm_human_preferences.training.time_left import TimeLeft, as_text
from lm_human_preferences.utils import hyperparams
from lm_human_preferences.utils.core import ceil_div, default_device, exact_div
from lm_human_preferences.utils.logging import (
    Logger,
    announce,
    configure_console,
    console_is,
    progress,
    say_as_recorded,
)

__all__ = [
    'AdaptiveKLController',
    'AdaptiveKLParams',
    'FixedKLController',
    'HParams',
    'PPOTrainer',
    'PpoHParams',
    'RewardHParams',
    'make_score_fn',
    'nupdates',
    'train',
]

UNKNOWN_LABELS = 5000  # for the time left, where all labels of a file are trained on
STATE = {
    'step': COUNT,
    'kl_coef': float | int,
    'optimizer_steps': COUNT,
    'elapsed': float,
    'queries': (COUNT, COUNT),
    'initial_kl_coef': float | int,
}


def nupdates(hparams: HParams) -> int:
    """How many PPO steps `ppo.total_episodes` takes, rounded up."""
    return ceil_div(hparams.ppo.total_episodes, hparams.ppo.batch_size)


class FixedKLController:
    """A KL coefficient that stays."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current: float, n_steps: int) -> None:
        """Nothing to adapt."""


class AdaptiveKLController:
    """A KL coefficient that is steered so that the KL stays near a target (paper, section 2.2)."""

    def __init__(self, init_kl_coef: float, hparams: AdaptiveKLParams) -> None:
        self.value, self.hparams = init_kl_coef, hparams

    def update(self, current: float, n_steps: int) -> None:
        """current: KL in nats of the last step; n_steps: episodes that it took."""
        proportional_error = np.clip(current / self.hparams.target - 1, -0.2, 0.2)
        self.value *= float(1 + proportional_error * n_steps / self.hparams.horizon)


class PPOTrainer:
    """Trains a policy by PPO: `step` samples episodes, rewards them and learns from them.

    policy learns; ref_policy, rho in the paper, stays what the policy was at the beginning.
    query_sampler: see lm_tasks.make_query_sampler. score_fn: see rewards.make_score_fn.
    reward_model: what score_fn asks; it is saved with the policy.
    """

    def __init__(
        self,
        *,
        policy: Policy,
        ref_policy: Policy,
        query_sampler: lm_tasks.QuerySampler,
        score_fn: ScoreFn,
        hparams: HParams,
        comm: Comm,
        reward_model: MockRewardModel | TrainedRewardModel | None = None,
    ) -> None:
        self.policy = policy
        self.ref_policy = ref_policy
        self.reward_model = reward_model
        self.query_sampler = query_sampler
        self.score_fn = score_fn
        self.hparams = hparams
        self.comm = comm
        self.global_step = 0
        # Share of the last step's responses, see penalized_share; nothing before the first step.
        self.penalized: float | None = None
        self.start_time = self.last_time = time.time()
        self.kl_ctl: FixedKLController | AdaptiveKLController
        if hparams.rewards.adaptive_kl is None:
            self.kl_ctl = FixedKLController(hparams.rewards.kl_coef)
        else:
            self.kl_ctl = AdaptiveKLController(hparams.rewards.kl_coef, hparams.rewards.adaptive_kl)
        self.optimizer = Adam(policy.tf_parameters(), comm=comm)
        self.logger = Logger(
            hparams.run.directory, 'ppo', log_interval=hparams.run.log_interval, comm=comm
        )

    def step(self) -> dict[str, float]:
        """Sample ppo.batch_size episodes and learn from them; returns the logged statistics."""
        started = time.time()
        # x ~ D
        queries = self.query_sampler()['tokens'].to(self.policy.device)
        # y ~ pi(.|x), with log pi, V, log rho and r(x, y)
        rollout = self.generate(queries)
        # Equation 2: R = r - beta log(pi / rho)
        kl_coef = self.kl_ctl.value
        rollout.rewards, non_score_reward = ppo.compute_rewards(
            rollout.scores, rollout.logprobs, rollout.ref_logprobs, kl_coef
        )
        # Epochs of minibatches: whitening, GAE, clipped loss
        train_stats = self.train(rollout)

        stats = self.record_step_stats(
            rollout, kl_coef=kl_coef, non_score_reward=non_score_reward, train_stats=train_stats
        )
        # Section 2.2: an adaptive beta holds the KL divergence near its target
        self.kl_ctl.update(stats['objective/kl'], self.hparams.ppo.batch_size)
        self.penalized = self.penalized_share(rollout.responses)
        self._print_step(rollout, kl_coef, seconds=time.time() - started)
        self.global_step += 1
        return stats

    def generate(self, queries: torch.Tensor) -> Rollout:
        """Responses to `queries (batch, query_length)`, and all of the Rollout but its rewards."""
        return map_micro_batches(
            self._generate_micro_batch, self.hparams.ppo.micro_batch_size, queries
        )

    def _generate_micro_batch(self, queries: torch.Tensor) -> Rollout:
        sampled = self.policy.respond(queries, length=self.hparams.task.response_length)
        responses = sampled['responses']
        reference = self.ref_policy.analyze_responses(queries, responses)
        scores, scored_responses, _ = self.score_fn(queries, responses)
        return Rollout(
            queries=queries,
            responses=responses,
            logprobs=sampled['logprobs'],
            values=sampled['values'],
            ref_logprobs=reference['logprobs'],
            scores=scores,
            scored_responses=scored_responses,
        )

    def train(self, rollout: Rollout) -> dict[str, list[torch.Tensor]]:
        """`noptepochs` passes over this rank's episodes in minibatches, shuffled anew each time.

        Returns {statistic: [one scalar tensor per minibatch]}.
        """
        stats: dict[str, list[torch.Tensor]] = {}
        batch = len(rollout)
        minibatch = exact_div(batch, self.hparams.ppo.nminibatches)
        for _ in range(self.hparams.ppo.noptepochs):
            order = torch.from_numpy(np.random.permutation(batch))
            for rows in order.split(minibatch):
                for name, value in self.train_minibatch(rollout[rows]).items():
                    stats.setdefault(name, []).append(value)
        return stats

    def train_minibatch(self, rollout: Rollout) -> dict[str, torch.Tensor]:
        """One update of the policy on the episodes in `rollout`; returns the statistics before it.

        Micro-batches share the whitened advantages of all of them, so they only save memory.
        """
        minibatch = ppo.add_advantages(rollout, self.hparams.ppo)
        stats = ppo.return_stats(minibatch)
        parts = micro_batches(minibatch, self.hparams.ppo.micro_batch_size)
        self.optimizer.gradients.zero_grad()
        for part in parts:
            share = len(part) / len(minibatch)
            loss, part_stats = self.loss(part)
            self.optimizer.backward(share * loss, last=part is parts[-1])
            for name, value in part_stats.items():
                stats[name] = stats.get(name, 0) + share * value
        share_done = self.global_step / self.total_steps
        self.optimizer.update(lr=self.hparams.ppo.lr * (1 - share_done))
        return stats

    def loss(self, minibatch: Minibatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """(differentiable PPO loss of the policy as it is now, statistics), see ppo.loss."""
        outputs = self.policy.analyze_responses_op(minibatch.queries, minibatch.responses)
        return ppo.loss(minibatch, outputs, self.hparams.ppo)

    def record_step_stats(
        self,
        rollout: Rollout,
        *,
        kl_coef: float,
        non_score_reward: torch.Tensor,
        train_stats: dict[str, list[torch.Tensor]],
    ) -> dict[str, float]:
        """Log what this step did, averaged over ranks, under the original's names; returns it.

        non_score_reward: the KL penalty, (batch, response_length). train_stats: see `train`.
        """
        logprobs = rollout.logprobs
        score = rollout.scores.mean()
        stats = {
            'objective/kl': (logprobs - rollout.ref_logprobs).sum(1).mean(),
            'objective/kl_coef': torch.tensor(kl_coef),
            'objective/entropy': -logprobs.sum(1).mean(),
            'objective/score': score,
            'objective/score_total': score + non_score_reward.sum(1).mean(),
        }
        for name, values in train_stats.items():
            stats[f'ppo/{name}'] = torch.stack(values).mean()
        names = sorted(stats)
        on_device = torch.stack([stats[name].to(logprobs.device) for name in names])
        numbers = on_device.tolist()  # one wait for the device instead of one for each number
        means = self.comm.all_reduce_mean(dict(zip(names, numbers, strict=True)))
        means['ppo/val/var_explained'] = 1 - means['ppo/val/error'] / means['ppo/returns/var']
        means.update(self._elapsed())
        self.logger.log(means, self.global_step)
        return means

    def _elapsed(self) -> dict[str, float]:
        """How far the run is and how fast, in the original's units."""
        length = self.hparams.task.response_length
        batch_size = self.hparams.ppo.batch_size
        steps = self.global_step + 1
        now = time.time()
        seconds = max(now - self.last_time, 1e-9)
        self.last_time = now
        return {
            'elapsed/updates': steps,
            'elapsed/steps/serial': steps * length,
            'elapsed/steps/total': steps * batch_size * length,
            'elapsed/episodes': steps * batch_size,
            'elapsed/fps': int(batch_size * length / seconds),
            'elapsed/time': now - self.start_time,
        }

    def penalized_share(self, responses: torch.Tensor) -> float:
        """Share over all ranks of `responses (batch, response_length)` that score the penalty."""
        is_valid = lm_tasks.filter_fn_from_hparams(self.hparams.task)
        valid = is_valid(responses).float().mean().item()
        return 1 - self.comm.all_reduce_mean({'valid': valid})['valid']

    def _print_step(self, rollout: Rollout, kl_coef: float, seconds: float) -> None:
        """Show the first few episodes of a step that took `seconds`, and its speed."""
        if self.logger.active:
            kl = (rollout.logprobs - rollout.ref_logprobs).sum(1)
            console.show_samples(
                self.policy.encoder,
                (rollout.queries, rollout.scored_responses, rollout.scores, kl),
                step=self.global_step,
                total_steps=self.total_steps,
                is_logged=self.logger.is_due(self.global_step),
                kl_coef=kl_coef,
            )
            episodes_per_second = self.hparams.ppo.batch_size / seconds
            say_as_recorded(
                f'[ppo_step {self.global_step}] step_time={seconds:.2f}s, '
                f'eps/s={episodes_per_second:.2f}'
            )

    @property
    def steps_done(self) -> int:
        return self.global_step

    @property
    def total_steps(self) -> int:
        return nupdates(self.hparams)

    def tf_variables(self) -> dict[str, torch.Tensor]:
        """Everything that the original's checkpoint of this run holds, tensors by variable name."""
        assert self.reward_model is not None
        return in_tf_shapes(
            {
                **self.policy.tf_parameters(),
                **self.ref_policy.tf_parameters(),
                **self.reward_model.tf_parameters(),
                **self.optimizer.tf_slots('ppo_opt'),
                'global_step': torch.tensor(self.global_step),
                'start_time': torch.tensor(self.start_time, dtype=torch.float64),
                'last_time': torch.tensor(self.last_time, dtype=torch.float64),
            }
        )

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs besides the variables, as JSON."""
        return {
            'step': self.global_step,
            'kl_coef': self.kl_ctl.value,
            'optimizer_steps': self.optimizer.steps,
            'elapsed': self.last_time - self.start_time,
            'queries': self.query_sampler.position,
            'initial_kl_coef': self.hparams.rewards.kl_coef,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned; the caller then fills in the variables.

        The KL coefficient continues from its last value, unless the settings now name another
        initial one.
        """
        self.global_step = state['step']
        if self.hparams.rewards.kl_coef == state['initial_kl_coef']:
            self.kl_ctl.value = state['kl_coef']
        self.start_time = self.last_time - state['elapsed']
        self.optimizer.start_at(state['optimizer_steps'])
        self.query_sampler.seek(state['queries'])


def train_reward_model(hparams: HParams, comm: Comm, directory: str, clock: TimeLeft) -> None:
    """The first of both steps at once: train the reward model of `rewards.train_new_model` into
    `directory`.

    clock: of the whole command.
    """
    new_model = hparams.rewards.train_new_model
    assert new_model is not None
    for name, value in vars(hparams.task).items():
        if value != getattr(new_model.task, name):
            raise UserError(
                f'--task.{name} and --rewards.train_new_model.task.{name} must be the same: '
                f'{value} != {getattr(new_model.task, name)}'
            )
    new_model.run.save_dir, hparams.rewards.trained_model = (
        directory,
        storage.join(directory, 'reward_model'),
    )
    records = {
        'train_policy_hparams.json': run_settings.to_record(hparams),
        'train_reward_hparams.json': run_settings.to_record(new_model),
    }
    train_reward.train_in_run(new_model, comm, hparams.run, records, clock)
    comm.barrier()


def build_trainer(
    hparams: HParams,
    trained_model: trained_models.TrainedModel,
    comm: Comm,
) -> PPOTrainer:
    """The models and the trainer of a run: PPOTrainer."""
    encoder = trained_model.encoding.get_encoder()
    lm_tasks.check_task(hparams.task, trained_model.encoding, trained_model.hparams().n_ctx)
    settings: dict[str, Any] = dict(
        embed_queries=lm_tasks.query_formatter(hparams.task, encoder),
        temperature=hparams.task.policy.temperature,
    )
    ref_policy = Policy(trained_model, scope='ref_policy', **settings)
    policy = Policy(trained_model, scope='policy', **settings)
    policy.model.gradient_checkpointing = hparams.run.gradient_checkpointing
    name = hparams.rewards.trained_model
    is_ours = hparams.rewards.train_new_model is not None
    place = storage.staging_dir(name) if is_ours else name
    assert place is not None
    reward_model = get_reward_model(place, trained_model.encoding)
    comm.broadcast_(reward_model.get_params() + ref_policy.get_params() + policy.get_params())
    query_sampler = lm_tasks.make_query_sampler(
        hparams=hparams.task,
        encoder=encoder,
        comm=comm,
        labels=label_source(hparams),
        batch_size=exact_div(hparams.ppo.batch_size, comm.size),
    )
    return PPOTrainer(
        policy=policy,
        ref_policy=ref_policy,
        query_sampler=query_sampler,
        hparams=hparams,
        comm=comm,
        reward_model=reward_model,
        score_fn=make_score_fn(hparams.task, reward_model),
    )


def train(hparams: HParams, comm: Comm | None = None) -> None:
    """Fine-tune a policy and save it to SAVE_DIR/policy; the whole of `./launch.py
    train_policy`."""
    comm = comm or comms.init_comm(hparams.run.allreduce)
    configure_console(hparams.run.console)
    hparams.check_ranks(comm.size)
    save_dir, directory = hparams.run.save_dir, hparams.run.directory
    saved = directory and storage.join(directory, 'policy', 'checkpoints')
    wants_evaluation = bool(hparams.run.evaluate and save_dir)
    with run_dir.lock_run_dir(hparams, comm), memory.explain_oom('--ppo.micro_batch_size'):
        with Checkpointer(
            saved,
            comm,
            resume=hparams.run.resume,
            schema=STATE,
            frozen_scopes=['ref_policy', 'reward_model'],
        ) as checkpointer:
            if checkpointer.state and checkpointer.state['trainer']['step'] >= nupdates(hparams):
                checkpointer.make_latest()
                if comm.rank == 0:
                    announce(
                        f'The policy in {save_dir} is finished: {nupdates(hparams)} of'
                        f' {nupdates(hparams)} steps.'
                    )
                if wants_evaluation:
                    assert directory is not None
                    wants_evaluation = not evaluate.is_done(directory)
            else:
                _train_both(hparams, checkpointer, comm)
        try:
            if comm.rank == 0 and wants_evaluation:
                assert save_dir is not None
                evaluate.evaluate(save_dir, directory=directory)
        finally:  # an evaluation that cannot be written leaves the policy as it is
            if comm.rank == 0:
                _announce_end(hparams)


def _train_both(hparams: HParams, checkpointer: Checkpointer, comm: Comm) -> None:
    """Train the reward model, if a new one is asked for, and the policy."""
    check(hparams, comm)
    if comm.rank == 0:
        console.show_start('train_policy', hparams, comm)
    n_vocab = lm_tasks.initial_model(hparams.task.policy.initial_model).hparams().n_vocab
    clock = TimeLeft(work_left(hparams, n_vocab))
    with tempfile.TemporaryDirectory() as scratch:
        if hparams.rewards.train_new_model is not None:  # in scratch for a run that is not saved
            train_reward_model(
                hparams, comm, hparams.run.save_dir or comm.all_gather_object(scratch)[0], clock
            )
        trainer = start(hparams, checkpointer, comm)
    training_loop(trainer, checkpointer, comm, clock)


def check(hparams: HParams, comm: Comm) -> None:
    """UserError where the policy could not be trained: found before hours go into its reward
    model."""
    device = default_device()
    precision.check(hparams.run.precision, device)
    trained_model = lm_tasks.initial_model(hparams.task.policy.initial_model)
    sizes = trained_model.hparams()
    lm_tasks.check_task(hparams.task, trained_model.encoding, sizes.n_ctx)
    memory.check(memory_plan(hparams, sizes, comm.size), comm, device)


def work_left(hparams: HParams, n_vocab: int) -> dict[str, float]:
    """How much each phase of the command computes, in tokens that pass through a network once; see
    TimeLeft.

    A backward pass counts as two.
    """
    task, new_model = hparams.task, hparams.rewards.train_new_model
    tokens = task.query_length + task.response_length
    phases: dict[str, float] = {}
    if new_model is not None:
        responses = len(label_types.get(new_model.labels.type).samples)
        row = task.query_length + responses * task.response_length
        phases['reward model'] = 3 * row * (new_model.labels.num_train or UNKNOWN_LABELS)
    passes = (
        3 + 3 * hparams.ppo.noptepochs
    )  # the policy's sampling, the reference, the reward; the epochs
    phases['policy'] = passes * tokens * nupdates(hparams) * hparams.ppo.batch_size
    if hparams.run.evaluate and hparams.run.save_dir:
        phases['evaluation'] = measure.tokens_to_compute(task, n_vocab)
    return phases


def _announce_end(hparams: HParams) -> None:
    """Say what there is now, and what can be done with it."""
    save_dir = hparams.run.save_dir
    if save_dir is None:
        console.announce_next('Nothing was saved, because --save_dir is None.')
        return
    path = shlex.quote(save_dir)
    commands = {'sample_from_it': f'./sample.py sample --save_dir {path} --nsamples 8'}
    if not hparams.run.evaluate:
        commands['evaluate_it'] = f'./launch.py evaluate {path}'
    commands['look_at_its_curves'] = (
        f'tensorboard --logdir {shlex.quote(storage.join(save_dir, "tb"))}'
    )
    console.announce_next(f'The policy is in {storage.join(save_dir, "policy")}', **commands)


def start(hparams: HParams, checkpointer: Checkpointer, comm: Comm) -> PPOTrainer:
    """The PPOTrainer of a run, where the run begins or goes on; writes what is known of the run by
    then."""
    if console_is('original'):
        hyperparams.dump(hparams)
    precision.configure(hparams.run.precision, default_device())
    checkpointer.set_seed(hparams.run.seed)
    trained_model = lm_tasks.initial_model(hparams.task.policy.initial_model)
    if console_is('original'):
        hyperparams.dump(trained_model.hparams(), name='model_hparams')
    trainer = build_trainer(hparams, trained_model, comm)
    checkpointer.restore(trainer, saves=ceil_div(nupdates(hparams), hparams.run.save_interval))
    comm.barrier()
    directory = hparams.run.directory
    if directory and comm.rank == 0:
        say_as_recorded(f'Will save to {hparams.run.save_dir}')
        storage.write_json(
            storage.join(directory, 'train_policy_hparams.json'), run_settings.to_record(hparams)
        )
        trained_model.write_files(storage.join(directory, 'policy'))
    return trainer


def memory_plan(hparams: HParams, sizes: Sizes, ranks: int) -> memory.MemoryEstimate:
    """What takes memory in a step, for networks of `sizes`: memory.MemoryEstimate."""
    task, rows = hparams.task, exact_div(hparams.ppo.batch_size, ranks)
    tokens = task.query_length + task.response_length
    return memory.MemoryEstimate(
        sizes,
        networks=2 if hparams.rewards.trained_model == 'mock' else 3,
        rows=rows // hparams.ppo.nminibatches,
        tokens=tokens,
        predicted=task.response_length,
        sampled_rows=rows,
        sampled_tokens=tokens,
        micro_batch_size=hparams.ppo.micro_batch_size,
        option='--ppo.micro_batch_size',
        gradient_checkpointing=hparams.run.gradient_checkpointing,
        reduced=hparams.run.precision == 'bf16',
        batch_options=('--ppo.batch_size', '--ppo.batch_size'),
    )


def training_loop(
    trainer: PPOTrainer, checkpointer: Checkpointer, comm: Comm, clock: TimeLeft | None = None
) -> None:
    """Take all steps that are left, saving every `save_interval` of them and at the end, also if
    that is an error.

    clock: of the whole command, which has a phase 'policy'.
    """
    hparams, steps, batch_size = (
        trainer.hparams,
        nupdates(trainer.hparams),
        trainer.hparams.ppo.batch_size,
    )
    clock = clock or TimeLeft({'policy': 1})
    clock.begin('policy', trainer.global_step / steps)
    table = console.policy_table()
    bar = progress(
        total=steps * batch_size,
        initial=trainer.global_step * batch_size,
        comm=comm,
        desc='policy',
        unit='episode',
    )
    health_monitor = health.HealthMonitor(hparams.run.on_anomaly, comm)
    try:
        with checkpointer.defer_signals():
            while trainer.global_step < steps:
                stats = trainer.step()
                bar.set_postfix(
                    score=f'{stats["objective/score"]:.2f}',
                    kl=f'{stats["objective/kl"]:.2f}',
                    refresh=False,
                )
                bar.update(batch_size)
                if comm.rank == 0 and console.is_due(
                    trainer.global_step, steps, hparams.run.log_interval
                ):
                    _add_line(table, trainer.global_step, stats, clock, hparams)
                health_monitor.first = health_monitor.first or stats
                assert trainer.penalized is not None
                alarms = health.policy_alarms(
                    {**stats, health.PENALIZED: trainer.penalized}, health_monitor.first, hparams
                )
                health_monitor.report(alarms, trainer, checkpointer)
                checkpointer.after_step(trainer)
                if (
                    trainer.global_step % hparams.run.save_interval == 0
                    or trainer.global_step == steps
                ):
                    checkpointer.save(trainer)
    except BaseException:
        checkpointer.save_on_error(trainer)
        raise
    finally:
        bar.close()
        trainer.logger.close()


def _add_line(
    table: console.Table, step: int, stats: dict[str, float], clock: TimeLeft, hparams: HParams
) -> None:
    """Add what is known after `step` steps to the table; stats: of the last one."""
    steps, batch_size = nupdates(hparams), hparams.ppo.batch_size
    share = step / steps
    table.add(
        step=f'{step}/{steps}',
        episodes=step * batch_size,
        score=stats['objective/score'],
        KL=stats['objective/kl'],
        KL_coef=stats['objective/kl_coef'],
        loss=stats['ppo/loss/total'],
        episodes_per_second=clock.per_second(share, steps * batch_size),
        time_left=as_text(clock.seconds(share)),
    )
