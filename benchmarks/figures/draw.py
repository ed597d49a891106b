"""Paper's Figures 2 and 3 in miniature (section 3.1.1): policies on labels of a known reward.

    pipenv run python benchmarks/figures/draw.py FOLDER [--quick] [--seeds 5] [--processes N]

trains policies and reward models of mock_sentiment and draws them beside the paper's own curves.
Runs stay in the folder: the same command goes on where it was interrupted.
"""

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from figures import figure_plots, jobs
from figures.jobs import Run
from figures.tables import groups, write_table
from lm_human_preferences import errors, train_policy
from lm_human_preferences.errors import os_errors_as
from lm_human_preferences.utils.logging import announce

TABLES = ('figure2', 'figure3', 'frontier')
PICTURES = ('figure2.png', 'figure3.png')
SUMMARY = '{:>8} {:>9} {:>7} {:>6} {:>7} {:>8} {:>6}  {}'  # its columns


def figures(
    hparams: train_policy.HParams,
    output_dir: str,
    quick: bool = False,
    seeds: int | None = None,
    processes: int | None = None,
) -> None:
    """Draw both figures into `output_dir` from runs of `hparams`; quick: of few runs."""
    scale = jobs.QUICK if quick else jobs.FULL
    scale = dataclasses.replace(scale, seeds=seeds or scale.seeds)
    runs = {run: run.hparams(hparams) for run in jobs.runs_of(scale)}
    results, frontier = jobs.run_all(runs, output_dir, processes)
    rows = {
        'figure2': curve_rows(results),
        'figure3': final_rows(results),
        'frontier': frontier,
    }
    announce(
        *summary(rows['figure3']),
        'Each run starts at the KL coefficient at which the exact optimum has the target KL: the'
        ' runs are too short to look for it.',
    )
    with os_errors_as(f'cannot write to {output_dir}', ': make room, and the same command goes on'):
        for name in TABLES:
            write_table(os.path.join(output_dir, f'{name}.csv'), rows[name])
        _draw(rows, scale.curve, output_dir)
    words = [output_dir, *(['--quick'] if quick else []), '--seeds', str(2 * scale.seeds)]
    more = errors.typed('python benchmarks/figures/draw.py', *words)
    announce(
        f'figure2.png, figure3.png and the tables they show are in {output_dir}',
        f'More seeds, without redoing these runs: {more}',
    )


def _draw(rows: dict[str, list[dict[str, Any]]], target: float, output_dir: str) -> None:
    kls = [row['kl'] for row in rows['frontier']]
    bests = [row['known_reward'] for row in rows['frontier']]
    optimal = np.interp(target, kls, bests)
    figure2, figure3 = (os.path.join(output_dir, name) for name in PICTURES)
    figure_plots.figure2(figure2, rows['figure2'], target, optimal)
    figure_plots.figure3(figure3, rows['figure3'], rows['frontier'])


def curve_rows(results: dict[Run, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of figure2.csv: measurements during the runs that have a curve."""
    rows = []
    for run, result in results.items():
        if run.points > 1:
            for point in result['curve']:
                rows.append({'access': run.access, 'seed': run.seed, **point})
    return rows


def final_rows(results: dict[Run, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of figure3.csv: the end of each run, and its share of the gain."""
    rows = []
    for run, result in results.items():
        base = result['curve'][0]['known_reward']
        last = result['curve'][-1]
        optimal = result['optimal_reward']
        rows.append(
            {
                'access': run.access,
                'target': run.target,
                'episodes': run.episodes,
                'seed': run.seed,
                'kl': last['kl'],
                'known_reward': last['known_reward'],
                'optimal_reward': optimal,
                'share': (last['known_reward'] - base) / (optimal - base),
            }
        )
    return rows


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of a table: means over seeds, and ranges of the shares."""
    heads = ('access', 'episodes', 'target', 'KL', 'reward', 'optimum', 'share', 'of seeds')
    lines = [SUMMARY.format(*heads)]
    by_kind = groups(rows, 'access', 'episodes', 'target')
    for (access, episodes, target), seeds in by_kind.items():
        means = {
            name: np.mean([row[name] for row in seeds])
            for name in ('kl', 'known_reward', 'optimal_reward', 'share')
        }
        shares = [row['share'] for row in seeds]
        lines.append(
            SUMMARY.format(
                access,
                episodes,
                f'{target:g}',
                f'{means["kl"]:.2f}',
                f'{means["known_reward"]:.2f}',
                f'{means["optimal_reward"]:.2f}',
                f'{means["share"]:.1%}',
                f'{min(shares):.1%} to {max(shares):.1%}',
            )
        )
    return lines


if __name__ == '__main__':
    figures(jobs.experiment(), **vars(jobs.parser_of(__doc__, jobs.FULL.seeds).parse_args()))
