"""Evaluation of a run: tables, and charts of KL against reward with the best possible."""

from typing import Any

from lm_human_preferences.evaluation import report
from lm_human_preferences.evaluation.report import OWN_OPTIMUM
from lm_human_preferences.report_page import charts
from lm_human_preferences.report_page.charts import Chart, Series

_COLOURS = {'base': 0, 'policy': 1, 'optimum': 2}
_BEST_OF, _BEST_OF_OTHER = 3, 4
_DAMAGED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def evaluation(results: dict[str, Any], identity: str) -> dict[str, Any] | None:
    """Return the results of `evaluate` for the page; None where they are damaged."""
    try:
        tables = report.tables(results)
        drawn = [_chart(results, table.reward, identity) for table in tables]
        rewards = list(zip(tables, drawn, strict=True))
        return {'how': report.how_measured(results), 'rewards': rewards}
    except _DAMAGED:
        return None


def _chart(results: dict[str, Any], reward: str, identity: str) -> Chart | None:
    points = results['rewards'][reward]
    trained_on = next(iter(results['rewards']))
    marks, kinds = report.points_of(results, reward)
    if 'base' not in marks:  # whose reward is not finite
        return None
    up_to = 1.2 * max(values['kl'] for values in marks.values())
    series = [_curve('the best possible', points, 'frontier', up_to, charts.LINE, 0)]
    if OWN_OPTIMUM in points:
        name = f'the optimum for the {trained_on}'
        series.append(_curve(name, points, OWN_OPTIMUM, up_to, charts.DASHED, 5))
    chosen_by_other = [kind for kind in kinds if kind.startswith('best of n')][1:]
    # The policy comes last, so that nothing hides it. One number serves both kinds of best of n,
    # which have about the same KL.
    for kind, names in sorted(kinds.items(), key=lambda item: item[0] == 'policy'):
        colour = _COLOURS.get(kind, _BEST_OF)
        if kind in chosen_by_other:
            colour = _BEST_OF_OTHER
        has_texts = kind.startswith('best of n') and kind not in chosen_by_other
        steps, values, texts = [], [], []
        for name in names:
            steps.append(marks[name]['kl'])
            values.append(marks[name]['reward'])
            texts.append(name.split('_')[2] if has_texts else '')
        series.append(Series(kind, steps, values, charts.POINTS, colour, texts))
    place = list(results['rewards']).index(reward)
    return charts.layout(
        f'The policy and the best one possible, by the {reward}',
        'KL from the initial model (nats)',
        'mean reward',
        series,
        identity=f'{identity}-frontier-{place}',
    )


def _curve(
    name: str, points: dict[str, Any], curve: str, up_to: float, kind: str, colour: int
) -> Series:
    """Return a curve of the results from the initial model to the KL `up_to`."""
    steps, values = [], []
    for kl, value in zip(*report.from_base(points, curve), strict=True):
        if kl <= up_to:
            steps.append(kl)
            values.append(value)
    return Series(name, steps, values, kind, colour)
