"""Fine-tuning a language model against a reward model by PPO (the original's train_policy.py; paper, section 2.2)."""
import tempfile
import time

import numpy as np
import torch

from lm_human_preferences import andon, evaluate, lm_tasks, ppo, train_reward
from lm_human_preferences.hparams.train_policy import AdaptiveKLParams, HParams, PpoHParams, RewardHParams
from lm_human_preferences.language import trained_models
from lm_human_preferences.language.model import in_tf_shapes
from lm_human_preferences.policy import Policy
from lm_human_preferences.rewards import get_reward_model, label_source, make_score_fn
from lm_human_preferences.utils import checkpoints, hyperparams, memory, precision, runs, storage
from lm_human_preferences.utils import comm as comms
from lm_human_preferences.utils.checkpoints import COUNT
from lm_human_preferences.utils.core import ceil_div, default_device, exact_div
from lm_human_preferences.utils.errors import UserError
from lm_human_preferences.utils.keeper import Keeper
from lm_human_preferences.utils.logging import Logger, progress, say
from lm_human_preferences.utils.optimizer import Adam

__all__ = ['AdaptiveKLController', 'AdaptiveKLParams', 'FixedKLController', 'HParams', 'PPOTrainer', 'PpoHParams',
           'RewardHParams', 'make_score_fn', 'nupdates', 'train']

SAMPLES_SHOWN = 3
STATE = {'step': COUNT, 'kl_coef': float | int, 'optimizer_steps': COUNT, 'elapsed': float, 'queries': (COUNT, COUNT)}


def nupdates(hparams):
    """How many PPO steps `ppo.total_episodes` takes, rounded up."""
    return ceil_div(hparams.ppo.total_episodes, hparams.ppo.batch_size)


class FixedKLController:
    """A KL coefficient that stays."""

    def __init__(self, kl_coef):
        self.value = kl_coef

    def update(self, current, n_steps):
        """Nothing to adapt."""


class AdaptiveKLController:
    """A KL coefficient that is steered so that the KL stays near a target (paper, section 2.2)."""

    def __init__(self, init_kl_coef, hparams):
        self.value, self.hparams = init_kl_coef, hparams

    def update(self, current, n_steps):
        """current: KL in nats of the last step; n_steps: episodes that it took."""
        proportional_error = np.clip(current / self.hparams.target - 1, -0.2, 0.2)
        self.value *= float(1 + proportional_error * n_steps / self.hparams.horizon)


