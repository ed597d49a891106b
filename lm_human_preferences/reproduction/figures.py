"""The paper's Figures 2 and 3 in miniature (section 3.1.1): learning from labels of a reward that
is known."""

from __future__ import annotations

import copy
import csv
import dataclasses
import functools
import hashlib
import inspect
import io
import itertools
import json
import os
import shlex
import shutil
from typing import Any

import numpy as np
import torch

from lm_human_preferences import lm_tasks, rewards, storage, train_policy, train_reward
from lm_human_preferences.checkpointing.checkpointer import Checkpointer
from lm_human_preferences.distributed.comm import LocalComm
from lm_human_preferences.evaluation import measure, optimum
from lm_human_preferences.labels import simulated
from lm_human_preferences.language import encodings
from lm_human_preferences.policy import Policy
from lm_human_preferences.reproduction import figure_plots, worker_pool
from lm_human_preferences.storage import outputs
from lm_human_preferences.synthetic import known_reward
from lm_human_preferences.training.time_left import TimeLeft
from lm_human_preferences.utils.core import ceil_div
from lm_human_preferences.utils.logging import log_line, progress

VERSION = 2  # of what a finished run means: with another one, all runs are done again
POINTS = 8  # of a curve of Figure 2
HORIZON = 10_000  # the paper's: the KL coefficient begins near the right value, see run_policy

Job = tuple[Any, ...]  # a function and its arguments after the path, see worker_pool.finish


@dataclasses.dataclass(frozen=True)
class Scale:
    """What is run. labels: sizes of label sets; targets: KLs in nats, curve that of Figure 2;
    episodes: budgets."""

    labels: tuple[int, ...]
    targets: tuple[float, ...]
    curve: float
    episodes: tuple[int, ...]
    seeds: int


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
    """Training of one policy. labels: how many its reward model saw, None for direct access to the
    known reward."""

    labels: int | None
    target: float
    episodes: int
    seed: int
    points: int = 1  # at which it is measured

    @property
    def access(self) -> str:
        """What the policy learns from, in a word."""
        return str(self.labels or 'direct')

    def hparams(self, experiment: train_policy.HParams) -> train_policy.HParams:
        """The hyperparameters of this variant of `experiment`, train_policy's."""
        found = copy.deepcopy(experiment)
        settings = {
            'run.seed': self.seed,
            'ppo.total_episodes': self.episodes,
            'rewards.adaptive_kl.horizon': HORIZON,
            'rewards.adaptive_kl.target': self.target,
        }
        if self.labels is None:
            settings |= {'rewards.train_new_model': 'off', 'rewards.trained_model': 'mock'}
        else:
            settings |= {
                'rewards.train_new_model.labels.num_train': self.labels,
                'rewards.train_new_model.run.seed': self.seed,
            }
        found.override_from_dict(settings)
        found.run.save_interval = ceil_div(train_policy.nupdates(found), self.points)
        found.validate()
        return found


def plan(scale: Scale) -> list[Run]:
    """The runs of both figures, the longest first."""
    seeds = range(1, scale.seeds + 1)
    curve = scale.curve, max(scale.episodes)
    return [
        Run(labels, target, episodes, seed, POINTS if (target, episodes) == curve else 1)
        for episodes in sorted(scale.episodes, reverse=True)
        for labels, target, seed in itertools.product((None, *scale.labels), scale.targets, seeds)
    ]


def place(
    output_dir: str, kind: str, hparams: train_policy.HParams | train_reward.HParams, *names: str
) -> str:
    """Where the result of a job is kept: named by what it is, and by a digest of all that it
    depends on."""
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


