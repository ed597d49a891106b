"""Fine-tuning a language model by PPO (the original's train_policy.py; paper, section 2.2)."""

import time
from typing import Any

import numpy as np
import torch

from lm_human_preferences import (
    lm_tasks,
    plans,
    ppo,
    rewards,
    session,
    storage,
    tracked_samples,
    train_reward,
)
from lm_human_preferences.checkpointing.checkpointer import Checkpointer
from lm_human_preferences.checkpointing.checkpoints import COUNT
from lm_human_preferences.checkpointing.variables import VariableNames
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.evaluation import evaluate
from lm_human_preferences.hparams.policy_options import (
    AdaptiveKLParams,
    HParams,
    PpoHParams,
    RewardHParams,
)
from lm_human_preferences.language import tokenisers
from lm_human_preferences.language.trained_models import TrainedModel
from lm_human_preferences.online import collection
from lm_human_preferences.policy import Policy
from lm_human_preferences.ppo import Rollout
from lm_human_preferences.reward_models.places import label_source
from lm_human_preferences.rewards import ScoreFn, ScoringModel, make_score_fn
from lm_human_preferences.runs import reward_function, run_dir, run_files, run_settings
from lm_human_preferences.training import console, kl_control, memory
from lm_human_preferences.training.hooks import policy_hooks
from lm_human_preferences.training.kl_control import AdaptiveKLController, FixedKLController
from lm_human_preferences.training.loop import training_loop
from lm_human_preferences.training.micro_batches import concatenate, micro_batches
from lm_human_preferences.training.optimizer import Adam
from lm_human_preferences.training.time_left import TimeLeft, elapsed_stats
from lm_human_preferences.utils.core import as_numbers, exact_div
from lm_human_preferences.utils.logging import Logger, announce

__all__ = [
    'AdaptiveKLController',
    'AdaptiveKLParams',
    'FixedKLController',
    'HParams',
    'PPOTrainer',
    'PpoHParams',
    'RewardHParams',
    'make_score_fn',
    'train',
]