class PPOTrainer:
    """Takes PPO steps: sample, score, reward, learn, log.

    query_sampler: see lm_tasks.make_query_sampler; score_fn: see make_score_fn; hparams: HParams of this module.
    score_model: what is saved with the policy.
    """

    def __init__(self, *, policy, ref_policy, query_sampler, score_fn, hparams, comm, score_model=None):
        self.policy, self.ref_policy, self.score_model = policy, ref_policy, score_model
        self.query_sampler, self.score_fn = query_sampler, score_fn
        self.hparams, self.comm, self.global_step = hparams, comm, 0
        self.penalized = None  # share of the last step's responses, see penalized_share
        self.start_time = self.last_time = time.time()
        kl_coef, adaptive = hparams.rewards.kl_coef, hparams.rewards.adaptive_kl
        self.kl_ctl = FixedKLController(kl_coef) if adaptive is None else AdaptiveKLController(kl_coef, adaptive)
        self.optimizer = Adam(policy.tf_parameters(), comm=comm)
        self.logger = Logger(hparams.run.directory, 'ppo', log_interval=hparams.run.log_interval, comm=comm)

    def step(self):
        """One step of Algorithm 1's inner loop on ppo.batch_size episodes; returns the logged statistics."""
        started = time.time()
        queries = self.query_sampler()['tokens'].to(self.policy.device)
        parts = [self.sample(part) for part in queries.split(self.hparams.ppo.micro_batch_size or len(queries))]
        rollouts, sampled, score_stats = ({name: torch.cat([part[name] for part in kind]) for name in kind[0]}
                                          for kind in zip(*parts))
        logprobs, ref_logprobs, scores = rollouts['logprobs'], sampled['ref_logprobs'], sampled['scores']
        rewards, non_score_reward, kl_coef = self.compute_rewards(scores, logprobs, ref_logprobs)

        train_stats = self.train({**rollouts, 'rewards': rewards})

        stats = self.record_step_stats(
            kl_coef=kl_coef, logprobs=logprobs, ref_logprobs=ref_logprobs, scores=scores,
            non_score_reward=non_score_reward, score_stats=score_stats, train_stats=train_stats)
        self.kl_ctl.update(stats['objective/kl'], self.hparams.ppo.batch_size)
        self.penalized = self.penalized_share(rollouts['responses'])
        self.print_samples(queries, sampled['postprocessed'], scores, logprobs - ref_logprobs, kl_coef)
        if self.comm.rank == 0:
            step_time = time.time() - started
            say(f'[ppo_step {self.global_step}] step_time={step_time:.2f}s, '
                f'eps/s={self.hparams.ppo.batch_size / step_time:.2f}')
        self.global_step += 1
        return stats

    def sample(self, queries):
        """Answers to `queries (batch, query_length)` and what is thought of them.

        Returns three dicts of tensors of `batch` rows: the rollouts but for their rewards; log-probabilities of the
        reference, scores and what was scored; what the score function wants logged.
        """
        rollouts = self.policy.respond(queries, length=self.hparams.task.response_length)
        ref_logprobs = self.ref_policy.analyze_responses(queries, rollouts['responses'])['logprobs']
        scores, postprocessed, score_stats = self.score_fn(queries, rollouts['responses'])
        return ({**rollouts, 'queries': queries},
                {'ref_logprobs': ref_logprobs, 'scores': scores, 'postprocessed': postprocessed}, score_stats)

    def compute_rewards(self, scores, logprobs, ref_logprobs):
        """(rewards, KL penalty, coefficient used), see ppo.compute_rewards."""
        return *ppo.compute_rewards(scores, logprobs, ref_logprobs, self.kl_ctl.value), self.kl_ctl.value

    def train(self, rollouts):
        """`noptepochs` passes over this rank's rollouts in minibatches, freshly shuffled each time.

        rollouts: queries (batch, query_length), responses, values, logprobs, rewards (batch, response_length).
        Returns {statistic: [one scalar tensor per minibatch]}.
        """
        batch = len(rollouts['queries'])
        minibatch = exact_div(batch, self.hparams.ppo.nminibatches)
        stats = []
        for _ in range(self.hparams.ppo.noptepochs):
            order = torch.from_numpy(np.random.permutation(batch))
            for rows in order.split(minibatch):
                stats.append(self.train_minibatch({name: values[rows] for name, values in rollouts.items()}))
        return {name: [s[name] for s in stats] for name in stats[0]}

    def train_minibatch(self, rollouts):
        """One update of the policy; returns the statistics before it. Micro-batches only save memory."""
        rollouts = ppo.with_targets(rollouts, self.hparams.ppo)
        stats, batch = ppo.target_stats(rollouts), len(rollouts['queries'])
        parts = torch.arange(batch).split(self.hparams.ppo.micro_batch_size or batch)
        self.optimizer.gradients.clear()
        for rows in parts:
            share = len(rows) / batch
            loss, part_stats = self._loss_towards_targets({name: values[rows] for name, values in rollouts.items()})
            self.optimizer.backward(share * loss, last=rows is parts[-1])
            for name, value in part_stats.items():
                stats[name] = stats.get(name, 0) + share * value
        self.optimizer.update(lr=self.hparams.ppo.lr * (1 - self.global_step / nupdates(self.hparams)))
        return stats

    def loss(self, rollouts):
        """(differentiable PPO loss, statistics) of a minibatch of `rollouts`, see ppo.loss."""
        rollouts = ppo.with_targets(rollouts, self.hparams.ppo)
        loss, stats = self._loss_towards_targets(rollouts)
        return loss, {**stats, **ppo.target_stats(rollouts)}

    def _loss_towards_targets(self, rollouts):
        outputs = self.policy.analyze_responses_op(rollouts['queries'], rollouts['responses'])
        return ppo.loss(rollouts, outputs, self.hparams.ppo)

    def record_step_stats(self, *, kl_coef, logprobs, ref_logprobs, scores, non_score_reward, score_stats, train_stats):
        """Log what this step did, averaged over ranks, under the original's names; returns it."""
        stats = {
            'objective/kl': (logprobs - ref_logprobs).sum(1).mean(),
            'objective/kl_coef': torch.tensor(kl_coef),
            'objective/entropy': -logprobs.sum(1).mean()}
        stats.update({f'ppo/{name}': torch.stack(tuple(values)).mean() for name, values in train_stats.items()})
        for name, values in score_stats.items():
            stats[f'objective/{name}'] = values.mean()
            stats[f'objective/{name}_total'] = values.mean() + non_score_reward.sum(1).mean()
        names = sorted(stats)
        values = torch.stack([stats[name].to(logprobs.device) for name in names]).tolist()  # one wait for the device
        stats = self.comm.mean(dict(zip(names, values, strict=True)))
        stats['ppo/val/var_explained'] = 1 - stats['ppo/val/error'] / stats['ppo/returns/var']
        stats.update(self._progress())
        self.logger.log(stats, self.global_step)
        return stats

    def _progress(self):
        """How far the run is and how fast, in the original's units."""
        length, batch_size, steps = self.hparams.task.response_length, self.hparams.ppo.batch_size, self.global_step + 1
        now = time.time()
        delta, self.last_time = max(now - self.last_time, 1e-9), now
        return {'elapsed/updates': steps, 'elapsed/steps/serial': steps * length,
                'elapsed/steps/total': steps * batch_size * length, 'elapsed/episodes': steps * batch_size,
                'elapsed/fps': int(batch_size * length / delta), 'elapsed/time': now - self.start_time}

    def penalized_share(self, responses):
        """Share over all ranks of `responses (batch, response_length)` that score the penalty."""
        valid = lm_tasks.filter_fn_from_hparams(self.hparams.task)(responses).float().mean().item()
        return 1 - self.comm.mean({'valid': valid})['valid']

    def print_samples(self, queries, responses, scores, kl, kl_coef):
        """Show the first few episodes; kl (batch, response_length) is per token, kl_coef the one that was in force."""
        if not self.logger.is_due(self.global_step):
            return
        decode, shown = self.policy.encoder.decode, [
            values[:SAMPLES_SHOWN].tolist() for values in (queries, responses, scores, kl.sum(1))]
        for query, response, score, sample_kl in zip(*shown, strict=True):
            say(decode(query).replace('\n', '⏎'), decode(response).replace('\n', '⏎'), f'  score = {score:+.2f}',
                f'  kl = {sample_kl:+.2f}', f'  total = {score - kl_coef * sample_kl:+.2f}')

    def tf_variables(self):
        """Everything that the original's checkpoint of this run holds, tensors by variable name."""
        return in_tf_shapes({
            **self.policy.tf_parameters(), **self.ref_policy.tf_parameters(), **self.score_model.tf_parameters(),
            **self.optimizer.tf_slots('ppo_opt'), 'global_step': torch.tensor(self.global_step),
            'start_time': torch.tensor(self.start_time, dtype=torch.float64),
            'last_time': torch.tensor(self.last_time, dtype=torch.float64)})

    def state(self):
        """What else has to be kept to go on from here, as JSON."""
        return {'step': self.global_step, 'kl_coef': self.kl_ctl.value, 'optimizer_steps': self.optimizer.steps,
                'elapsed': self.last_time - self.start_time, 'queries': self.query_sampler.position}

    def restore(self, state):
        """Go on from what `state` returned; the variables are filled in afterwards."""
        self.global_step, self.kl_ctl.value = state['step'], state['kl_coef']
        self.start_time = self.last_time - state['elapsed']
        self.optimizer.start_at(state['optimizer_steps'])
        self.query_sampler.go_on(state['queries'])


