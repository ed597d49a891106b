"""The picture of `figures --labels`: what reward models allow, against the number of labels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from lm_human_preferences.evaluation import plots
from lm_human_preferences.reproduction.figure_plots import groups

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = (plots.BLUE, plots.VERMILION, plots.GREEN, plots.PURPLE)  # of the numbers of epochs
STYLES = (':', '--', '-')  # of the sizes of ensembles, the largest last
KL = 4.0  # at which the curves are drawn

Rows = list[dict[str, Any]]


def draw(path: str, rows: Rows) -> None:
    """Draw the rows of labels.csv: a panel for each share of random answers."""
    of_kl = sorted((row for row in rows if row['kl'] == KL), key=lambda row: row['error'])
    panels = groups(of_kl, 'error')
    figure, axes = plots.panels(len(panels), width=5.6, height=3.9)
    for panel, ((error,), of_error) in zip(axes, panels.items()):
        _draw(panel, of_error)
        plots.label(
            panel,
            title=f'{error:.0%} of the answers random',
            x='labels',
            y=f'share of the gain possible at KL {KL:g}',
        )
    plots.legend(axes[-1], loc='upper left', bbox_to_anchor=(1, 1))
    plots.save(figure, path)


def _draw(axes: Axes, rows: Rows) -> None:
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
