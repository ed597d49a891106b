"""The results of an evaluation as a table of text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from lm_human_preferences.evaluation.point_names import (
    CURVES,
    FEW_SAMPLES,
    JUDGE,
    OWN_OPTIMUM,
    point_label,
)

COLUMNS = {
    'kl': 'KL',
    'reward': 'reward',
    'frontier': 'best at that KL',
    'share': 'share of the gain',
}
# The table mentions a KL that misses its target, or a coefficient that still moves, by this share.
SETTLED = 0.1


class Table(NamedTuple):
    """The results of one reward: cells of text, the heads first, and what is to be known of it."""

    reward: str
    rows: list[list[str]]
    remarks: list[str]


def table(results: dict[str, Any]) -> Iterator[str]:
    """The results of `evaluate` as lines of text."""
    yield how_measured(results)
    for each in tables(results):
        yield ''
        yield from _aligned(each.rows)
        yield from each.remarks


def how_measured(results: dict[str, Any]) -> str:
    """What the results are computed from."""
    kind = 'exact, from all' if results['exact'] else 'estimated, from samples:'
    return f'{kind} {results["responses"]} responses to each of {results["queries"]} queries'


def tables(results: dict[str, Any]) -> list[Table]:
    """The results of each reward, that of the training first."""
    return [
        Table(
            name,
            _rows(name, points, _trained_on(results)),
            list(_remarks(results, name, points)),
        )
        for name, points in results['rewards'].items()
    ]


def _remarks(
    results: dict[str, Any], name: str, points: dict[str, dict[str, Any]]
) -> Iterator[str]:
    """What the reader of the table of reward `name` should know."""
    if name == JUDGE:
        yield f'judge: {results["judge"]}'
    policy = points['policy']
    if 'kl_to_optimum' in policy:
        last = ', the last of the run' if results.get('kl_coef_is_last') else ''
        yield f'optimum: the best policy at the KL coefficient {results["kl_coef"]:.4g}{last}'
        yield from _unsettled(results.get('kl_control'), policy['kl'])
    if OWN_OPTIMUM in points:
        yield _trust(points[OWN_OPTIMUM], name, _trained_on(results))
    yield from _without_share(points)
    undersampled = []
    for point, values in points.items():
        if point not in CURVES and values.get('effective_samples', FEW_SAMPLES) < FEW_SAMPLES:
            undersampled.append(point_label(point, name, _trained_on(results)))
    if undersampled:
        yield (
            f'WARNING: less than {FEW_SAMPLES} effective samples at the KL of'
            f' {", ".join(undersampled)}; the best there is estimated too low: give more --samples'
        )


def _trust(curve: dict[str, Any], judge: str, trained_on: str) -> str:
    """A line about the KL up to which the reward `trained_on` can be trusted.

    curve: see comparison.own_optimum. judge: the reward that says so.
    """
    trusted = curve['trusted_up_to']
    if trusted is None and 'effective_samples' not in curve:
        return f'{trained_on}: trusted at every KL: more of it is never less by the {judge}'
    if trusted is None:
        enough = zip(curve['kl'], curve['effective_samples'])
        kl = max([0.0, *(kl for kl, samples in enough if samples >= FEW_SAMPLES)])
        return f'{trained_on}: trusted up to KL {kl:.1f} at least, as far as these samples tell'
    return (
        f'{trained_on}: trusted up to KL {trusted:.1f}: beyond, more of it is less by the {judge}'
    )


def _without_share(points: dict[str, dict[str, Any]]) -> Iterator[str]:
    """A line that says why there is a dash instead of a share, if there is one."""
    shares = [values['share'] for values in points.values() if 'share' in values]
    if all(share is None for share in shares):
        yield '-: there is no gain, as all responses to a query have the same score'
    elif None in shares:
        yield '-: there is no gain at that KL'


def _trained_on(results: dict[str, Any]) -> str:
    """What the reward is called that the policy was trained on."""
    return next(iter(results['rewards']))


def _rows(name: str, points: dict[str, dict[str, Any]], trained_on: str) -> list[list[str]]:
    """The cells of the table of reward `name`: lists of strings, the heads first."""
    rows = [[name, *COLUMNS.values()]]
    for point in points:
        if point not in CURVES:
            cells = [_cell(points[point], key) for key in COLUMNS]
            rows.append([point_label(point, name, trained_on), *cells])
    if 'kl_to_optimum' in points['policy']:
        empty = [''] * (len(COLUMNS) - 1)
        rows.append(['KL(policy || optimum)', _cell(points['policy'], 'kl_to_optimum'), *empty])
    return rows


def _cell(values: dict[str, Any], name: str) -> str:
    """A number with its standard error if it has one.

    '' where none belongs, '-' where it cannot be computed.
    """
    if name not in values:
        return ''
    value = values[name]
    if value is None:
        return '-'
    digits = '.1%' if name == 'share' else '.3f'
    error = values.get('standard_errors', {}).get(name)
    if not error:
        return format(value, digits)
    return f'{value:{digits}} ± {error:{digits}}'


def _aligned(rows: list[list[str]]) -> Iterator[str]:
    """Lines of a table: the first column on the left, numbers on the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    for first, *cells in rows:
        numbers = [f'{cell:>{width}}' for cell, width in zip(cells, widths[1:])]
        yield '  '.join([f'{first:{widths[0]}}', *numbers]).rstrip()


def _unsettled(control: dict[str, Any] | None, kl: float) -> Iterator[str]:
    """A line if the policy's KL missed its target or the coefficient was still moving.

    control: see kl_history.kl_control. The optimum at the last coefficient is then not what the run
    aimed at.
    """
    if control is None:
        return
    before = control['kl_coef_before']
    now = control['kl_coef']
    reasons = []
    if abs(kl / control['target'] - 1) > SETTLED:
        reasons.append(f'the KL is {kl:.2f}, not the target {control["target"]:g}')
    if abs(now / before - 1) > SETTLED:
        direction = 'rose' if now > before else 'fell'
        reasons.append(
            f'the KL coefficient {direction} from {before:.3g} to {now:.3g} in the last '
            f'{control["recent_steps"]} steps'
        )
    if reasons:
        yield (
            f'note: not settled after {control["steps"]} steps: {", and ".join(reasons)}; '
            'so this optimum is not what a longer run would aim at'
        )