def train_reward_model(hparams, comm, directory):
    """The first of both steps at once: train the reward model of `rewards.train_new_model` into `directory`."""
    new_model = hparams.rewards.train_new_model
    for name, value in vars(hparams.task).items():
        if value != getattr(new_model.task, name):
            raise UserError(f'--task.{name} and --rewards.train_new_model.task.{name} must be the same: '
                            f'{value} != {getattr(new_model.task, name)}')
    new_model.run.save_dir, hparams.rewards.trained_model = directory, storage.join(directory, 'reward_model')
    train_reward.train_in_run(new_model, comm, hparams.run, {
        'train_policy_hparams.json': runs.record(hparams), 'train_reward_hparams.json': runs.record(new_model)})
    comm.barrier()


def build_trainer(hparams, trained_model, comm):
    """The models and the trainer of a run: PPOTrainer."""
    encoder = trained_model.encoding.get_encoder()
    lm_tasks.check_lengths(hparams.task, encoder, trained_model.hparams().n_ctx)
    settings = dict(embed_queries=lm_tasks.query_formatter(hparams.task, encoder),
                    temperature=hparams.task.policy.temperature)
    ref_policy = Policy(trained_model, scope='ref_policy', **settings)
    policy = Policy(trained_model, scope='policy', **settings)
    policy.model.checkpointed = hparams.run.gradient_checkpointing
    name = hparams.rewards.trained_model
    is_ours = hparams.rewards.train_new_model is not None
    score_model = get_reward_model(storage.staging(name) if is_ours else name, trained_model.encoding)
    comm.broadcast_(score_model.get_params() + ref_policy.get_params() + policy.get_params())
    query_sampler = lm_tasks.make_query_sampler(
        hparams=hparams.task, encoder=encoder, comm=comm, labels=label_source(hparams),
        batch_size=exact_div(hparams.ppo.batch_size, comm.size))
    return PPOTrainer(policy=policy, ref_policy=ref_policy, query_sampler=query_sampler, hparams=hparams, comm=comm,
                      score_model=score_model, score_fn=make_score_fn(hparams.task, score_model))


