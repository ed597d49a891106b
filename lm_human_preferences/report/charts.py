"""SVG chart of policies' training for the report page, in the colours of the page's styles."""

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from lm_human_preferences.report.run import Run

# Placeholders for variables of the style sheet, whose colours differ in dark mode.
INK, MUTED, LINE, ACCENT, WARN = '#010203', '#040506', '#070809', '#0a0b0c', '#0d0e0f'
VARIABLES = {INK: 'ink', MUTED: 'muted', LINE: 'line', ACCENT: 'accent', WARN: 'warn'}
LOOKS = [(colour, style) for style in ('-', ':') for colour in (ACCENT, WARN, INK, MUTED)]
MOST_POINTS = 300  # most points of a line; in longer runs, a point is the mean of several steps
SETTINGS: dict[Any, Any] = {
    'svg.fonttype': 'none',
    'svg.hashsalt': 'report',  # makes the same file each time
    'font.size': 8.5,
    'text.color': INK,
    'axes.edgecolor': LINE,
    'axes.grid': True,
    'axes.grid.axis': 'y',
    'axes.spines.right': False,
    'axes.spines.top': False,
    'axes.titlelocation': 'left',
    'axes.titlesize': 8.5,
    'grid.color': LINE,
    'xtick.color': MUTED,
    'ytick.color': MUTED,
}
PANELS = (  # statistic, title, meaning of the dashed line
    ('objective/score', 'Reward, by what the run was trained on', 'the best possible'),
    ('objective/kl', 'KL from the model before, in nats', 'the target'),
)


def training_chart(runs: Mapping[str, Run]) -> Markup:
    """Return the chart of rewards and KLs of runs, {name: run}; '' if none are logged."""
    import matplotlib
    from matplotlib.figure import Figure

    if not any(run.logged(tag) for run in runs.values() for tag, *_ in PANELS):
        return Markup()
    run, *others = runs.values()
    aims = (None, None) if others else _aims(run)
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(5.2, 3.9), layout='constrained')
        panels = figure.subplots(2, 1, sharex=True)
        for axes, aim, (tag, title, dashed) in zip(panels, aims, PANELS, strict=True):
            for (name, run), (colour, style) in zip(runs.items(), LOOKS, strict=False):
                values = run.logged(tag)
                if values:
                    steps, means = _thinned(range(1, len(values) + 1)), _thinned(values)
                    axes.plot(steps, means, color=colour, linestyle=style, linewidth=1.4)
                    label = name[:30].replace('$', r'\$') if others else ''  # $ begins a formula
                    axes.annotate(f' {label}', (steps[-1], means[-1]), va='center')
            axes.set_title(title)
            if aim is not None:
                axes.axhline(aim, color=MUTED, linestyle='--', linewidth=1)
                axes.set_title(f'{title}; dashed: {dashed}')
        file = io.StringIO()
        nothing = {'Date': None, 'Creator': None}
        figure.savefig(file, format='svg', transparent=True, metadata=nothing)
    return _for_page(file.getvalue())


def _thinned(values: Sequence[float]) -> np.ndarray:
    """Return the means of neighbouring points, in at most MOST_POINTS groups."""
    groups = np.array_split(np.array(values, float), min(len(values), MOST_POINTS))
    return np.array([group.mean() for group in groups])


def _aims(run: Run) -> tuple[float | None, float | None]:
    """Return (best possible reward at the policy's KL, KL target of the run); None if unknown."""
    adaptive = None if run.policy is None else run.policy.rewards.adaptive_kl
    best = next((points['policy'].get('frontier') for points in run.rewards.values()), None)
    return best, None if adaptive is None else adaptive.target


def _for_page(svg: str) -> Markup:
    """Return an SVG in the page's colours, without styles that would apply to the whole page."""
    svg = svg[svg.index('<svg') :]
    svg = re.sub(r'<metadata>.*?</metadata>|<style.*?</style>', '', svg, flags=re.DOTALL)
    svg = re.sub(r' (?:width|height)="[\d.]+pt"', '', svg)
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, f'var(--{variable})')
    label = '<svg role="img" aria-label="Reward and KL over the steps"'
    return Markup(svg.replace('<svg', label, 1))
