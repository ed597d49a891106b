"""Labels collected while the policy trains against as many collected before (paper, section 2.3).

The paper says that online labels were important where the policy moves far from the data. Here the
reward is known, so that this can be measured: with and without errors of the labellers, with few
and with many trainings of the reward model.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import os
from typing import Any

import numpy as np
import torch

from lm_human_preferences import lm_tasks, storage, train_policy
from lm_human_preferences.distributed.comm import LocalComm
from lm_human_preferences.errors import OptionError
from lm_human_preferences.evaluation import optimum
from lm_human_preferences.reproduction import jobs, online_picture, plan
from lm_human_preferences.reproduction.figures import write_table
from lm_human_preferences.rewards import RewardModel, load_reward_model
from lm_human_preferences.storage import outputs
from lm_human_preferences.training.time_left import TimeLeft
from lm_human_preferences.utils.core import random_stream
from lm_human_preferences.utils.logging import log_line

VERSION = 1  # of what a finished run means: a new version repeats all runs
TABLE, PICTURE = 'online.csv', 'online.png'
OWN_QUESTIONS = 2048  # about the policy at the end
TARGET = 4.0  # nats, where offline reward models are far from what they have learned from
# Of the KL coefficient: short, as each new reward model moves the KL away from its target.
HORIZON = 1000
KL_COEF = 0.5  # near the one at which the KL divergence has its target
BATCH_SIZE = 8  # of the reward model, if it goes once through its few labels
SUMMARY = '{:>7} {:>11} {:>6} {:>7} {:>7} {:>15} {:>9} {:>15}'  # its columns


@dataclasses.dataclass(frozen=True)
class Scale(plan.Seeds):
    """How much is run.

    labels: of each run. initial: those before its first episode. ensemble, epochs: of its reward
    models.
    """

    labels: int
    initial: int
    episodes: int
    retrainings: tuple[int, ...]
    errors: tuple[float, ...]
    ensemble: int = 1
    epochs: int = 1


FULL = Scale(
    labels=1024, initial=256, episodes=51200, retrainings=(0, 3, 19), errors=(0.0, 0.3), seeds=5
)
QUICK = Scale(labels=256, initial=64, episodes=2560, retrainings=(0, 3), errors=(0.0, 0.3), seeds=2)


@dataclasses.dataclass(frozen=True)
class Run:
    """The training of one policy.

    retrainings: 0 where all labels come first. error: of the labeller.
    """

    retrainings: int
    error: float
    seed: int

    def hparams(self, experiment: train_policy.HParams, scale: Scale) -> train_policy.HParams:
        """The hyperparameters of this variant of `experiment`, train_policy's."""
        variant = copy.deepcopy(experiment)
        variant.override_from_dict(
            {
                'run.seed': self.seed,
                'run.evaluate': False,
                'ppo.total_episodes': scale.episodes,
                'rewards.kl_coef': KL_COEF,
                'rewards.adaptive_kl.target': TARGET,
                'rewards.adaptive_kl.horizon': HORIZON,
                'rewards.train_new_model.run.seed': self.seed,
                'rewards.ensemble': scale.ensemble,
                'rewards.train_new_model.epochs': scale.epochs,
                'rewards.online': 'on',
                'rewards.online.labels': scale.labels,
                'rewards.online.initial': scale.initial if self.retrainings else scale.labels,
                'rewards.online.retrainings': self.retrainings,
                'rewards.online.ahead': 0,
                'rewards.online.validation': 0.0,
                'rewards.online.source': 'mock',
                'rewards.online.error': self.error,
            }
        )
        if scale.epochs == 1:
            assert variant.rewards.train_new_model is not None
            variant.rewards.train_new_model.batch_size = BATCH_SIZE
        variant.run.save_interval = variant.ppo.nupdates  # measured at the end
        return variant


def runs_of(scale: Scale) -> list[Run]:
    """All runs, those that take longest first."""
    counts = sorted(scale.retrainings, reverse=True)
    seeds = range(1, scale.seeds + 1)
    return [Run(*values) for values in itertools.product(counts, scale.errors, seeds)]