def train(hparams: HParams, comm=None):
    """Fine-tune a policy and save it to SAVE_DIR/policy; the whole of `./launch.py train_policy`."""
    comm = comm or comms.world(hparams.run.allreduce)
    hparams.check_ranks(comm.size)
    save_dir, directory = hparams.run.save_dir, hparams.run.directory
    saved = directory and storage.join(directory, 'policy', 'checkpoints')
    with runs.held(hparams, comm), memory.ways_out('--ppo.micro_batch_size'):
        with Keeper(saved, comm, resume=hparams.run.resume, form=STATE, fixed=['ref_policy', 'reward_model']) as keeper:
            with tempfile.TemporaryDirectory() as scratch:
                if hparams.rewards.train_new_model is not None:  # in scratch for a run that is not saved
                    train_reward_model(hparams, comm, save_dir or comm.gather(scratch)[0])
                trainer = start(hparams, keeper, comm)
            run_updates(trainer, keeper, comm)
        if save_dir and comm.rank == 0 and hparams.run.evaluate:
            evaluate.evaluate(save_dir, directory=directory)


def start(hparams, keeper, comm):
    """The PPOTrainer of a run, where the run begins or goes on; writes what is known of the run by then."""
    hyperparams.dump(hparams)
    precision.prepare(hparams.run.precision, default_device())
    keeper.set_seed(hparams.run.seed)
    trained_model = trained_models.TrainedModel(hparams.task.policy.initial_model)
    hyperparams.dump(trained_model.hparams(), name='model_hparams')
    memory.check(work(hparams, trained_model.hparams(), comm.size), comm, default_device())
    trainer = build_trainer(hparams, trained_model, comm)
    keeper.restore(trainer, saves=ceil_div(nupdates(hparams), hparams.run.save_interval))
    comm.barrier()
    directory = hparams.run.directory
    if directory and comm.rank == 0:
        say(f'Will save to {hparams.run.save_dir}')
        checkpoints.write_json(storage.join(directory, 'train_policy_hparams.json'), runs.record(hparams))
        trained_model.write_files(storage.join(directory, 'policy'))
    return trainer


def work(hparams, sizes, ranks):
    """What takes memory in a step, for networks of `sizes`: memory.Training."""
    task, rows = hparams.task, exact_div(hparams.ppo.batch_size, ranks)
    tokens = task.query_length + task.response_length
    return memory.Training(
        sizes, networks=2 if hparams.rewards.trained_model == 'mock' else 3, rows=rows // hparams.ppo.nminibatches,
        tokens=tokens, predicted=task.response_length, sampled_rows=rows, sampled_tokens=tokens,
        micro_batch_size=hparams.ppo.micro_batch_size, option='--ppo.micro_batch_size',
        checkpointed=hparams.run.gradient_checkpointing, reduced=hparams.run.precision == 'bf16')


def run_updates(trainer, keeper, comm):
    """Take all steps that are left, saving every `save_interval` of them and at the end, also if that is an error."""
    hparams, steps, batch_size = trainer.hparams, nupdates(trainer.hparams), trainer.hparams.ppo.batch_size
    bar = progress(total=steps * batch_size, initial=trainer.global_step * batch_size, comm=comm, desc='policy',
                   unit='episode')
    cord = andon.Andon(hparams.run.andon, comm)
    try:
        with keeper.ending_between_steps():
            while trainer.global_step < steps:
                stats = trainer.step()
                bar.set_postfix(score=f'{stats["objective/score"]:.2f}', kl=f'{stats["objective/kl"]:.2f}',
                                refresh=False)
                bar.update(batch_size)
                cord.first = cord.first or stats
                alarms = andon.policy_alarms({**stats, andon.PENALIZED: trainer.penalized}, cord.first, hparams)
                cord.pull(alarms, trainer, keeper)
                keeper.step_done(trainer)
                if trainer.global_step % hparams.run.save_interval == 0 or trainer.global_step == steps:
                    keeper.save(trainer)
    except BaseException:
        keeper.save_at_error(trainer)
        raise
    finally:
        bar.close()
        trainer.logger.close()
