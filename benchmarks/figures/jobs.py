"""Runs of the figures as jobs for worker processes, each of which writes its first argument."""

import argparse
import copy
import dataclasses
import functools
import hashlib
import inspect
import itertools
import json
import os
import shutil
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

import launch
from figures import worker_pool
from lm_human_preferences import lm_tasks, rewards, storage, train_policy, train_reward
from lm_human_preferences.checkpointing.checkpointer import Checkpointer
from lm_human_preferences.cli import user_settings
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.evaluation import measure, optimum
from lm_human_preferences.hparams import reward_options
from lm_human_preferences.labels import training_data
from lm_human_preferences.language import encodings
from lm_human_preferences.plan.phases import TrainPolicy, policy_phase
from lm_human_preferences.policy import Policy
from lm_human_preferences.reward_sources import loading
from lm_human_preferences.reward_sources.sources import source_of
from lm_human_preferences.synthetic import known_reward
from lm_human_preferences.trainers.additions import session
from lm_human_preferences.training.loop import Hook, training_loop
from lm_human_preferences.utils.core import ceil_div
from lm_human_preferences.utils.logging import progress

VERSION = 2  # of what a finished run means: a new version repeats all runs
QUERIES_OF_REWARD_MODEL = slice(None, None, 8)  # few are enough to find where the KL is right

Job = tuple[Any, ...]  # a function and its arguments after the path, see worker_pool.finish
POINTS = 8  # of a curve of Figure 2
HORIZON = 10_000  # the paper's; the KL coefficient starts near the right value, see run_policy


def experiment() -> train_policy.HParams:
    """Return the settings of mock_sentiment, whose reward is known."""
    hparams = train_policy.HParams()
    settings = user_settings.bindings(launch.policy_experiments, 'mock_sentiment', 'figures')
    hparams.override_from_dict(settings)
    return hparams


def parser_of(description: str | None, seeds: int) -> argparse.ArgumentParser:
    """Return the parser of arguments of `figures`. seeds: of each kind of run, by default."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('output_dir', help='for tables, picture and finished runs')
    parser.add_argument('--quick', action='store_true', help='a smaller set')
    default = f'by default {seeds}, 2 of --quick'
    parser.add_argument('--seeds', type=int, help=f'runs of each kind; {default}')
    parser.add_argument('--processes', type=int, help='runs at a time; by default one per CPU')
    return parser


@dataclasses.dataclass(frozen=True)
class Scale:
    """Size of the experiment."""

    labels: tuple[int, ...]  # sizes of label sets
    targets: tuple[float, ...]  # KLs in nats
    curve: float  # the one of Figure 2
    episodes: tuple[int, ...]  # budgets
    seeds: int  # runs of each kind


FULL = Scale(
    labels=(65536, 8192, 1024),
    targets=(1.0, 2.0, 4.0, 6.0),
    curve=4.0,
    episodes=(12800, 51200),
    seeds=5,
)
QUICK = Scale(
    labels=(8192, 2048, 512), targets=(1.0, 2.0, 4.0), curve=2.0, episodes=(2560, 10240), seeds=2
)


@dataclasses.dataclass(frozen=True)
class Run:
    """Training of one policy; points: number of measurements of it."""

    labels: int | None  # None for direct access to the known reward
    target: float
    episodes: int
    seed: int
    points: int = 1

    @property
    def access(self) -> str:
        """Source of the reward: a number of labels, or 'direct'."""
        return str(self.labels or 'direct')

    def hparams(self, experiment: train_policy.HParams) -> train_policy.HParams:
        """Return the hyperparameters of this variant of `experiment`, train_policy's."""
        settings: dict[str, Any] = {
            'run.seed': self.seed,
            'ppo.total_episodes': self.episodes,
            'rewards.adaptive_kl.horizon': HORIZON,
            'rewards.adaptive_kl.target': self.target,
        }
        if self.labels is None:
            settings['rewards.train_new_model'] = 'off'
            settings['rewards.trained_model'] = 'mock'
        else:
            settings['rewards.train_new_model.labels.num_train'] = self.labels
            settings['rewards.train_new_model.run.seed'] = self.seed
        variant = copy.deepcopy(experiment)
        variant.override_from_dict(settings)
        variant.run.save_interval = ceil_div(variant.ppo.nupdates, self.points)
        variant.validate()
        return variant


