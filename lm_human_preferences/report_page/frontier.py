"""Evaluation of a run: tables, and charts of KL against reward with the best possible."""

from typing import Any, NamedTuple

from lm_human_preferences.evaluation import report
from lm_human_preferences.report_page import charts
from lm_human_preferences.report_page.charts import Chart, Series

_DAMAGED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


class Table(NamedTuple):
    """Table of the results of one reward: cells of text, heads first, and notes."""

    reward: str
    rows: list[list[str]]
    remarks: list[str]


def evaluation(results: dict[str, Any], identity: str) -> dict[str, Any] | None:
    """Return the results of `evaluate` for the page; None where they are damaged."""
    try:
        rewards = []
        for name in results['rewards']:
            table = Table(name, report.rows(results, name), report.remarks(results, name))
            rewards.append((table, _chart(results, name, identity)))
        return {'how': report.how_measured(results), 'rewards': rewards}
    except _DAMAGED:
        return None


def _chart(results: dict[str, Any], reward: str, identity: str) -> Chart | None:
    points = report.points_of(results, reward)
    known = {point: each for point, each in points.items() if report.is_known(each[1])}
    if 'base' not in known:  # whose reward is not finite
        return None
    up_to = 1.2 * max(values['kl'] for _, values in known.values())
    curve = report.frontier_of(results['rewards'][reward])
    count = sum(kl <= up_to for kl in curve['kl'])
    series = [
        Series('the best possible', curve['kl'][:count], curve['reward'][:count], charts.LINE, 0)
    ]
    colours = {point: number for number, point in enumerate(known)}
    # The policy comes last, so that nothing hides it.
    for point in sorted(known, key='policy'.__eq__):
        label, values = known[point]
        place = [values['kl']], [values['reward']]
        series.append(Series(label, *place, charts.POINTS, colours[point]))
    number = list(results['rewards']).index(reward)
    return charts.layout(
        f'The policy and the best one possible, by the {reward}',
        'KL from the initial model (nats)',
        'mean reward',
        series,
        identity=f'{identity}-frontier-{number}',
    )
