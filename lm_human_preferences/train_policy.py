"""Fine-tuning a language model against a reward model by PPO (the original's train_policy.py;
paper, section 2.2)."""

import shlex
import tempfile
import time
from typing import Any

import numpy as np
import torch

from lm_human_preferences import label_types, lm_tasks, ppo, storage, train_reward
from lm_human_preferences.checkpointing import checkpoints
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
from lm_human_preferences.language.model import in_tf_shapes
from lm_human_preferences.policy import Policy
from lm_human_preferences.rewards import (
    ScoreFn,
    TrainedRewardModel,
    get_reward_model,
    label_source,
    make_score_fn,
)
from lm_human_preferences.runs import run_dir
from lm_human_preferences.synthetic.known_reward import MockRewardModel
from lm_human_preferences.training import console, health, memory, precision
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

SAMPLES_SHOWN, SAMPLES_IN_SUMMARY = 3, 2
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
    """Takes PPO steps: sample, score, reward, learn, log.

    query_sampler: see lm_tasks.make_query_sampler; score_fn: see make_score_fn; hparams: HParams of
    this module. score_model: what is saved with the policy.
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
        score_model: MockRewardModel | TrainedRewardModel | None = None,
    ) -> None:
        self.policy, self.ref_policy, self.score_model = policy, ref_policy, score_model
        self.query_sampler, self.score_fn = query_sampler, score_fn
        self.hparams, self.comm, self.global_step = hparams, comm, 0
        # Share of the last step's responses, see penalized_share; nothing before the first step.
        self.penalized: float | None = None
        self.start_time = self.last_time = time.time()
        kl_coef, adaptive = hparams.rewards.kl_coef, hparams.rewards.adaptive_kl
        self.kl_ctl = (
            FixedKLController(kl_coef)
            if adaptive is None
            else AdaptiveKLController(kl_coef, adaptive)
        )
        self.optimizer = Adam(policy.tf_parameters(), comm=comm)
        self.logger = Logger(
            hparams.run.directory, 'ppo', log_interval=hparams.run.log_interval, comm=comm
        )

    def step(self) -> dict[str, float]:
        """One step of Algorithm 1's inner loop on ppo.batch_size episodes; returns the logged
        statistics."""
        started = time.time()
        queries = self.query_sampler()['tokens'].to(self.policy.device)
        parts = [
            self.sample(part)
            for part in queries.split(self.hparams.ppo.micro_batch_size or len(queries))
        ]
        rollouts, sampled, score_stats = (
            {name: torch.cat([part[name] for part in kind]) for name in kind[0]}
            for kind in zip(*parts)
        )
        logprobs, ref_logprobs, scores = (
            rollouts['logprobs'],
            sampled['ref_logprobs'],
            sampled['scores'],
        )
        rewards, non_score_reward, kl_coef = self.compute_rewards(scores, logprobs, ref_logprobs)

        train_stats = self.train({**rollouts, 'rewards': rewards})

        stats = self.record_step_stats(
            kl_coef=kl_coef,
            logprobs=logprobs,
            ref_logprobs=ref_logprobs,
            scores=scores,
            non_score_reward=non_score_reward,
            score_stats=score_stats,
            train_stats=train_stats,
        )
        self.kl_ctl.update(stats['objective/kl'], self.hparams.ppo.batch_size)
        self.penalized = self.penalized_share(rollouts['responses'])
        self.print_samples(
            queries, sampled['postprocessed'], scores, logprobs - ref_logprobs, kl_coef
        )
        if self.comm.rank == 0:
            step_time = time.time() - started
            say_as_recorded(
                f'[ppo_step {self.global_step}] step_time={step_time:.2f}s, '
                f'eps/s={self.hparams.ppo.batch_size / step_time:.2f}'
            )
        self.global_step += 1
        return stats

    def sample(
        self,
        queries: torch.Tensor,
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Answers to `queries (batch, query_length)` and what is thought of them.

        Returns three dicts of tensors of `batch` rows: the rollouts but for their rewards;
        log-probabilities of the reference, scores and what was scored; what the score function
        wants logged.
        """
        rollouts = self.policy.respond(queries, length=self.hparams.task.response_length)
        ref_logprobs = self.ref_policy.analyze_responses(queries, rollouts['responses'])['logprobs']
        scores, postprocessed, score_stats = self.score_fn(queries, rollouts['responses'])
        return (
            {**rollouts, 'queries': queries},
            {'ref_logprobs': ref_logprobs, 'scores': scores, 'postprocessed': postprocessed},
            score_stats,
        )

    def compute_rewards(
        self,
        scores: torch.Tensor,
        logprobs: torch.Tensor,
        ref_logprobs: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, float]:
        """(rewards, KL penalty, coefficient used), see ppo.compute_rewards."""
        return (
            *ppo.compute_rewards(scores, logprobs, ref_logprobs, self.kl_ctl.value),
            self.kl_ctl.value,
        )

    def train(self, rollouts: dict[str, torch.Tensor]) -> dict[str, list[torch.Tensor]]:
        """`noptepochs` passes over this rank's rollouts in minibatches, freshly shuffled each time.

        rollouts: queries (batch, query_length), responses, values, logprobs, rewards (batch,
        response_length). Returns {statistic: [one scalar tensor per minibatch]}.
        """
        batch = len(rollouts['queries'])
        minibatch = exact_div(batch, self.hparams.ppo.nminibatches)
        stats = []
        for _ in range(self.hparams.ppo.noptepochs):
            order = torch.from_numpy(np.random.permutation(batch))
            for rows in order.split(minibatch):
                stats.append(
                    self.train_minibatch({name: values[rows] for name, values in rollouts.items()})
                )
        return {name: [s[name] for s in stats] for name in stats[0]}

    def train_minibatch(self, rollouts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """One update of the policy; returns the statistics before it. Micro-batches only save
        memory."""
        rollouts = ppo.add_advantages(rollouts, self.hparams.ppo)
        stats, batch = ppo.return_stats(rollouts), len(rollouts['queries'])
        parts = torch.arange(batch).split(self.hparams.ppo.micro_batch_size or batch)
        self.optimizer.gradients.zero_grad()
        for rows in parts:
            share = len(rows) / batch
            loss, part_stats = self._loss_towards_targets(
                {name: values[rows] for name, values in rollouts.items()}
            )
            self.optimizer.backward(share * loss, last=rows is parts[-1])
            for name, value in part_stats.items():
                stats[name] = stats.get(name, 0) + share * value
        self.optimizer.update(
            lr=self.hparams.ppo.lr * (1 - self.global_step / nupdates(self.hparams))
        )
        return stats

    def loss(
        self,
        rollouts: dict[str, torch.Tensor],
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """(differentiable PPO loss, statistics) of a minibatch of `rollouts`, see ppo.loss."""
        rollouts = ppo.add_advantages(rollouts, self.hparams.ppo)
        loss, stats = self._loss_towards_targets(rollouts)
        return loss, {**stats, **ppo.return_stats(rollouts)}

    def _loss_towards_targets(
        self,
        rollouts: dict[str, torch.Tensor],
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        outputs = self.policy.analyze_responses_op(rollouts['queries'], rollouts['responses'])
        return ppo.loss(rollouts, outputs, self.hparams.ppo)

    def record_step_stats(
        self,
        *,
        kl_coef: float,
        logprobs: torch.Tensor,
        ref_logprobs: torch.Tensor,
        scores: torch.Tensor,
        non_score_reward: torch.Tensor,
        score_stats: dict[str, torch.Tensor],
        train_stats: dict[str, list[torch.Tensor]],
    ) -> dict[str, float]:
        """Log what this step did, averaged over ranks, under the original's names; returns it."""
        stats = {
            'objective/kl': (logprobs - ref_logprobs).sum(1).mean(),
            'objective/kl_coef': torch.tensor(kl_coef),
            'objective/entropy': -logprobs.sum(1).mean(),
        }
        stats.update(
            {
                f'ppo/{name}': torch.stack(tuple(values)).mean()
                for name, values in train_stats.items()
            }
        )
        for name, values in score_stats.items():
            stats[f'objective/{name}'] = values.mean()
            stats[f'objective/{name}_total'] = values.mean() + non_score_reward.sum(1).mean()
        names = sorted(stats)
        values = torch.stack(
            [stats[name].to(logprobs.device) for name in names]
        ).tolist()  # one wait for the device
        stats = self.comm.all_reduce_mean(dict(zip(names, values, strict=True)))
        stats['ppo/val/var_explained'] = 1 - stats['ppo/val/error'] / stats['ppo/returns/var']
        stats.update(self._progress())
        self.logger.log(stats, self.global_step)
        return stats

    def _progress(self) -> dict[str, float]:
        """How far the run is and how fast, in the original's units."""
        length, batch_size, steps = (
            self.hparams.task.response_length,
            self.hparams.ppo.batch_size,
            self.global_step + 1,
        )
        now = time.time()
        delta, self.last_time = max(now - self.last_time, 1e-9), now
        return {
            'elapsed/updates': steps,
            'elapsed/steps/serial': steps * length,
            'elapsed/steps/total': steps * batch_size * length,
            'elapsed/episodes': steps * batch_size,
            'elapsed/fps': int(batch_size * length / delta),
            'elapsed/time': now - self.start_time,
        }

    def penalized_share(self, responses: torch.Tensor) -> float:
        """Share over all ranks of `responses (batch, response_length)` that score the penalty."""
        valid = lm_tasks.filter_fn_from_hparams(self.hparams.task)(responses).float().mean().item()
        return 1 - self.comm.all_reduce_mean({'valid': valid})['valid']

    def print_samples(
        self,
        queries: torch.Tensor,
        responses: torch.Tensor,
        scores: torch.Tensor,
        kl: torch.Tensor,
        kl_coef: float,
    ) -> None:
        """Show the first few episodes; in the summary, those of the first step and of the last.

        queries: (batch, query_length); responses, kl per token: (batch, response_length); scores:
        (batch,); kl_coef: the one that was in force.
        """
        first_or_last = self.global_step in (0, nupdates(self.hparams) - 1)
        in_summary = self.logger.active and first_or_last and console_is('summary')
        as_recorded = self.logger.is_due(self.global_step) and console_is('original')
        if not (in_summary or as_recorded):
            return
        if in_summary:
            announce(f'samples of step {self.global_step + 1}:')
        count = SAMPLES_IN_SUMMARY if in_summary else SAMPLES_SHOWN
        shown = [values[:count].tolist() for values in (queries, responses, scores, kl.sum(1))]
        for query, response, score, sample_kl in zip(*shown, strict=True):
            texts = [
                self.policy.encoder.decode(tokens).replace('\n', '⏎')
                for tokens in (query, response)
            ]
            if in_summary:
                announce(f'  {" | ".join(texts)}   (score {score:.2f}, KL {sample_kl:.2f})')
            else:
                announce(
                    *texts,
                    f'  score = {score:+.2f}',
                    f'  kl = {sample_kl:+.2f}',
                    f'  total = {score - kl_coef * sample_kl:+.2f}',
                )

    def tf_variables(self) -> dict[str, torch.Tensor]:
        """Everything that the original's checkpoint of this run holds, tensors by variable name."""
        assert self.score_model is not None
        return in_tf_shapes(
            {
                **self.policy.tf_parameters(),
                **self.ref_policy.tf_parameters(),
                **self.score_model.tf_parameters(),
                **self.optimizer.tf_slots('ppo_opt'),
                'global_step': torch.tensor(self.global_step),
                'start_time': torch.tensor(self.start_time, dtype=torch.float64),
                'last_time': torch.tensor(self.last_time, dtype=torch.float64),
            }
        )

    def state_dict(self) -> dict[str, Any]:
        """What else has to be kept to go on from here, as JSON."""
        return {
            'step': self.global_step,
            'kl_coef': self.kl_ctl.value,
            'optimizer_steps': self.optimizer.steps,
            'elapsed': self.last_time - self.start_time,
            'queries': self.query_sampler.position,
            'initial_kl_coef': self.hparams.rewards.kl_coef,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned; the variables are filled in afterwards.

        The KL coefficient goes on from where it was, unless the settings name another one than the
        run began with.
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
        'train_policy_hparams.json': run_dir.to_record(hparams),
        'train_reward_hparams.json': run_dir.to_record(new_model),
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
    score_model = get_reward_model(place, trained_model.encoding)
    comm.broadcast_(score_model.get_params() + ref_policy.get_params() + policy.get_params())
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
        score_model=score_model,
        score_fn=make_score_fn(hparams.task, score_model),
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
    n_vocab = trained_models.TrainedModel(hparams.task.policy.initial_model).hparams().n_vocab
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
    trained_model = trained_models.TrainedModel(hparams.task.policy.initial_model)
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
    trained_model = trained_models.TrainedModel(hparams.task.policy.initial_model)
    if console_is('original'):
        hyperparams.dump(trained_model.hparams(), name='model_hparams')
    trainer = build_trainer(hparams, trained_model, comm)
    checkpointer.restore(trainer, saves=ceil_div(nupdates(hparams), hparams.run.save_interval))
    comm.barrier()
    directory = hparams.run.directory
    if directory and comm.rank == 0:
        say_as_recorded(f'Will save to {hparams.run.save_dir}')
        checkpoints.write_json(
            storage.join(directory, 'train_policy_hparams.json'), run_dir.to_record(hparams)
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
