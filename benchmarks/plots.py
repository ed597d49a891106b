"""Plotting functions (matplotlib) of the figures in docs: panels, colours, frontiers, saving."""

from __future__ import annotations

import bisect
import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lm_human_preferences import storage

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Of the palette of Okabe and Ito for colour-blind readers
BLUE, VERMILION, GREEN, PURPLE = '#0072B2', '#D55E00', '#009E73', '#CC79A7'
INK, GREY = '#222222', '#888888'


def panels(count: int = 1, *, width: float = 6.4, height: float = 4.4) -> tuple[Figure, list[Axes]]:
    """Return a figure of `count` empty panels of these inches side by side, and their axes."""
    from matplotlib.figure import Figure  # slow to import; this class needs no display

    figure = Figure(figsize=(width * count, height), layout='constrained')
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def label(axes: Axes, *, title: str, x: str, y: str) -> None:
    """Set title and axis labels; a quiet grid, no frame."""
    axes.set_title(title, loc='left', color=INK, fontsize=12, fontweight='bold')
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    axes.grid(color='#E5E5E5', linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[['top', 'right']].set_visible(False)
    axes.spines[['left', 'bottom']].set_color(GREY)
    axes.tick_params(colors=GREY, labelcolor=INK)


def draw_frontier(
    axes: Axes,
    kls: Sequence[float],
    rewards: Sequence[float],
    *,
    label: str = 'optimum',
    up_to: float = math.inf,
) -> None:
    """Draw the highest reward at each KL, constant beyond the last KL."""
    end = min(up_to, kls[-1])
    count = bisect.bisect_left(kls, end)
    shown, best = [*kls[:count], end], [*rewards[:count], np.interp(end, kls, rewards)]
    axes.plot(shown, best, color=INK, linewidth=1.8, label=label, zorder=2)
    if shown[-1] < up_to < math.inf:
        axes.plot(
            [shown[-1], up_to],
            [best[-1]] * 2,
            color=INK,
            linewidth=1.8,
            linestyle=':',
            zorder=2,
            label=f'{label}, at least',
        )


def legend(axes: Axes, **settings: Any) -> None:
    """Draw a legend without a frame."""
    axes.legend(frameon=False, labelcolor=INK, **settings)


def save(figure: Figure, path: str) -> None:
    """Save `figure` as a PNG file, completely or not at all."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format='png', dpi=150)
    storage.write_bytes(path, buffer.getvalue())
