"""What all our pictures share: size, colours that everybody can tell apart, the frontier, a file written whole."""
import bisect
import io
import itertools
import math
import os

from lm_human_preferences.utils import storage

# Okabe and Ito's, without the yellow.
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY = '#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9'
COLOURS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)
INK, GREY = '#222222', '#888888'


def panels(count=1, *, width=6.4, height=4.4):
    """A figure of `count` empty panels side by side, each so many inches large: (figure, list of axes)."""
    from matplotlib.figure import Figure  # takes a while, and needs no display
    figure = Figure(figsize=(width * count, height), layout='constrained')
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def label(axes, *, title, x, y):
    """Title and axis labels; a quiet grid, no frame."""
    axes.set_title(title, loc='left', color=INK, fontsize=12, fontweight='bold')
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    axes.grid(color='#E5E5E5', linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[['top', 'right']].set_visible(False)
    axes.spines[['left', 'bottom']].set_color(GREY)
    axes.tick_params(colors=GREY, labelcolor=INK)


def draw_frontier(axes, kls, rewards, errors=None, *, label='optimum', up_to=math.inf):
    """The highest reward at each KL as a line, with a band of standard errors: lists, of which those up to a KL count.
    """
    count = bisect.bisect(kls, up_to) + 1  # one point more, so that the line does not end before
    if errors is not None:
        low, high = ([r + sign * e for r, e in zip(rewards[:count], errors)] for sign in (-1, 1))
        axes.fill_between(kls[:count], low, high, color=INK, alpha=0.12, linewidth=0, zorder=1)
    axes.plot(kls[:count], rewards[:count], color=INK, linewidth=1.8, label=label, zorder=2)


def draw_points(axes, points):
    """Policies as labelled marks: {name: (KL, reward)}."""
    for (name, point), colour, marker in zip(points.items(), itertools.cycle(COLOURS), itertools.cycle('o*sssD')):
        size = 13 if marker == '*' else 7
        axes.plot(*point, marker, color=colour, markersize=size, label=name, zorder=3, clip_on=False)


def legend(axes, **settings):
    axes.legend(frameon=False, labelcolor=INK, **settings)


def save(figure, path):
    """Write `figure` to `path` as PNG; all of it appears, or nothing."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format='png', dpi=150)
    os.makedirs(os.path.dirname(path) or '.', exist_ok=True)
    with storage.replacing(path) as (file,):
        file.write(buffer.getvalue())