def figures(
    hparams: train_policy.HParams,
    output_dir: str,
    quick: bool = False,
    seeds: int | None = None,
    processes: int | None = None,
    ensemble: int = 1,
    epochs: int = 1,
    initial: int | None = None,
) -> None:
    """Draw the picture into `output_dir`, from runs of `hparams`, which stay there.

    quick: the small set. seeds: runs of each kind, None for as many as the set has. processes: None
    for one per CPU. ensemble, epochs, initial: see Scale; initial None is that of the set.
    UserError for more initial labels than a run has.
    """
    outputs.check_output_dir(output_dir, TABLE, PICTURE)
    scale = (QUICK if quick else FULL).with_seeds(seeds)
    scale = dataclasses.replace(
        scale, ensemble=ensemble, epochs=epochs, initial=initial or scale.initial
    )
    if scale.initial > scale.labels:
        raise OptionError(
            '--initial', f'{initial} is more than the {scale.labels} labels that each run learns'
        )
    rows = _run_all(hparams, scale, output_dir, processes)
    log_line(*summary(rows))
    with outputs.translate_errors(output_dir, fix='make room there, and the same command goes on'):
        write_table(os.path.join(output_dir, TABLE), rows)
        online_picture.draw(os.path.join(output_dir, PICTURE), rows, scale.labels)
    log_line(f'{PICTURE} and {TABLE} are in {output_dir}')


def _run_all(
    hparams: train_policy.HParams, scale: Scale, output_dir: str, processes: int | None
) -> list[dict[str, Any]]:
    """Do what is missing; returns the rows of the table."""
    task = json.dumps(hparams.task.to_nested_dict())
    paths: dict[Run, str] = {}
    todo: dict[str, jobs.Job] = {}
    for run in runs_of(scale):
        variant = run.hparams(hparams, scale)
        names = [f'retrained{run.retrainings}', f'error{run.error:g}', f'seed{run.seed}']
        folder = f'online{VERSION}'
        paths[run] = f'{jobs.result_path(output_dir, folder, variant, *names)}.json'
        todo[paths[run]] = run_online, variant, task
    jobs.finish(processes, todo)
    return [
        {**dataclasses.asdict(run), **storage.read_json(path)}
        for run, path in sorted(paths.items(), key=lambda item: dataclasses.astuple(item[0]))
    ]


def run_online(path: str, hparams: train_policy.HParams, task: str) -> None:
    """A job: train a policy whose labels are collected, and measure it exactly at the end."""
    known = jobs.known_responses(task)
    with jobs.Curve(known) as curve:
        trainer = train_policy.start(hparams, curve, LocalComm())
        train_policy.take_steps(trainer, curve, TimeLeft({'policy': 1}))
    base, last = curve.points
    best = optimum.frontier_reward_at(last['kl'], known.ref_logprobs, known.scores)
    result = {
        'models': trainer.reward_version,
        'kl': last['kl'],
        'known_reward': last['known_reward'],
        'optimal_reward': best,
        'share': (last['known_reward'] - base['known_reward']) / (best - base['known_reward']),
        'own_accuracy': own_accuracy(trainer),
    }
    storage.write_json(path, result)


def own_accuracy(trainer: train_policy.PPOTrainer) -> float:
    """How often the reward model chooses as the known reward does; chance is 0.25.

    They choose among four responses of the policy that are not all equal.
    """
    policy, task = trainer.policy, trainer.hparams.task
    members = [network for network in trainer.networks.values() if isinstance(network, RewardModel)]
    with random_stream('own questions'):
        sampler = lm_tasks.make_query_sampler(
            hparams=task, encoder=policy.encoder, batch_size=OWN_QUESTIONS, mode='test'
        )
        queries = sampler()['tokens']
        rows = queries.repeat_interleave(4, 0)
        responses = policy.respond(rows, length=task.response_length)['responses']
    known_reward = load_reward_model('mock', policy.trained_model.encoding)
    chosen, right = (
        torch.stack([model.score(rows, responses) for model in models])
        .mean(0)
        .reshape(-1, 4)
        .argmax(1)
        for models in (members, [known_reward])
    )
    of_query = responses.reshape(len(queries), 4, -1)
    differ = (of_query != of_query[:, :1]).flatten(1).any(1)
    return (chosen == right)[differ].double().mean().item()


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """Lines of a table: means over seeds, and the range of what counts."""
    lines = [
        SUMMARY.format(
            'error', 'retrainings', 'KL', 'reward', 'share', 'of seeds', 'accuracy', 'of seeds'
        )
    ]
    groups: dict[tuple[float, int], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row['error'], row['retrainings']), []).append(row)
    for (error, retrainings), seeds in sorted(groups.items()):
        columns = {name: [row[name] for row in seeds] for name in seeds[0]}
        shares, accuracies = columns['share'], columns['own_accuracy']
        lines.append(
            SUMMARY.format(
                f'{error:g}',
                retrainings,
                f'{np.mean(columns["kl"]):.2f}',
                f'{np.mean(columns["known_reward"]):.2f}',
                f'{np.mean(shares):.1%}',
                f'{min(shares):.1%} to {max(shares):.1%}',
                f'{np.mean(accuracies):.1%}',
                f'{min(accuracies):.1%} to {max(accuracies):.1%}',
            )
        )
    return lines
