"""Figures 2 and 3 from rows of figure2.csv and figure3.csv, beside the paper's."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import plots

from figures.tables import Rows, groups
from lm_human_preferences import storage

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAPER = os.path.join(os.path.dirname(__file__), 'data', 'paper_curves.json')
# Direct access, then the label sets from the largest to the smallest.
COLOURS = (plots.VERMILION, plots.BLUE, plots.GREEN, plots.PURPLE)
PAPER_TITLE = 'Ziegler et al. 2019: compare shapes, not numbers'


def figure2(path: str, rows: Rows, target: float, optimal: float) -> None:
    """Draw known reward against episodes at the KL `target`; optimal: the highest there."""
    figure, (left, right) = plots.panels(2, width=6, height=3.9)
    left.axhline(optimal, color=plots.INK, linestyle='--', linewidth=1, label='optimum')
    for axes, panel_rows, title in (
        (left, rows, f'{_title(rows)}; KL {target:g}'),
        (right, _paper_figure2(), f'{PAPER_TITLE}; KL 8'),
    ):
        _draw_bands(axes, panel_rows, 'episodes', 'episodes')
        axes.xaxis.set_major_formatter(lambda number, _: _short(number, None))
        _finish(axes, title, 'episodes')
    plots.save(figure, path)


def _paper_figure2() -> Rows:
    rows = []
    for access, points in storage.read_json(PAPER)['figure2'].items():
        for episodes, reward in points:
            rows.append({'access': access, 'episodes': episodes, 'known_reward': reward})
    return rows


def figure3(path: str, rows: Rows, frontier: Rows) -> None:
    """Draw known reward against KL. frontier: the highest reward possible at some KLs."""
    figure, (left, right) = plots.panels(2, width=6, height=3.9)
    paper_rows, paper_frontier = _paper_figure3()
    _draw_figure3(left, rows, frontier, _title(rows))
    _draw_figure3(right, paper_rows, paper_frontier, PAPER_TITLE)
    plots.save(figure, path)


def _paper_figure3() -> tuple[Rows, Rows]:
    paper = storage.read_json(PAPER)['figure3']
    frontier = [{'kl': kl, 'known_reward': reward} for kl, reward in paper.pop('optimal')]
    rows = []
    for episodes, curves in paper.items():
        for access, points in curves.items():
            for target, (kl, reward) in enumerate(points):
                row = {'access': access, 'episodes': int(episodes), 'target': target}
                rows.append({**row, 'kl': kl, 'known_reward': reward})
    return rows, frontier


def _draw_figure3(axes: Axes, rows: Rows, frontier: Rows, title: str) -> None:
    kls = _column(frontier, 'kl')
    bests = _column(frontier, 'known_reward')
    right = 1.05 * max(_column(rows, 'kl'))
    plots.draw_frontier(axes, kls, bests, up_to=right)
    for ((episodes,), budget), linestyle in zip(groups(rows, 'episodes').items(), '-:'):
        _draw_bands(axes, budget, 'target', 'kl', linestyle=linestyle, marker='.')
        label = f'{_short(episodes)} episodes'
        axes.plot([], [], color=plots.GREY, linestyle=linestyle, label=label)
    highest = max([np.interp(right, kls, bests), *_column(rows, 'known_reward')])
    axes.set_ylim(min(bests), 1.05 * highest)
    _finish(axes, title, 'KL from the initial policy, nats')


def _column(rows: Rows, name: str) -> list[float]:
    return [row[name] for row in rows]


def _draw_bands(axes: Axes, rows: Rows, at: str, x: str, **style: Any) -> None:
    """Draw the mean and range of seeds for each access, along column x; `at` tells points apart."""
    for ((access,), of_access), color in zip(groups(rows, 'access').items(), COLOURS):
        xs, means, lows, highs = [], [], [], []
        for seeds in groups(of_access, at).values():
            rewards = _column(seeds, 'known_reward')
            xs.append(np.mean(_column(seeds, x)))
            means.append(np.mean(rewards))
            lows.append(min(rewards))
            highs.append(max(rewards))
        name = 'direct access' if access == 'direct' else f'{_short(int(access))} labels'
        has_label = name in axes.get_legend_handles_labels()[1]
        axes.plot(xs, means, color=color, label=None if has_label else name, **style)
        axes.fill_between(xs, lows, highs, color=color, alpha=0.2, linewidth=0)


def _finish(axes: Axes, title: str, x: str) -> None:
    plots.label(axes, title=title, x=x, y='known reward')
    plots.legend(axes, loc='upper left', bbox_to_anchor=(1, 1))


def _title(rows: Rows) -> str:
    seeds = len(groups(rows, 'seed'))
    spread = f'mean and range of {seeds} seeds' if seeds > 1 else '1 seed'
    return f'mock_sentiment, {spread}'


def _short(number: float, places: int | None = 0) -> str:
    """Format a large number: 64M for 64000000."""
    from matplotlib.ticker import EngFormatter

    return EngFormatter(places=places, sep='').format_eng(number)
