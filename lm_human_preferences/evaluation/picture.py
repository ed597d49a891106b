"""The results of an evaluation as a picture: KL against reward."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Any

from lm_human_preferences.evaluation import plots
from lm_human_preferences.evaluation.point_names import (
    CURVES,
    OWN_BEST,
    OWN_OPTIMUM,
    point_label,
)

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
    """Draw KL against reward: the frontier and all points, a panel for each reward.

    results: those of `evaluate`. Bars are standard errors.
    """
    figure, panels = plots.panels(len(results['rewards']))
    figure.suptitle(
        f'Run {_run_name(results["save_dir"])}: the policy and the best one possible',
        color=plots.INK,
        fontsize=13,
        parse_math=False,
    )
    trained_on = next(iter(results['rewards']))
    for axes, (reward, points) in zip(panels, results['rewards'].items()):
        plots.label(axes, title=reward, x='KL from the base model (nats)', y='reward')
        # The curve goes through OWN_BEST.
        marks = {
            point: values for point, values in points.items() if point not in (*CURVES, OWN_BEST)
        }
        up_to = 1.2 * max(values['kl'] for values in marks.values())
        _draw_frontier(axes, points, up_to=up_to)
        if OWN_OPTIMUM in points:
            _draw_own_optimum(axes, points, trained_on, up_to=up_to)
        _draw_marks(axes, reward, marks, trained_on=trained_on)
        plots.legend(axes, loc='lower right')
    plots.save(figure, path)


def _run_name(save_dir: str) -> str:
    name = os.path.basename(save_dir.rstrip('/'))
    if name in ('', '.', '..'):
        name = os.path.basename(os.path.abspath(save_dir))
    return name[:80]


def _draw_frontier(axes: Axes, points: dict[str, dict[str, Any]], *, up_to: float) -> None:
    """Draw the frontier from the base model to the KL `up_to`."""
    base = points['base']
    curve = points['frontier']
    errors = curve.get('standard_errors')
    if errors is not None:
        errors = [base['standard_errors']['reward'], *errors]
    plots.draw_frontier(
        axes,
        [base['kl'], *curve['kl']],
        [base['reward'], *curve['reward']],
        errors,
        label='frontier',
        up_to=up_to,
    )


def _draw_own_optimum(
    axes: Axes, points: dict[str, dict[str, Any]], trained_on: str, *, up_to: float
) -> None:
    """Draw what the best policies for the reward `trained_on` attain, up to the KL `up_to`."""
    base = points['base']
    curve = points[OWN_OPTIMUM]
    label = f'optimum for {trained_on}'
    kls = [base['kl'], *curve['kl']]
    plots.draw_curve(axes, kls, [base['reward'], *curve['reward']], label=label, up_to=up_to)


def _draw_marks(axes: Axes, reward: str, marks: dict[str, dict[str, Any]], trained_on: str) -> None:
    """Draw the points {name: values} of the results of `reward`.

    Every best of n that one reward chooses has the same mark. trained_on: what the reward is called
    that the policy was trained on.
    """

    def kind_of(point: str) -> str:
        label = point_label(point, reward, trained_on)
        return f'best of n by {label.split(" by ")[1]}' if point.startswith('best_of_') else label

    *_, numbered = (kind_of(point) for point in marks if point.startswith('best_of_'))
    for kind, group in itertools.groupby(marks, kind_of):
        points = list(group)
        errors: list[list[float] | None] = [None, None]
        if 'standard_errors' in marks[points[0]]:
            errors = [
                [marks[point]['standard_errors'][key] or 0 for point in points]
                for key in ('kl', 'reward')
            ]
        marker, colour = STYLES[kind]
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
