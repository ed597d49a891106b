"""Reward models from few labels, in many epochs and as ensembles, by the reward they allow.

    pipenv run python benchmarks/few_labels.py FOLDER [--quick | --heads] [--seeds 10]
        [--processes N]

writes the table of benchmarks/labels.md, as labels.csv and labels.md, and a picture, from runs of
mock_sentiment, which stay in the folder: the same command goes on where it was interrupted.

The best policy for a reward model at a KL is known without training one: rho * exp(r / beta) / Z.
So is the known reward that it attains, and with it the share of the gain that this reward model
allows. It is exact for the queries that are measured, which are some of all.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from figures import jobs
from figures.tables import groups, write_table

from lm_human_preferences import lm_tasks, storage, train_policy, train_reward
from lm_human_preferences.distributed.comm import LocalComm
from lm_human_preferences.evaluation import optimum, plots
from lm_human_preferences.frozen_head.reward import FrozenReward
from lm_human_preferences.plan.making import reward_phase
from lm_human_preferences.rewards import RewardModel, make_score_fn
from lm_human_preferences.trainers import head_training
from lm_human_preferences.trainers.training_labels import TrainingLabels
from lm_human_preferences.utils.core import ceil_div, set_seed
from lm_human_preferences.utils.logging import announce

if TYPE_CHECKING:
    from matplotlib.axes import Axes

VERSION = 1  # of what a finished run means: a new version repeats all runs
TABLE, PICTURE, SUMMARY = 'labels.csv', 'labels.png', 'labels.md'
EXPLANATION = (
    "Shares of the gain in known reward that is possible at a KL, attained by each reward model's"
    ' own optimum: means over seeds with intervals of 95 %, and the lowest in brackets.'
)
KLS = (1.0, 2.0, 4.0, 6.0)  # nats
DRAWN_KL = 4.0  # of the picture
COLOURS = (plots.BLUE, plots.VERMILION, plots.GREEN, plots.PURPLE)  # of the numbers of epochs
STYLES = (':', '--', '-')  # of the sizes of ensembles, the largest last
# Student's t for an interval of 95 %, for 2 seeds and more; the last is wide enough for all others
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


HEAD = 0  # reward models with a network of their own


@dataclasses.dataclass(frozen=True)
class Scale:
    """Size of the experiment.

    labels: pairs of a number of labels and the share of random answers. members: sizes of
    ensembles; HEAD: a head on frozen hidden states. most_learned: settings that learn from more
    labels, in all epochs, are left out.
    """

    labels: tuple[tuple[int, float], ...]
    epochs: tuple[int, ...]
    members: tuple[int, ...]
    most_learned: int
    seeds: int


FULL = Scale(
    labels=(
        *itertools.product((128, 200, 512, 1024, 2048, 4096), (0.0, 0.3)),
        (200, 0.1),  # an evening of a careful labeller, see docs/labelling.md
    ),
    epochs=(1, 4, 16),
    members=(1, 2, 4),
    most_learned=16384,
    seeds=10,
)
QUICK = Scale(
    labels=((128, 0.3), (512, 0.3)), epochs=(1, 4), members=(1, 2), most_learned=2048, seeds=2
)
HEADS = dataclasses.replace(FULL, labels=((200, 0.1), (1024, 0.3)), epochs=(1,), members=(HEAD,))


@dataclasses.dataclass(frozen=True)
class Run:
    """The training of one ensemble. error: the share of random answers."""

    labels: int
    error: float
    epochs: int
    seed: int

    def hparams(self, experiment: train_reward.HParams) -> train_reward.HParams:
        """The hyperparameters of this variant of `experiment`, train_reward's.

        Simulated labels are made in whole batches; those beyond `labels` are left out later.
        """
        variant = copy.deepcopy(experiment)
        batches = ceil_div(self.labels, experiment.batch_size)
        variant.override_from_dict(
            {
                'labels.source': 'mock',
                'labels.num_train': batches * experiment.batch_size,
                'labels.error': self.error,
                'epochs': self.epochs,
                'run.seed': self.seed,
            }
        )
        variant.validate()
        return variant


def runs_of(scale: Scale) -> list[Run]:
    """All runs, one seed after the other: what is there after a while says something of all."""
    runs = []
    seeds = range(1, scale.seeds + 1)
    for seed, (labels, error), epochs in itertools.product(seeds, scale.labels, scale.epochs):
        if labels * epochs <= scale.most_learned:
            runs.append(Run(labels, error, epochs, seed))
    return runs


def figures(
    hparams: train_policy.HParams,
    output_dir: str,
    quick: bool = False,
    heads: bool = False,
    seeds: int | None = None,
    processes: int | None = None,
) -> None:
    """Write the tables and the picture into `output_dir`; finished runs stay there.

    hparams: of the experiment whose reward model is trained. The others: see `parser_of`.
    """
    scale = QUICK if quick else HEADS if heads else FULL
    scale = dataclasses.replace(scale, seeds=seeds or scale.seeds)
    rows = _run_all(hparams, scale, output_dir, processes)
    lines = summary(rows)
    announce(*lines, EXPLANATION)
    write_table(os.path.join(output_dir, TABLE), rows)
    draw(os.path.join(output_dir, PICTURE), rows)
    storage.write_bytes(os.path.join(output_dir, SUMMARY), '\n'.join([*lines, '']).encode())
    announce(f'{PICTURE}, {TABLE} and {SUMMARY} are in {output_dir}')


def _run_all(
    hparams: train_policy.HParams, scale: Scale, output_dir: str, processes: int | None
) -> list[dict[str, Any]]:
    """Do what is missing; returns the rows of the table."""
    experiment = hparams.rewards.train_new_model
    assert experiment is not None
    task = json.dumps(hparams.task.to_nested_dict())
    paths: dict[Run, str] = {}
    todo: dict[str, jobs.Job] = {}
    for run in runs_of(scale):
        variant = run.hparams(experiment)
        names = [f'{name}{value:g}' for name, value in dataclasses.asdict(run).items()]
        names.append(f'members{"_".join(map(str, scale.members))}')
        paths[run] = f'{jobs.result_path(output_dir, f"labels{VERSION}", variant, *names)}.json'
        todo[paths[run]] = run_members, variant, run.labels, scale.members, task
    jobs.finish(processes, todo)
    rows = []
    for run, path in sorted(paths.items(), key=lambda item: dataclasses.astuple(item[0])):
        settings = dataclasses.asdict(run)
        rows += [{**settings, **result} for result in storage.read_json(path)]
    return rows


def run_members(
    path: str, hparams: train_reward.HParams, labels: int, members: tuple[int, ...], task: str
) -> None:
    """A job: train as many reward models as the largest of `members` says on the same `labels`.

    Writes what the first, and the mean of the first few, allow at each KL.
    """
    every = jobs.known_responses(task)
    known = jobs.Known(*(values[jobs.QUERIES_OF_REWARD_MODEL] for values in every))
    queries, length = known.queries, hparams.task.response_length
    if members == (HEAD,):
        head = _head(hparams, labels)
        score = make_score_fn(hparams.task, head)
        n_vocab = head.reference.model.sizes.n_vocab
        scores = [optimum.all_scores(score, queries, n_vocab, length)]
    else:
        models = _trained(hparams, labels, max(members))
        scores = [optimum.all_rewards(model, queries, length) for model in models]
    results = []
    for count in members:
        for point in shares(torch.stack(scores[: count or 1]).mean(0), known):
            results.append({'members': count, **point})
    storage.write_json(path, results)


def _trained(hparams: train_reward.HParams, count: int, members: int) -> Iterator[RewardModel]:
    """The members that train_reward would train on the first `count` of the same labels."""
    for member in range(members):
        of_all = _trainer(hparams, member)
        trainer = train_reward.RewardModelTrainer(
            reward_model=of_all.reward_model,
            policy=of_all.policy,
            query_sampler=of_all.query_sampler,
            labels=_first(of_all.labels, count),
            phase=reward_phase(hparams),
            logger=of_all.logger,
            comm=LocalComm(),
        )
        trainer.prepare()
        for _ in range(trainer.total_steps):
            trainer.step()
        trainer.finish()
        yield trainer.reward_model


def _head(hparams: train_reward.HParams, count: int) -> FrozenReward:
    """A head on frozen hidden states that is fitted to the labels of `_trained`."""
    of_all = _trainer(hparams, member=0)
    labels = _first(of_all.labels, count)
    fitted = head_training.fit(reward_phase(hparams), of_all.policy, labels, LocalComm())
    return FrozenReward(fitted.head, of_all.policy)


def _trainer(hparams: train_reward.HParams, member: int) -> train_reward.RewardModelTrainer:
    """The trainer of a member on all labels that are made."""
    initial_model = lm_tasks.initial_model(hparams.task.policy.initial_model)
    assert hparams.run.seed is not None
    set_seed(hparams.run.seed)
    phase = dataclasses.replace(reward_phase(hparams), member=member)
    labels = TrainingLabels(phase, LocalComm())
    return train_reward.build_trainer(phase, initial_model, LocalComm(), labels)


def _first(labels: dict[str, torch.Tensor], count: int) -> dict[str, torch.Tensor]:
    return {field: values[:count] for field, values in labels.items()}


def shares(rewards: torch.Tensor, known: jobs.Known) -> list[dict[str, float]]:
    """Return the share of the known reward that the best policies for `rewards` attain.

    A row for each of KLS: the known reward, and its share of the gain that is possible there.
    """
    base = optimum.expected(known.ref_logprobs, known.scores).mean().item()
    rows = []
    for kl in KLS:
        _, beta = optimum.frontier_at(kl, known.ref_logprobs, rewards)
        _, judged = optimum.judged(known.ref_logprobs, rewards, known.scores, beta)
        best = optimum.frontier_at(kl, known.ref_logprobs, known.scores)[0]
        reward = judged.mean().item()
        rows.append({'kl': kl, 'known_reward': reward, 'share': (reward - base) / (best - base)})
    return rows


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """Lines of a table in Markdown: at each KL the share, its interval, and the worst seed."""
    heads = ['labels', 'error', 'epochs', 'members', *(f'KL {kl:g}' for kl in KLS)]
    lines = [_line(heads), _line(['---'] * len(heads))]
    for settings, of_setting in groups(rows, 'labels', 'error', 'epochs', 'members').items():
        cells = [f'{setting:g}' for setting in settings]
        for of_kl in groups(of_setting, 'kl').values():
            values = [row['share'] for row in of_kl]
            cells.append(f'{interval(values)} ({min(values):.2f})')
        lines.append(_line(cells))
    return lines


def _line(cells: list[str]) -> str:
    return f'| {" | ".join(cells)} |'


def interval(values: list[float]) -> str:
    """The mean of independent `values`, and how far its interval of 95 % reaches to either side."""
    mean = f'{np.mean(values):.2f}'
    if len(values) == 1:
        return mean
    student = STUDENT[min(len(values) - 2, len(STUDENT) - 1)]
    half = student * np.std(values, ddof=1) / len(values) ** 0.5
    return f'{mean} ± {half:.2f}'


def draw(path: str, rows: list[dict[str, Any]]) -> None:
    """Draw the rows of labels.csv: a panel for each share of random answers."""
    of_kl = sorted((row for row in rows if row['kl'] == DRAWN_KL), key=lambda row: row['error'])
    panels = groups(of_kl, 'error')
    figure, axes = plots.panels(len(panels), width=5.6, height=3.9)
    for panel, ((error,), of_error) in zip(axes, panels.items()):
        _draw(panel, of_error)
        plots.label(
            panel,
            title=f'{error:.0%} of the answers random',
            x='labels',
            y=f'share of the gain possible at KL {DRAWN_KL:g}',
        )
    plots.legend(axes[-1], loc='upper left', bbox_to_anchor=(1, 1))
    plots.save(figure, path)


def _draw(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """A line through the means of the seeds for each number of epochs and size of ensemble."""
    epochs = sorted({row['epochs'] for row in rows})
    members = sorted({row['members'] for row in rows})
    colours = dict(zip(epochs, COLOURS))
    styles = dict(zip(reversed(members), reversed(STYLES)))
    for (passes, count), of_setting in groups(rows, 'epochs', 'members').items():
        by_labels = groups(of_setting, 'labels')
        axes.plot(
            [labels for (labels,) in by_labels],
            [np.mean([row['share'] for row in seeds]) for seeds in by_labels.values()],
            color=colours[passes],
            linestyle=styles[count],
            marker='.',
            label=f'epochs: {passes}, members: {count}',
        )
    numbers = sorted({row['labels'] for row in rows})
    axes.set_xscale('log', base=2)
    axes.set_xticks(numbers, [str(number) for number in numbers])


if __name__ == '__main__':
    parser = jobs.parser_of(__doc__, 10)
    parser.add_argument('--heads', action='store_true', help='on frozen hidden states instead')
    figures(jobs.experiment(), **vars(parser.parse_args()))