# What PPOTrainer.state_dict returns, for checkpoints.matches_schema
STATE = {
    'step': COUNT,
    'kl_coef': float | int,
    'optimizer_steps': COUNT,
    'elapsed': float,
    'queries': (COUNT, COUNT),
    'initial_kl_coef': float | int,
}


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
        reward_model: ScoringModel | None = None,
    ) -> None:
        self.policy = policy
        self.ref_policy = ref_policy
        self.query_sampler = query_sampler
        self.score_fn = score_fn
        self.hparams = hparams
        self.comm = comm
        self.global_step = 0
        self.rollout: Rollout | None = None  # of the last step
        self.step_seconds = 0.0  # that it took
        self.reward_version = 0  # how often this process has retrained the reward model
        self.start_time = self.last_time = time.time()
        self.kl_ctl = kl_control.make_kl_controller(hparams.rewards)
        self.networks = dict(
            policy=policy, ref_policy=ref_policy, **rewards.networks_of(reward_model)
        )
        learning = plans.policy_networks(hparams).learning_parameters(self.networks)
        self.optimizer = Adam(learning, comm=comm)
        run = hparams.run
        self.logger = Logger(run.directory, 'ppo', log_interval=run.log_interval, comm=comm)

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
        self.rollout = rollout
        self.step_seconds = time.time() - started
        self.global_step += 1
        return stats

    def generate(self, queries: torch.Tensor) -> Rollout:
        """Responses to `queries (batch, query_length)`, and all of the Rollout but its rewards."""
        parts = micro_batches(queries, self.hparams.ppo.micro_batch_size)
        return concatenate([self._generate_micro_batch(part) for part in parts])

    def _generate_micro_batch(self, queries: torch.Tensor) -> Rollout:
        sampled = self.policy.respond(queries, length=self.hparams.task.response_length)
        responses = sampled['responses']
        reference = self.ref_policy.analyze_responses(queries, responses)
        scores, scored_responses, stats = self.score_fn(queries, responses)
        return Rollout(
            queries=queries,
            responses=responses,
            logprobs=sampled['logprobs'],
            values=sampled['values'],
            ref_logprobs=reference['logprobs'],
            scores=scores,
            scored_responses=scored_responses,
            score_std=stats.get('score_std'),
        )

    def train(self, rollout: Rollout) -> dict[str, list[torch.Tensor]]:
        """`noptepochs` passes over this rank's episodes in minibatches, reshuffled each time.

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
            outputs = self.policy.analyze_responses_op(part.queries, part.responses)
            loss, part_stats = ppo.loss(part, outputs, self.hparams.ppo)
            self.optimizer.backward(share * loss, last=part is parts[-1])
            for name, value in part_stats.items():
                stats[name] = stats.get(name, 0) + share * value
        share_done = self.global_step / self.total_steps
        self.optimizer.update(lr=self.hparams.ppo.lr * (1 - share_done))
        return stats

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
        stats = ppo.step_stats(rollout, kl_coef, non_score_reward, train_stats)
        means = self.comm.all_reduce_mean(as_numbers(stats))
        means['ppo/val/var_explained'] = 1 - means['ppo/val/error'] / means['ppo/returns/var']
        now = time.time()
        means |= elapsed_stats(
            self.hparams, self.global_step + 1, now - self.last_time, now - self.start_time
        )
        self.last_time = now
        self.logger.log(means, self.global_step)
        return means

    @property
    def steps_done(self) -> int:
        """Steps that have been taken, before an interruption too."""
        return self.global_step

    @property
    def total_steps(self) -> int:
        """Steps of the whole training."""
        return self.hparams.ppo.nupdates

    @property
    def planned_saves(self) -> int:
        """How many checkpoints the whole training writes."""
        return plans.policy_saves(self.hparams)

    @property
    def variable_names(self) -> VariableNames:
        """What checkpoints call `tensors`."""
        return self.policy.model.variable_names

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a checkpoint holds: parameters of all networks, Adam's moments, counts and times."""
        return {
            **plans.policy_networks(self.hparams).parameters(self.networks),
            **self.optimizer.moments(),
            'ppo/optimizer_steps': torch.tensor(self.optimizer.steps),
            'ppo/step': torch.tensor(self.global_step),
            'ppo/start_time': torch.tensor(self.start_time, dtype=torch.float64),
            'ppo/last_time': torch.tensor(self.last_time, dtype=torch.float64),
        }

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs besides the tensors, as JSON."""
        return {
            'step': self.global_step,
            'kl_coef': self.kl_ctl.value,
            'optimizer_steps': self.optimizer.steps,
            'elapsed': self.last_time - self.start_time,
            'queries': self.query_sampler.position,
            'initial_kl_coef': self.hparams.rewards.kl_coef,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned; the caller then fills in the tensors."""
        self.global_step = state['step']
        # A resumed run may have been given another initial coefficient, which then counts.
        if self.hparams.rewards.kl_coef == state['initial_kl_coef']:
            self.kl_ctl.value = state['kl_coef']
        self.start_time = self.last_time - state['elapsed']
        self.optimizer.start_at(state['optimizer_steps'])
        self.query_sampler.seek(state['queries'])


def build_trainer(
    hparams: HParams,
    initial_model: TrainedModel,
    comm: Comm,
    function: reward_function.Source | None = None,
) -> PPOTrainer:
    """The trainer of a run, whose policy begins as `initial_model`, the same on all ranks.

    function: the reward, where it is a function of the user's.
    """
    encoding = initial_model.encoding
    encoder = encoding.get_encoder()
    settings: dict[str, Any] = dict(
        embed_queries=lm_tasks.query_formatter(hparams.task, encoder),
        temperature=hparams.task.policy.temperature,
    )
    ref_policy = Policy(initial_model, scope='ref_policy', **settings)
    policy = Policy(initial_model, scope='policy', **settings)
    policy.model.gradient_checkpointing = hparams.run.gradient_checkpointing
    reward_model = rewards.scoring_model(hparams, initial_model, comm, function)
    query_sampler = lm_tasks.make_query_sampler(
        hparams=hparams.task,
        encoder=encoder,
        comm=comm,
        labels=label_source(hparams),
        batch_size=exact_div(hparams.ppo.batch_size, comm.size),
    )
    trainer = PPOTrainer(
        policy=policy,
        ref_policy=ref_policy,
        query_sampler=query_sampler,
        hparams=hparams,
        comm=comm,
        reward_model=reward_model,
        score_fn=make_score_fn(hparams.task, reward_model),
    )
    plans.policy_networks(hparams).broadcast(trainer.networks, comm)
    return trainer


