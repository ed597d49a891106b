"""The evaluation of a run: its tables, and KL against reward with the best that is possible."""

from __future__ import annotations

from typing import Any, NamedTuple

from lm_human_preferences.evaluation import report
from lm_human_preferences.evaluation.point_names import (
    CURVES,
    OWN_BEST,
    OWN_OPTIMUM,
    point_label,
)
from lm_human_preferences.report_page import charts
from lm_human_preferences.report_page.charts import Chart, Series

_COLOURS = {'base': 0, 'policy': 1, 'optimum': 2}
_BEST_OF, _BEST_OF_OTHER = 3, 4
_DAMAGED = (
    AttributeError,
    IndexError,
    KeyError,
    OverflowError,
    TypeError,
    ValueError,
    ZeroDivisionError,
)


class Evaluation(NamedTuple):
    """What `evaluate` has found, for the page: how, a table and a chart for each reward."""

    how: str
    rewards: list[tuple[report.Table, Chart | None]]


def evaluation(results: dict[str, Any], identity: str) -> Evaluation | None:
    """The results of `evaluate`, as JSON has them; None where they are damaged."""
    try:
        tables = report.tables(results)
        drawn = [_chart(results, table.reward, identity) for table in tables]
        return Evaluation(report.how_measured(results), list(zip(tables, drawn, strict=True)))
    except _DAMAGED:
        return None


def _chart(results: dict[str, Any], reward: str, identity: str) -> Chart | None:
    points = results['rewards'][reward]
    trained_on = next(iter(results['rewards']))
    # The curve goes through OWN_BEST.
    marks = {name: values for name, values in points.items() if name not in (*CURVES, OWN_BEST)}
    up_to = 1.2 * max(values['kl'] for values in marks.values())
    series = [_curve('the best possible', points, 'frontier', up_to, charts.LINE, 0)]
    if OWN_OPTIMUM in points:
        name = f'the optimum for the {trained_on}'
        series.append(_curve(name, points, OWN_OPTIMUM, up_to, charts.DASHED, 5))
    kinds: dict[str, list[str]] = {}
    for name in marks:
        label = point_label(name, reward, trained_on)
        kind = f'best of n by {label.split(" by ")[1]}' if name.startswith('best_of_') else label
        kinds.setdefault(kind, []).append(name)
    chosen_by_other = [kind for kind in kinds if kind.startswith('best of n')][1:]
    # The policy comes last, so that nothing hides it. One number serves both kinds of best of n,
    # which have about the same KL.
    for kind, names in sorted(kinds.items(), key=lambda item: item[0] == 'policy'):
        has_texts = kind.startswith('best of n') and kind not in chosen_by_other
        colour = _COLOURS.get(kind, _BEST_OF_OTHER if kind in chosen_by_other else _BEST_OF)
        series.append(
            Series(
                kind,
                [marks[name]['kl'] for name in names],
                [marks[name]['reward'] for name in names],
                charts.POINTS,
                colour,
                [name.split('_')[2] if has_texts else '' for name in names],
            )
        )
    place = list(results['rewards']).index(reward)
    return charts.draw(
        f'The policy and the best one possible, by the {reward}',
        'KL from the initial model (nats)',
        'mean reward',
        series,
        identity=f'{identity}-frontier-{place}',
    )


def _curve(
    name: str, points: dict[str, Any], curve: str, up_to: float, kind: str, colour: int
) -> Series:
    """A curve of the results from the initial model to the KL `up_to`."""
    base, found = points['base'], points[curve]
    kls = [base['kl'], *found.get('kl', ())]
    rewards = [base['reward'], *found.get('reward', ())]
    near = [(kl, value) for kl, value in zip(kls, rewards, strict=True) if kl <= up_to]
    return Series(name, [kl for kl, _ in near], [value for _, value in near], kind, colour)