@functools.lru_cache(maxsize=1)
def everything(task: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What is known of all responses, for a task as JSON: the queries (queries, query_length), and
    both (queries, responses) the initial model's log-probabilities and the known rewards.
    """
    hparams = train_policy.HParams()
    hparams.task.parse_json(task)
    settings = hparams.task
    trained_model = lm_tasks.initial_model(settings.policy.initial_model)
    encoder = trained_model.encoding.get_encoder()
    reference = Policy(
        trained_model,
        embed_queries=lm_tasks.query_formatter(settings, encoder),
        temperature=settings.policy.temperature,
    )
    score_fn = rewards.make_score_fn(
        settings, rewards.load_reward_model('mock', trained_model.encoding)
    )
    queries = measure.queries_of(hparams, encoder, None)
    return (
        queries,
        optimum.all_logprobs(reference, queries, settings.response_length),
        optimum.all_scores(
            score_fn, queries, trained_model.hparams().n_vocab, settings.response_length
        ),
    )


def write_frontier(path: str, task: str) -> None:
    """A job: the highest reward possible at some KLs."""
    _, ref_logprobs, scores = everything(task)
    kls, best = optimum.frontier(ref_logprobs, scores, optimum.beta_grid(scores)).tolist()
    storage.write_json(path, [{'kl': kl, 'known_reward': reward} for kl, reward in zip(kls, best)])


def run_reward(path: str, hparams: train_reward.HParams) -> None:
    """A job: train a reward model into the directory `path`."""
    hparams.run.save_dir = f'{path}.part'
    shutil.rmtree(hparams.run.save_dir, ignore_errors=True)
    train_reward.train(hparams, LocalComm())
    os.rename(hparams.run.save_dir, path)


def run_policy(path: str, hparams: train_policy.HParams, reward_model: str, task: str) -> None:
    """A job: train a policy as ./launch.py train_policy does, and measure it exactly on the way.

    The KL coefficient begins where the optimum has the KL that is aimed at: these runs are too
    short to look for it.
    """
    queries, ref_logprobs, scores = everything(task)
    assert hparams.rewards.adaptive_kl is not None
    hparams.rewards.train_new_model, hparams.rewards.trained_model = None, reward_model
    own, few = scores, slice(None)
    if reward_model != 'mock':  # where a few of the queries will do
        few = slice(None, None, 8)
        own = optimum.all_rewards(
            rewards.TrainedRewardModel(reward_model, encodings.Reviews),
            queries[few],
            hparams.task.response_length,
        )
    hparams.rewards.kl_coef = optimum.frontier_at(
        hparams.rewards.adaptive_kl.target, ref_logprobs[few], own
    )[1]
    with Curve(queries, ref_logprobs, scores) as curve:
        trainer = train_policy.start(hparams, curve, LocalComm())
        train_policy.take_steps(trainer, curve, TimeLeft({'policy': 1}))
    optimal = optimum.frontier_reward_at(curve.points[-1]['kl'], ref_logprobs, scores)
    storage.write_json(
        path, {'kl_coef': hparams.rewards.kl_coef, 'curve': curve.points, 'optimal_reward': optimal}
    )


class Curve(Checkpointer):
    """How good a policy is, whenever another run would save it; see `everything`."""

    def __init__(
        self, queries: torch.Tensor, ref_logprobs: torch.Tensor, scores: torch.Tensor
    ) -> None:
        super().__init__(None, LocalComm(), resume=False)
        self.queries, self.ref_logprobs, self.scores = queries, ref_logprobs, scores
        self.points = [
            {
                'episodes': 0,
                'kl': 0.0,
                'known_reward': optimum.expected(ref_logprobs, scores).mean().item(),
            }
        ]

    def save(self, trainer: train_policy.PPOTrainer) -> None:
        """Measure the policy of `trainer` on all responses, and add the result to `points`."""
        logprobs = optimum.all_logprobs(
            trainer.policy, self.queries, trainer.hparams.task.response_length
        )
        self.points.append(
            {
                'episodes': trainer.global_step * trainer.hparams.ppo.batch_size,
                'kl': optimum.kl(logprobs, self.ref_logprobs).mean().item(),
                'known_reward': optimum.expected(logprobs, self.scores).mean().item(),
            }
        )


def jobs_of(
    runs: dict[Run, train_policy.HParams], output_dir: str
) -> tuple[dict[str, Job], dict[str, Job], dict[Run, str], str]:
    """What `runs` {Run: hparams} come to: (jobs that come first, jobs, {Run: file with its result},
    frontier's file).

    Jobs are as worker_pool.finish takes them. Policies share the reward models, of one seed and
    size each.
    """
    hparams = train_policy.HParams(task=next(iter(runs.values())).task)
    task = json.dumps(hparams.task.to_nested_dict())
    frontier = f'{place(output_dir, "runs", hparams, "frontier")}.json'
    first: dict[str, Job] = {frontier: (write_frontier, task)}
    second: dict[str, Job] = {}
    files: dict[Run, str] = {}
    for run, hparams in runs.items():
        new, reward_model = hparams.rewards.train_new_model, 'mock'
        if new is not None:
            reward_model = place(output_dir, 'reward_models', new, run.access, f'seed{run.seed}')
            first[reward_model] = run_reward, new
        name = place(
            output_dir,
            'runs',
            hparams,
            run.access,
            f'kl{run.target:g}',
            str(run.episodes),
            f'seed{run.seed}',
        )
        files[run] = f'{name}.json'
        second[files[run]] = run_policy, hparams, reward_model, task
    return first, second, files, frontier


def run_all(
    runs: dict[Run, train_policy.HParams], output_dir: str, processes: int
) -> tuple[dict[Run, dict[str, Any]], list[dict[str, float]]]:
    """Do what is missing of `runs` {Run: hparams}; returns ({Run: its result}, the frontier as
    rows)."""
    first, second, files, frontier = jobs_of(runs, output_dir)
    done = sum(map(os.path.exists, (*first, *second)))
    with (
        progress(
            total=len(first) + len(second),
            initial=done,
            comm=LocalComm(),
            desc='runs',
            unit='run',
        ) as bar,
        worker_pool.pool(processes) as pool,
    ):
        for jobs in (first, second):
            worker_pool.finish(pool, jobs, bar.update)
    return {run: storage.read_json(path) for run, path in files.items()}, storage.read_json(
        frontier
    )


def curve_rows(results: dict[Run, dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of figure2.csv: what was measured during those runs of which there is a curve."""
    return [
        {'access': run.access, 'seed': run.seed, **point}
        for run, result in results.items()
        if run.points > 1
        for point in result['curve']
    ]


def final_rows(results: dict[Run, dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of figure3.csv: where each run ended, the best reward possible there, the share of
    its gain attained."""
    rows = []
    for run, result in results.items():
        base, last, optimal = result['curve'][0], result['curve'][-1], result['optimal_reward']
        rows.append(
            {
                'access': run.access,
                'target': run.target,
                'episodes': run.episodes,
                'seed': run.seed,
                'kl': last['kl'],
                'known_reward': last['known_reward'],
                'optimal_reward': optimal,
                'share': (
                    (last['known_reward'] - base['known_reward']) / (optimal - base['known_reward'])
                ),
            }
        )
    return rows


def write_table(path: str, rows: list[dict[str, Any]]) -> None:
    """Write `rows`, dicts of the same keys, as CSV; all of it appears, or nothing."""
    text = io.StringIO(newline='')
    table = csv.DictWriter(text, rows[0], lineterminator='\n')
    table.writeheader()
    table.writerows(rows)
    with storage.atomic_write(path) as (file,):
        file.write(text.getvalue().encode())


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """Lines of a table: the rows of figure3.csv as means over seeds, with the least and the
    greatest share."""
    columns = '{:>8} {:>9} {:>7} {:>6} {:>7} {:>8} {:>6}  {}'
    lines = [
        columns.format(
            'access', 'episodes', 'target', 'KL', 'reward', 'optimum', 'share', 'of seeds'
        )
    ]
    for (access, episodes, target), seeds in figure_plots.groups(
        rows, 'access', 'episodes', 'target'
    ).items():
        shares = [row['share'] for row in seeds]
        kl, reward, best, share = (
            np.mean([row[name] for row in seeds])
            for name in ('kl', 'known_reward', 'optimal_reward', 'share')
        )
        lines.append(
            columns.format(
                access,
                episodes,
                f'{target:g}',
                f'{kl:.2f}',
                f'{reward:.2f}',
                f'{best:.2f}',
                f'{share:.1%}',
                f'{min(shares):.1%} to {max(shares):.1%}',
            )
        )
    return lines


def figures(
    hparams: train_policy.HParams,
    output_dir: str,
    quick: bool = False,
    seeds: int | None = None,
    processes: int | None = None,
) -> None:
    """Draw both figures into `output_dir`, from runs of `hparams`, train_policy's, that are kept
    there.

    quick: the small set; seeds: of each run, None for as many as the set has; processes: None for
    one per CPU.
    """
    tables, pictures = ('figure2', 'figure3', 'frontier'), ('figure2.png', 'figure3.png')
    outputs.check_output_dir(output_dir, *(f'{name}.csv' for name in tables), *pictures)
    scale = QUICK if quick else FULL
    runs = {
        run: run.hparams(hparams)
        for run in plan(dataclasses.replace(scale, seeds=seeds or scale.seeds))
    }
    results, frontier = run_all(runs, output_dir, processes or len(os.sched_getaffinity(0)))
    rows = dict(zip(tables, (curve_rows(results), final_rows(results), frontier), strict=True))
    log_line(
        *summary(rows['figure3']),
        'Each run starts at the KL coefficient at which the exact optimum has the target KL: the'
        ' runs are too short to look for it.',
    )
    kls, bests = ([row[key] for row in frontier] for key in ('kl', 'known_reward'))
    optimal = np.interp(scale.curve, kls, bests)
    with outputs.translate_errors(output_dir, fix='make room there, and the same command goes on'):
        for name in tables:
            write_table(os.path.join(output_dir, f'{name}.csv'), rows[name])
        figure2, figure3 = (os.path.join(output_dir, name) for name in pictures)
        figure_plots.figure2(figure2, rows['figure2'], scale.curve, optimal)
        figure_plots.figure3(figure3, rows['figure3'], frontier)
    log_line(
        f'figure2.png, figure3.png and the tables they show are in {output_dir}',
        f'More seeds, without redoing these runs: ./launch.py figures {shlex.quote(output_dir)}'
        f'{" --quick" if quick else ""} --seeds {2 * (seeds or scale.seeds)}',
    )