def train(hparams: HParams, comm: Comm | None = None, experiment: str | None = None) -> None:
    """Fine-tune a policy and save it to SAVE_DIR/policy: all of `./launch.py train_policy`.

    experiment: that the hyperparameters are of, for the record.
    """
    comm = session.connect(hparams, comm)
    with run_dir.lock_run_dir(hparams, comm), memory.explain_oom('--ppo.micro_batch_size'):
        has_trained = _train_unless_finished(hparams, comm, experiment)
        if comm.rank != 0:
            return
        try:
            if hparams.run.evaluate:
                evaluate.after_training(hparams, has_trained=has_trained)
        finally:  # the policy is there even if its evaluation cannot be written
            console.announce_policy(hparams)


def _train_unless_finished(hparams: HParams, comm: Comm, experiment: str | None) -> bool:
    """Train what this run still lacks; returns False if it had been finished before."""
    directory = hparams.run.directory
    steps = hparams.ppo.nupdates
    with Checkpointer(
        directory and storage.join(directory, run_files.POLICY.unfinished),
        comm,
        resume=hparams.run.resume,
        schema=STATE,
        frozen_scopes=plans.policy_networks(hparams).frozen,
        stop_timeout=hparams.run.stop_timeout,
    ) as checkpointer:
        is_finished = bool(checkpointer.state) and checkpointer.state['trainer']['step'] >= steps
        if not is_finished:
            _train_both(hparams, checkpointer, comm, experiment)
            return True
        checkpointer.make_latest()
    if comm.rank == 0:
        announce(f'The policy in {hparams.run.save_dir} is finished: {steps} of {steps} steps.')
    return False


def _train_both(
    hparams: HParams, checkpointer: Checkpointer, comm: Comm, experiment: str | None
) -> None:
    """Train the reward model, if a new one is asked for, and the policy."""
    session.pin(hparams, comm)
    session.show_precision_notes(hparams, comm)
    # Also what only the policy needs: before hours go into its reward model.
    sizes = session.check(
        hparams, comm, lambda sizes: plans.policy_plans(hparams, sizes, comm.size)
    )
    if comm.rank == 0:
        plans.check_disk_space(hparams, sizes)
        console.show_start('train_policy', hparams, comm)
        session.show_queries(hparams)
    clock = TimeLeft(plans.work_left(hparams, sizes.n_vocab))
    with session.saved_or_scratch(hparams.run.save_dir, comm) as directory:
        if run_files.REWARD.command in hparams.writes():
            hparams = train_reward.with_reward_model_in(directory, hparams)
            train_reward.train_for_policy(hparams, comm, clock, experiment)
        trainer = start(hparams, checkpointer, comm, experiment)
    take_steps(trainer, checkpointer, clock)


def start(
    hparams: HParams, checkpointer: Checkpointer, comm: Comm, experiment: str | None = None
) -> PPOTrainer:
    """The trainer of a run before its next step; see session.start. experiment: see `train`."""
    console.dump(hparams)
    function = rewards.function_of_training(hparams, comm)
    settings = run_settings.records(
        hparams, experiment=experiment, ranks=comm.size, commands=[run_files.POLICY.command]
    )
    return session.start(
        lambda initial_model: build_trainer(hparams, initial_model, comm, function),
        hparams,
        checkpointer,
        comm,
        records={**(reward_function.records(function) if function else {}), **settings},
        model_dir=run_files.POLICY.network,
    )


def take_steps(trainer: PPOTrainer, checkpointer: Checkpointer, clock: TimeLeft) -> None:
    """Take the steps that are left. clock: of the whole command, which has a phase 'policy'."""
    encoder = trainer.policy.encoder
    is_valid = lm_tasks.filter_fn_from_hparams(trainer.hparams.task, encoder)
    reader = tokenisers.reader(encoder, trainer.hparams.task.chat)
    hooks = [
        *collection.hooks(trainer, checkpointer, clock),
        *tracked_samples.hooks(trainer, checkpointer.seed, reader),
        *policy_hooks(trainer, checkpointer, clock, is_valid, reader),
    ]
    training_loop(trainer, hooks)