def runs_of(scale: Scale) -> list[Run]:
    """Return the runs of both figures, the longest first."""
    seeds = range(1, scale.seeds + 1)
    runs = []
    for episodes in sorted(scale.episodes, reverse=True):
        for labels, target, seed in itertools.product((None, *scale.labels), scale.targets, seeds):
            has_curve = target == scale.curve and episodes == max(scale.episodes)
            runs.append(Run(labels, target, episodes, seed, POINTS if has_curve else 1))
    return runs


class Known(NamedTuple):
    """All responses to queries (queries, query_length): (queries, responses) each."""

    queries: torch.Tensor
    ref_logprobs: torch.Tensor
    scores: torch.Tensor


@functools.lru_cache(maxsize=1)
def known_responses(task: str) -> Known:
    """Return all that is known for a task, which is given as JSON."""
    hparams = train_policy.HParams()
    hparams.task.override_from_nested_dict(json.loads(task))
    settings = hparams.task
    length = settings.response_length
    trained_model = lm_tasks.initial_model(settings.policy.initial_model)
    encoder = trained_model.encoding.get_encoder()
    reference = Policy(
        trained_model,
        **lm_tasks.policy_settings(settings, encoder),
    )
    reward_model = loading.load_reward_model('mock', trained_model.encoding)
    score_fn = rewards.make_score_fn(settings, reward_model)
    queries = measure.queries_of(source_of(hparams), encoder, None)
    n_vocab = trained_model.sizes().n_vocab
    return Known(
        queries,
        optimum.all_logprobs(reference, queries, length),
        optimum.all_scores(score_fn, queries, n_vocab, length),
    )


def write_frontier(path: str, task: str) -> None:
    _, ref_logprobs, scores = known_responses(task)
    kls, best = optimum.frontier(ref_logprobs, scores, optimum.beta_grid(scores)).tolist()
    storage.write_json(path, [{'kl': kl, 'known_reward': reward} for kl, reward in zip(kls, best)])


def run_reward(path: str, settings: reward_options.HParams) -> None:
    """Train a reward model into the directory `path`."""
    hparams = train_reward.HParams()
    hparams.override_from_nested_dict(settings.to_nested_dict())
    part = f'{path}.part'
    shutil.rmtree(part, ignore_errors=True)
    hparams.run.save_dir = part
    train_reward.train(hparams, Comm())
    os.rename(part, path)


def run_policy(path: str, hparams: train_policy.HParams, reward_model: str, task: str) -> None:
    """Train and measure a policy, whose optimum has the target KL at the start."""
    known = known_responses(task)
    hparams.rewards.train_new_model = None
    hparams.rewards.trained_model = reward_model
    hparams.rewards.kl_coef = _kl_coef(hparams, reward_model, known)
    phase = policy_phase(hparams)
    _, points = measured_steps(phase, known)
    last_kl = points[-1]['kl']
    result = {
        'kl_coef': hparams.rewards.kl_coef,
        'curve': points,
        'optimal_reward': optimum.frontier_at(last_kl, known.ref_logprobs, known.scores)[0],
    }
    storage.write_json(path, result)


def _kl_coef(hparams: train_policy.HParams, reward_model: str, known: Known) -> float:
    """Return the coefficient at which the optimum for `reward_model` has the target KL."""
    assert hparams.rewards.adaptive_kl is not None
    target = hparams.rewards.adaptive_kl.target
    if reward_model == 'mock':
        return optimum.frontier_at(target, known.ref_logprobs, known.scores)[1]
    few = QUERIES_OF_REWARD_MODEL
    scores = optimum.all_rewards(
        rewards.TrainedRewardModel(reward_model, encodings.Reviews),
        known.queries[few],
        encodings.Reviews.n_vocab,
        hparams.task.response_length,
    )
    return optimum.frontier_at(target, known.ref_logprobs[few], scores)[1]


