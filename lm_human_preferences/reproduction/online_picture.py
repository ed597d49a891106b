"""The picture of `figures --online`.

It shows what a policy attains against how often its reward model was retrained.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from lm_human_preferences.evaluation import plots
from lm_human_preferences.reproduction.figure_plots import groups

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = (plots.BLUE, plots.VERMILION, plots.GREEN, plots.PURPLE)  # of the labellers' errors
CHANCE = 0.25

Rows = list[dict[str, Any]]


def draw(path: str, rows: Rows, labels: int) -> None:
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


def _draw(axes: Axes, rows: Rows, name: str) -> None:
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
