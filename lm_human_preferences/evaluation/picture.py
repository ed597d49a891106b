"""Picture of an evaluation: reward against KL."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from lm_human_preferences.evaluation import plots
from lm_human_preferences.evaluation.report import (
    OWN_OPTIMUM,
    from_base,
    margin,
    not_finite,
    point_label,
    points_of,
    well_sampled,
)
from lm_human_preferences.utils import student

if TYPE_CHECKING:
    from matplotlib.axes import Axes


STYLES = {  # a marker and a colour of its own for each kind of point
    'base': ('o', plots.BLUE),
    'policy': ('*', plots.VERMILION),
    'optimum': ('D', plots.SKY),
    'best of n by reward model': ('^', plots.ORANGE),
    'best of n by known reward': ('s', plots.GREEN),
    'best of n by judge': ('v', plots.PURPLE),
}


def draw(results: dict[str, Any], path: str) -> None:
    """Plot reward against KL, one panel for each reward measured; with 95 % intervals."""
    figure, panels = plots.panels(len(results['rewards']))
    title = f'Run {_run_name(results["save_dir"])}: the policy and the best one possible'
    with_errors = 'standard_errors' in next(iter(results['rewards'].values()))['base']
    with_errors = with_errors and results['queries'] >= student.FEWEST
    if with_errors:
        title += ', with 95 % intervals'
    figure.suptitle(title, color=plots.INK, fontsize=13, parse_math=False)
    trained_on = next(iter(results['rewards']))
    for axes, (reward, points) in zip(panels, results['rewards'].items()):
        marks, kinds = points_of(results, reward)
        broken = [point_label(point, reward, trained_on) for point in not_finite(points)]
        title = f'{reward}, not finite: {", ".join(broken)}' if broken else reward
        plots.label(axes, title=title, x='KL from the base model (nats)', y='reward')
        if 'base' not in marks:
            continue
        up_to = 1.2 * max(values['kl'] for values in marks.values())
        base = points['base']
        errors = well_sampled(points['frontier']).get('standard_errors') if with_errors else None
        if errors is not None:
            times = student.quantile(results['queries'] - 1)
            errors = [times * error for error in (base['standard_errors']['reward'], *errors)]
        best = from_base(points, 'frontier')
        plots.draw_frontier(axes, *best, errors, label='frontier', up_to=up_to)
        if OWN_OPTIMUM in points:
            own = from_base(points, OWN_OPTIMUM)
            plots.draw_curve(axes, *own, label=f'optimum for {trained_on}', up_to=up_to)
        _draw_marks(axes, marks, kinds, results['queries'])
        plots.legend(axes, loc='lower right')
    plots.save(figure, path)


def _run_name(save_dir: str) -> str:
    name = os.path.basename(save_dir.rstrip('/'))
    if name in ('', '.', '..'):
        name = os.path.basename(os.path.abspath(save_dir))
    return name[:80]


def _draw_marks(
    axes: Axes, marks: dict[str, dict[str, Any]], kinds: dict[str, list[str]], queries: int
) -> None:
    """Draw the points `marks` {name: values}, a mark for each of `kinds` {kind: names}."""
    *_, numbered = ('', *(kind for kind in kinds if kind.startswith('best of n')))
    for kind, points in kinds.items():
        errors: list[list[float] | None] = [None, None]
        if 'standard_errors' in marks[points[0]]:
            errors = [
                [margin(marks[point], key, queries) or 0 for point in points]
                for key in ('kl', 'reward')
            ]
        # Also best of n by a reward of the user's.
        marker, colour = STYLES.get(kind, STYLES['best of n by reward model'])
        # One number serves both kinds of best of n, which have the same KL, one above the other.
        texts = [point.split('_')[2] for point in points] if kind == numbered else ()
        plots.draw_points(
            axes,
            [marks[point]['kl'] for point in points],
            [marks[point]['reward'] for point in points],
            marker=marker,
            colour=colour,
            label=kind,
            errors=errors,
            texts=texts,
        )