def measured_steps(
    phase: TrainPolicy, known: Known
) -> tuple[train_policy.PPOTrainer, list[dict[str, float]]]:
    """Train a policy; return its trainer, and measurements at the start and where it is saved."""
    with Checkpointer(None, Comm(), resume=False) as checkpointer:
        phase = dataclasses.replace(phase, source=phase.source.pinned(Comm()))
        run = session.Run(phase.settings, Comm(), experiment=None, place='')
        initial_model = run.prepare(phase, checkpointer)
        trainer = train_policy.build_trainer(phase, initial_model, Comm())
        curve = KnownRewardCurve(trainer, phase.run.save_interval, known)
        hooks = train_policy.hooks(trainer, phase, checkpointer)
        training_loop(trainer, [*hooks, curve])
    return trainer, curve.points


class KnownRewardCurve(Hook):
    """Measurements of the policy of `trainer` on all responses, every `interval` steps."""

    def __init__(self, trainer: train_policy.PPOTrainer, interval: int, known: Known) -> None:
        self.trainer, self.interval, self.known = trainer, interval, known
        base = optimum.expected(known.ref_logprobs, known.scores).mean().item()
        self.points = [{'episodes': 0, 'kl': 0.0, 'known_reward': base}]

    def after_step(self, step: int, stats: Mapping[str, float]) -> None:
        """Add a measurement to `points` when it is due, and at the end."""
        trainer = self.trainer
        if step % self.interval and step < trainer.total_steps:
            return
        length = trainer.responses.length
        logprobs = optimum.all_logprobs(trainer.policy, self.known.queries, length)
        self.points.append(
            {
                'episodes': trainer.steps_done * trainer.ppo.batch_size,
                'kl': optimum.kl(logprobs, self.known.ref_logprobs).mean().item(),
                'known_reward': optimum.expected(logprobs, self.known.scores).mean().item(),
            }
        )


def result_path(
    output_dir: str, kind: str, hparams: train_policy.HParams | train_reward.HParams, *names: str
) -> str:
    """Return the path of a job's result, whose name has a digest of all that it depends on."""
    initial_model = lm_tasks.initial_model(hparams.task.policy.initial_model).savedir
    assert initial_model is not None
    settings = [
        VERSION,
        os.path.basename(initial_model),
        inspect.getsource(known_reward),
        inspect.getsource(training_data),
        hparams.to_nested_dict(),
    ]
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
    return os.path.join(output_dir, kind, '-'.join([*names, digest]))


def jobs_of(
    runs: dict[Run, train_policy.HParams], output_dir: str
) -> tuple[dict[str, Job], dict[str, Job], dict[Run, str], str]:
    """Return first jobs, those that need their results, and the paths of runs and frontier."""
    hparams = train_policy.HParams(task=next(iter(runs.values())).task)
    task = json.dumps(hparams.task.to_nested_dict())
    frontier = f'{result_path(output_dir, "runs", hparams, "frontier")}.json'
    first: dict[str, Job] = {frontier: (write_frontier, task)}
    second: dict[str, Job] = {}
    results: dict[Run, str] = {}
    for run, hparams in runs.items():
        seed = f'seed{run.seed}'
        reward_model = 'mock'
        new_model = hparams.rewards.train_new_model
        if new_model is not None:
            reward_model = result_path(output_dir, 'reward_models', new_model, run.access, seed)
            first[reward_model] = run_reward, new_model
        names = [run.access, f'kl{run.target:g}', str(run.episodes), seed]
        path = f'{result_path(output_dir, "runs", hparams, *names)}.json'
        results[run] = path
        second[path] = run_policy, hparams, reward_model, task
    return first, second, results, frontier


def finish(processes: int | None, *phases: dict[str, Job]) -> None:
    """Do the missing jobs of each of `phases` {path: job}, one phase after the other."""
    finished = sum(os.path.exists(path) for phase in phases for path in phase)
    total = sum(map(len, phases))
    with (
        progress(total=total, initial=finished, comm=Comm(), desc='runs', unit='run') as bar,
        worker_pool.pool(processes) as pool,
    ):
        for phase in phases:
            worker_pool.finish(pool, phase, bar.update)


def run_all(
    runs: dict[Run, train_policy.HParams], output_dir: str, processes: int | None
) -> tuple[dict[Run, dict[str, Any]], list[dict[str, float]]]:
    """Do the missing runs; return {Run: its result}, and the frontier as rows."""
    first, second, paths, frontier = jobs_of(runs, output_dir)
    finish(processes, first, second)
    results = {run: storage.read_json(path) for run, path in paths.items()}
    return results, storage.read_json(frontier)
