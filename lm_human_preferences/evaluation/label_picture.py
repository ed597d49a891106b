"""The report on a folder of labels as a picture: accuracy by labels, and who was preferred."""

from __future__ import annotations

import os
import statistics
from typing import TYPE_CHECKING, Any

from lm_human_preferences.errors import UserError
from lm_human_preferences.evaluation import plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(report: dict[str, Any], path: str) -> None:
    """Write the picture of a report to `path`; UserError where there is nothing to draw yet.

    report: as `./launch.py labels --output` writes it, with a learning curve or comparisons.
    """
    drawings = []
    if report.get('learning_curve'):
        drawings.append(_learning_curve)
    if report['comparisons']:
        drawings.append(_win_rates)
    if not drawings:
        raise UserError(
            f'--picture {path}: nothing to draw yet; give --reward and --learning_curve, or compare'
            ' two policies by ask --against'
        )
    figure, axes = plots.panels(len(drawings))
    for panel, drawing in zip(axes, drawings, strict=True):
        drawing(panel, report)
    plots.save(figure, path)


def _learning_curve(axes: Axes, report: dict[str, Any]) -> None:
    """Accuracy on labels held out, each training a point, their means a line."""
    curve = report['learning_curve']
    name = 'agreement' if curve[0]['chance'] is None else 'accuracy'
    numbers = [row['labels'] for row in curve]
    for row in curve:
        count = len(row[name])
        axes.plot([row['labels']] * count, row[name], 'o', color=plots.BLUE, alpha=0.5)
    means = [statistics.mean(row[name]) for row in curve]
    axes.plot(numbers, means, color=plots.BLUE, linewidth=1.8, label='reward model')
    low = [statistics.mean(row['low']) for row in curve]
    high = [statistics.mean(row['high']) for row in curve]
    axes.fill_between(numbers, low, high, color=plots.BLUE, alpha=0.15, label='95 % interval')
    chance = curve[0]['chance']
    if chance is not None:
        axes.axhline(chance, color=plots.GREY, linestyle='--', label='chance')
    axes.set_xscale('log', base=2)
    axes.set_xticks(numbers, [str(number) for number in numbers])
    title = 'Predicting labels held out'
    measure = 'accuracy' if chance is not None else 'correlation'
    plots.label(axes, title=title, x='labels learned from', y=f'{measure} ({_held_out(curve)})')
    plots.legend(axes, loc='lower right')


def _held_out(curve: list[dict[str, Any]]) -> str:
    return f'{curve[0]["held_out"]} labels'


def _win_rates(axes: Axes, report: dict[str, Any]) -> None:
    """The win rate of each policy over the one that it was compared with, with its interval."""
    comparisons = report['comparisons']
    for place, found in enumerate(comparisons):
        rate = found['win_rate']
        errors = [[rate - found['low']], [found['high'] - rate]]
        axes.errorbar(
            [place],
            [rate],
            yerr=errors,
            fmt='o',
            color=plots.VERMILION,
            ecolor=plots.INK,
            capsize=3,
        )
    texts = [f'{_short(c["against"])}\nover {_short(c["policy"])}' for c in comparisons]
    axes.set_xticks(range(len(comparisons)), texts)
    axes.set_xlim(-0.5, len(comparisons) - 0.5)
    axes.set_ylim(0, 1)
    axes.axhline(0.5, color=plots.GREY, linestyle='--')
    plots.label(axes, title='How often it was preferred', x='', y='share of answers')


def _short(policy: str) -> str:
    """The last part of the path of a run."""
    return os.path.basename(policy.rstrip('/'))[:20]
