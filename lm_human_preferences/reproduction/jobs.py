"""The runs of the figures as jobs for worker processes, each done once.

A job writes the file or directory that is its first argument; see worker_pool.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import shutil
from typing import Any, NamedTuple

import torch

from lm_human_preferences import lm_tasks, rewards, storage, train_policy, train_reward
from lm_human_preferences.checkpointing.checkpointer import Checkpointer
from lm_human_preferences.distributed.comm import LocalComm
from lm_human_preferences.evaluation import measure, optimum
from lm_human_preferences.labels import simulated
from lm_human_preferences.language import encodings
from lm_human_preferences.policy import Policy
from lm_human_preferences.reproduction import worker_pool
from lm_human_preferences.reproduction.plan import Run
from lm_human_preferences.synthetic import known_reward
from lm_human_preferences.training.time_left import TimeLeft
from lm_human_preferences.utils.logging import progress

VERSION = 2  # of what a finished run means: a new version repeats all runs
QUERIES_OF_REWARD_MODEL = slice(None, None, 8)  # few are enough to find where the KL is right

Job = tuple[Any, ...]  # a function and its arguments after the path, see worker_pool.finish


class Known(NamedTuple):
    """What is known of all responses to all queries.

    queries (queries, query_length); both others (queries, responses): the initial model's
    log-probabilities, and the known rewards.
    """

    queries: torch.Tensor
    ref_logprobs: torch.Tensor
    scores: torch.Tensor


@functools.lru_cache(maxsize=1)
def known_responses(task: str) -> Known:
    """All that is known for a task, which is given as JSON."""
    hparams = train_policy.HParams()
    hparams.task.parse_json(task)
    settings = hparams.task
    length = settings.response_length
    trained_model = lm_tasks.initial_model(settings.policy.initial_model)
    encoder = trained_model.encoding.get_encoder()
    reference = Policy(
        trained_model,
        embed_queries=lm_tasks.query_formatter(settings, encoder),
        temperature=settings.policy.temperature,
    )
    reward_model = rewards.load_reward_model('mock', trained_model.encoding)
    score_fn = rewards.make_score_fn(settings, reward_model)
    queries = measure.queries_of(hparams, encoder, None)
    n_vocab = trained_model.hparams().n_vocab
    return Known(
        queries,
        optimum.all_logprobs(reference, queries, length),
        optimum.all_scores(score_fn, queries, n_vocab, length),
    )


def write_frontier(path: str, task: str) -> None:
    """A job: the highest reward possible at some KLs."""
    _, ref_logprobs, scores = known_responses(task)
    kls, best = optimum.frontier(ref_logprobs, scores, optimum.beta_grid(scores)).tolist()
    storage.write_json(path, [{'kl': kl, 'known_reward': reward} for kl, reward in zip(kls, best)])


def run_reward(path: str, hparams: train_reward.HParams) -> None:
    """A job: train a reward model into the directory `path`."""
    part = f'{path}.part'
    shutil.rmtree(part, ignore_errors=True)
    hparams.run.save_dir = part
    train_reward.train(hparams, LocalComm())
    os.rename(part, path)


def run_policy(path: str, hparams: train_policy.HParams, reward_model: str, task: str) -> None:
    """A job: train a policy as ./launch.py train_policy does, and measure it exactly on the way.

    The KL coefficient starts where the optimum has the target KL: these runs are too short to look
    for it.
    """
    known = known_responses(task)
    hparams.rewards.train_new_model = None
    hparams.rewards.trained_model = reward_model
    hparams.rewards.kl_coef = _kl_coef(hparams, reward_model, known)
    with Curve(known) as curve:
        trainer = train_policy.start(hparams, curve, LocalComm())
        train_policy.take_steps(trainer, curve, TimeLeft({'policy': 1}))
    last_kl = curve.points[-1]['kl']
    result = {
        'kl_coef': hparams.rewards.kl_coef,
        'curve': curve.points,
        'optimal_reward': optimum.frontier_reward_at(last_kl, known.ref_logprobs, known.scores),
    }
    storage.write_json(path, result)


def _kl_coef(hparams: train_policy.HParams, reward_model: str, known: Known) -> float:
    """The coefficient at which the optimum for `reward_model` has the target KL."""
    assert hparams.rewards.adaptive_kl is not None
    target = hparams.rewards.adaptive_kl.target
    if reward_model == 'mock':
        return optimum.frontier_at(target, known.ref_logprobs, known.scores)[1]
    few = QUERIES_OF_REWARD_MODEL
    scores = optimum.all_rewards(
        rewards.TrainedRewardModel(reward_model, encodings.Reviews),
        known.queries[few],
        hparams.task.response_length,
    )
    return optimum.frontier_at(target, known.ref_logprobs[few], scores)[1]


class Curve(Checkpointer):
    """Measures the policy on all responses whenever another run would save it."""

    def __init__(self, known: Known) -> None:
        super().__init__(None, LocalComm(), resume=False)
        self.known = known
        base = optimum.expected(known.ref_logprobs, known.scores).mean().item()
        self.points = [{'episodes': 0, 'kl': 0.0, 'known_reward': base}]

    def save(self, trainer: train_policy.PPOTrainer) -> None:
        """Add what the policy of `trainer` attains now to `points`."""
        length = trainer.hparams.task.response_length
        logprobs = optimum.all_logprobs(trainer.policy, self.known.queries, length)
        self.points.append(
            {
                'episodes': trainer.global_step * trainer.hparams.ppo.batch_size,
                'kl': optimum.kl(logprobs, self.known.ref_logprobs).mean().item(),
                'known_reward': optimum.expected(logprobs, self.known.scores).mean().item(),
            }
        )


def result_path(
    output_dir: str, kind: str, hparams: train_policy.HParams | train_reward.HParams, *names: str
) -> str:
    """Where the result of a job goes; a digest of all that it depends on is part of the name."""
    initial_model = lm_tasks.initial_model(hparams.task.policy.initial_model).savedir
    assert initial_model is not None
    settings = [
        VERSION,
        os.path.basename(initial_model),
        inspect.getsource(known_reward),
        inspect.getsource(simulated),
        hparams.to_nested_dict(),
    ]
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
    return os.path.join(output_dir, kind, '-'.join([*names, digest]))


class Jobs(NamedTuple):
    """The jobs that come first, those that need their results, and the paths of the results."""

    first: dict[str, Job]
    second: dict[str, Job]
    results: dict[Run, str]
    frontier: str


def jobs_of(runs: dict[Run, train_policy.HParams], output_dir: str) -> Jobs:
    """The jobs of `runs` {Run: hparams}.

    Policies share the reward models, of which there is one for each seed and number of labels.
    """
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
    return Jobs(first, second, results, frontier)


def finish(processes: int | None, *phases: dict[str, Job]) -> None:
    """Do what is missing of each of `phases` {path: job}, one after the other, with a bar.

    processes: jobs at a time, None for one per CPU.
    """
    finished = sum(os.path.exists(path) for phase in phases for path in phase)
    total = sum(map(len, phases))
    with (
        progress(total=total, initial=finished, comm=LocalComm(), desc='runs', unit='run') as bar,
        worker_pool.pool(processes) as pool,
    ):
        for phase in phases:
            worker_pool.finish(pool, phase, bar.update)


def run_all(
    runs: dict[Run, train_policy.HParams], output_dir: str, processes: int | None
) -> tuple[dict[Run, dict[str, Any]], list[dict[str, float]]]:
    """Do what is missing of `runs` {Run: hparams}.

    Returns {Run: its result}, and the frontier as rows.
    """
    jobs = jobs_of(runs, output_dir)
    finish(processes, jobs.first, jobs.second)
    results = {run: storage.read_json(path) for run, path in jobs.results.items()}
    return results, storage.read_json(jobs.frontier)
