"""Labels collected while the policy trains against as many collected before (paper, section 2.3).

    pipenv run python benchmarks/online_labels.py FOLDER [--quick] [--seeds 5] [--ensemble 1]

writes the table of benchmarks/labels.md and the picture of docs/online.md, from runs of
mock_sentiment, which stay in the folder: the same command goes on where it was interrupted.

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
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import plots
from figures import jobs
from figures.tables import groups, write_table

from lm_human_preferences import lm_tasks, storage, train_policy
from lm_human_preferences.evaluation import optimum
from lm_human_preferences.hparams.task_options import TaskHParams
from lm_human_preferences.plan.phases import policy_phase
from lm_human_preferences.reward_sources.loading import load_reward_model
from lm_human_preferences.rewards import RewardModel
from lm_human_preferences.utils.core import random_stream
from lm_human_preferences.utils.logging import announce

if TYPE_CHECKING:
    from matplotlib.axes import Axes

VERSION = 1  # of what a finished run means: a new version repeats all runs
TABLE, PICTURE = 'online.csv', 'online.png'
OWN_QUESTIONS = 2048  # about the policy at the end
TARGET = 4.0  # nats, where offline reward models are far from what they have learned from
# Of the KL coefficient: short, as each new reward model moves the KL away from its target.
HORIZON = 1000
KL_COEF = 0.5  # near the one at which the KL divergence has its target
BATCH_SIZE = 8  # of the reward model, if it goes once through its few labels
COLOURS = (plots.BLUE, plots.VERMILION, plots.GREEN, plots.PURPLE)  # of the labellers' errors
CHANCE = 0.25  # of a choice among four
SUMMARY = '{:>7} {:>11} {:>6} {:>7} {:>7} {:>15} {:>9} {:>15}'  # its columns


@dataclasses.dataclass(frozen=True)
class Scale:
    """Size of the experiment.

    labels: of each run. initial: those before its first episode. ensemble, epochs: of its reward
    models.
    """

    labels: int
    initial: int
    episodes: int
    retrainings: tuple[int, ...]
    errors: tuple[float, ...]
    seeds: int
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

    ensemble, epochs, initial: see Scale; initial None is that of the set. The others: see
    jobs.parser_of.
    """
    scale = QUICK if quick else FULL
    scale = dataclasses.replace(
        scale,
        seeds=seeds or scale.seeds,
        ensemble=ensemble,
        epochs=epochs,
        initial=initial or scale.initial,
    )
    rows = _run_all(hparams, scale, output_dir, processes)
    announce(*summary(rows))
    write_table(os.path.join(output_dir, TABLE), rows)
    draw(os.path.join(output_dir, PICTURE), rows, scale.labels)
    announce(f'{PICTURE} and {TABLE} are in {output_dir}')


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
    phase = policy_phase(hparams)
    trainer, (base, last) = jobs.measured_steps(phase, known)
    best = optimum.frontier_at(last['kl'], known.ref_logprobs, known.scores)[0]
    result = {
        'kl': last['kl'],
        'known_reward': last['known_reward'],
        'optimal_reward': best,
        'share': (last['known_reward'] - base['known_reward']) / (best - base['known_reward']),
        'own_accuracy': own_accuracy(trainer, hparams.task),
    }
    storage.write_json(path, result)


def own_accuracy(trainer: train_policy.PPOTrainer, task: TaskHParams) -> float:
    """Return how often the reward model chooses as the known reward does; chance is 0.25.

    They choose among four responses of the policy that are not all equal.
    """
    policy = trainer.policy
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
    for (error, retrainings), seeds in sorted(groups(rows, 'error', 'retrainings').items()):
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


def draw(path: str, rows: list[dict[str, Any]], labels: int) -> None:
    """Draw the rows of online.csv. labels: of each run."""
    figure, (left, right) = plots.panels(2, width=5.6, height=3.9)
    seeds = len(groups(rows, 'seed'))
    _draw(left, rows, 'share')
    plots.label(
        left,
        title=f'{labels} labels, mean and range of {seeds} seeds',
        x='trainings of the reward model after the first',
        y='share of the gain that is possible at its KL',
    )
    _draw(right, rows, 'own_accuracy')
    right.axhline(CHANCE, color=plots.GREY, linestyle=':', linewidth=1, label='chance')
    plots.label(
        right,
        title="reward model on the policy's own samples",
        x='trainings of the reward model after the first',
        y='share of right choices among four',
    )
    plots.legend(right, loc='upper left', bbox_to_anchor=(1, 1))
    plots.save(figure, path)


def _draw(axes: Axes, rows: list[dict[str, Any]], name: str) -> None:
    """For each error of the labellers a line through the means of the seeds, and their range."""
    counts = sorted({row['retrainings'] for row in rows})
    for ((error,), of_error), colour in zip(groups(rows, 'error').items(), COLOURS):
        by_count = groups(of_error, 'retrainings')
        values = [[row[name] for row in by_count[count,]] for count in counts]
        positions = range(len(counts))
        axes.plot(
            positions,
            [np.mean(of_seeds) for of_seeds in values],
            color=colour,
            marker='o',
            label=f'{error:.0%} of the answers random',
        )
        lows, highs = [min(v) for v in values], [max(v) for v in values]
        axes.fill_between(positions, lows, highs, color=colour, alpha=0.2, linewidth=0)
    axes.set_xticks(range(len(counts)), ['0\n(all labels before)', *map(str, counts[1:])])


if __name__ == '__main__':
    parser = jobs.parser_of(__doc__, 5)
    parser.add_argument('--ensemble', type=int, default=1, help='reward models of each run')
    parser.add_argument('--epochs', type=int, default=1, help='of reward models over the labels')
    parser.add_argument(
        '--initial', type=int, help='labels before the first episode; by default a quarter'
    )
    figures(jobs.experiment(), **vars(parser.parse_args()))
