"""Picture of an evaluation: reward against KL."""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from lm_human_preferences import storage
from lm_human_preferences.evaluation import report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKERS = {'base': 'o', 'policy': '*', 'optimum': 'D'}
BEST_OF_N, BEST_BY_REWARD_MODEL = 's', '^'


def draw(results: dict[str, Any], path: str) -> None:
    """Write a PNG to `path` that plots reward against KL, with one panel per reward."""
    from matplotlib.figure import Figure  # slow to import; this class needs no display

    rewards = results['rewards']
    figure = Figure(figsize=(6.4 * len(rewards), 4.4), layout='constrained')
    panels = figure.subplots(1, len(rewards), squeeze=False)[0]
    name = os.path.basename(os.path.abspath(results['save_dir']))[:80]
    figure.suptitle(f'Run {name}: the policy and the best one possible', parse_math=False)
    for axes, reward in zip(panels, rewards, strict=True):
        broken = report.not_finite(results, reward)
        axes.set_title(f'{reward}, not finite: {", ".join(broken)}' if broken else reward)
        axes.set_xlabel('KL from the base model (nats)')
        axes.set_ylabel('reward')
        axes.grid(color='#E5E5E5')
        points = report.points_of(results, reward)
        known = {point: each for point, each in points.items() if report.is_known(each[1])}
        if 'base' in known:
            up_to = 1.2 * max(values['kl'] for _, values in known.values())
            _draw_frontier(axes, report.frontier_of(rewards[reward]), up_to)
            for point, (label, values) in known.items():
                _draw_point(axes, point, label, values)
            axes.legend(loc='lower right', frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format='png', dpi=150)
    storage.write_bytes(path, buffer.getvalue())


def _draw_frontier(axes: Axes, curve: dict[str, list[float]], up_to: float) -> None:
    """Draw the highest reward at each KL; past the last known KL, a dotted lower bound."""
    end = min(up_to, curve['kl'][-1])
    kls = [*(kl for kl in curve['kl'] if kl < end), end]
    best = np.interp(kls, curve['kl'], curve['reward'])
    axes.plot(kls, best, color='black', label='frontier')
    if end < up_to:
        label = 'frontier, at least'
        axes.plot([end, up_to], [best[-1], best[-1]], color='black', linestyle=':', label=label)


def _draw_point(axes: Axes, point: str, label: str, values: report.Point) -> None:
    marker = MARKERS.get(point, BEST_OF_N)
    size, order = (13, 4) if point == 'policy' else (7, 3)
    if point.endswith(report.BY_REWARD_MODEL):
        marker = BEST_BY_REWARD_MODEL
    axes.plot(
        values['kl'],
        values['reward'],
        linestyle='none',
        marker=marker,
        markersize=size,
        markeredgecolor='black',
        label=label,
        zorder=order,
    )
