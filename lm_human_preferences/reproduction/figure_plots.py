"""Figures 2 and 3 as pictures: ours beside the paper's, whose shapes are to be compared, not the
numbers.

Both are drawn from rows, dicts such as those of figure2.csv and figure3.csv.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from lm_human_preferences import storage
from lm_human_preferences.evaluation import plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAPER = os.path.join(os.path.dirname(__file__), 'data', 'paper_curves.json')
COLOURS = (
    plots.VERMILION,
    plots.BLUE,
    plots.GREEN,
    plots.PURPLE,
)  # direct access, then the most labels, ...
THEIRS = 'Ziegler et al. 2019: compare shapes, not numbers'


def groups(
    rows: Iterable[dict[str, Any]], *keys: str
) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """{values of `keys`: the rows that have them}, in the order in which they first come."""
    found = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return found


def _short(number: float, places: int | None = 0) -> str:
    """64M for 64000000."""
    from matplotlib.ticker import EngFormatter

    return EngFormatter(places=places, sep='').format_eng(number)


def _draw_bands(axes: Axes, rows: Iterable[dict[str, Any]], at: str, x: str, **style: Any) -> None:
    """For each access, the mean over seeds at each value of `at` as a line over `x`, and the range
    of the seeds."""
    for ((access,), part), color in zip(groups(rows, 'access').items(), COLOURS):
        cells = [
            np.array([(row[x], row['known_reward']) for row in cell])
            for cell in groups(part, at).values()
        ]
        xs, means = np.array([cell.mean(0) for cell in cells]).T
        low, high = np.array([(cell[:, 1].min(), cell[:, 1].max()) for cell in cells]).T
        name = 'direct access' if access == 'direct' else f'{_short(int(access))} labels'
        shown = axes.get_legend_handles_labels()[1]
        axes.plot(xs, means, color=color, label=None if name in shown else name, **style)
        axes.fill_between(xs, low, high, color=color, alpha=0.2, linewidth=0)


def _finish(axes: Axes, title: str, x: str) -> None:
    plots.label(axes, title=title, x=x, y='known reward')
    plots.legend(axes, loc='upper left', bbox_to_anchor=(1, 1))


def _ours(rows: Iterable[dict[str, Any]]) -> str:
    seeds = len(groups(rows, 'seed'))
    return 'mock_sentiment, ' + (f'mean and range of {seeds} seeds' if seeds > 1 else '1 seed')


def figure2(path: str, rows: list[dict[str, Any]], target: float, optimal: float) -> None:
    """Known reward against episodes at a KL target; optimal: the highest reward possible there."""
    paper = [
        {'access': access, 'episodes': episodes, 'known_reward': reward}
        for access, points in storage.read_json(PAPER)['figure2'].items()
        for episodes, reward in points
    ]
    figure, panels = plots.panels(2, width=6, height=3.9)
    panels[0].axhline(optimal, color=plots.INK, linestyle='--', linewidth=1, label='optimum')
    for axes, part, title in zip(
        panels, (rows, paper), (f'{_ours(rows)}; KL {target:g}', f'{THEIRS}; KL 8')
    ):
        _draw_bands(axes, part, 'episodes', 'episodes')
        axes.xaxis.set_major_formatter(lambda number, _: _short(number, None))
        _finish(axes, title, 'episodes')
    plots.save(figure, path)


def figure3(path: str, rows: list[dict[str, Any]], frontier: list[dict[str, float]]) -> None:
    """Known reward against KL; frontier: the highest reward possible, as rows."""
    theirs = storage.read_json(PAPER)['figure3']
    best = [dict(zip(('kl', 'known_reward'), point)) for point in theirs.pop('optimal')]
    paper = [
        {
            'access': access,
            'episodes': int(episodes),
            'target': target,
            'kl': kl,
            'known_reward': reward,
        }
        for episodes, curves in theirs.items()
        for access, points in curves.items()
        for target, (kl, reward) in enumerate(points)
    ]
    figure, panels = plots.panels(2, width=6, height=3.9)
    for axes, part, curve, title in zip(
        panels, (rows, paper), (frontier, best), (_ours(rows), THEIRS)
    ):
        kls, bests = ([row[name] for row in curve] for name in ('kl', 'known_reward'))
        right = 1.05 * max(row['kl'] for row in part)
        plots.draw_frontier(axes, kls, bests, up_to=right)
        for ((episodes,), budget), linestyle in zip(groups(part, 'episodes').items(), '-:'):
            _draw_bands(axes, budget, 'target', 'kl', linestyle=linestyle, marker='.')
            axes.plot(
                [], [], color=plots.GREY, linestyle=linestyle, label=f'{_short(episodes)} episodes'
            )
        axes.set_ylim(
            min(bests),
            1.05 * max([np.interp(right, kls, bests), *(row['known_reward'] for row in part)]),
        )
        _finish(axes, title, 'KL from the initial policy, nats')
    plots.save(figure, path)
