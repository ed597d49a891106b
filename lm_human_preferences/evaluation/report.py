"""Results of an evaluation for readers: a table in text, and what pictures and pages show."""

import itertools
import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jinja2

from lm_human_preferences.labels.report.wording import aligned, environment
from lm_human_preferences.utils import student

BEST_OF = (4, 16)
JUDGE = 'judge'  # in results, the reward that --judge names
OWN_OPTIMUM = 'own_optimum'  # curve of a reward that the policy was not trained on
CURVES = ('frontier', OWN_OPTIMUM)  # entries of a reward that are not points
OWN_BEST = 'optimum_by_reward_model'  # point of OWN_OPTIMUM at the policy's KL
FEW_SAMPLES = 10  # effective ones, below which nothing is said about the best there is
FEWEST_FOR_SHARE = 16  # queries; an interval of another number takes student.FEWEST
MOST_SHARE = 1 + 1e-5  # more than all is rounding up to here
BY_REWARD_MODEL = '_by_reward_model'  # suffix of a best of n that another reward judges
REWARD_MODEL = 'reward model'
CLASSIFIER, FUNCTION = 'classifier', 'reward function'  # called REWARD_MODEL in results


def named(results: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return results of `evaluate` to show, in which the reward of the run is called `kind`."""
    rewards = results.get('rewards')
    if not isinstance(rewards, dict) or REWARD_MODEL not in rewards or kind in rewards:
        return results
    renamed = {kind if name == REWARD_MODEL else name: of for name, of in rewards.items()}
    return {**results, 'rewards': renamed}


def point_label(point: str, reward: str, trained_on: str) -> str:
    """Return the label of a point among results of `reward`; trained_on: the policy's reward."""
    if point == OWN_BEST:
        return f'optimum for {trained_on}'
    if point.endswith(BY_REWARD_MODEL):
        point = point.removesuffix(BY_REWARD_MODEL)
        reward = trained_on
    text = point.replace('_', ' ')
    return f'{text} by {reward}' if point.startswith('best_of_') else text


def not_finite(points: dict[str, dict[str, Any]]) -> list[str]:
    """Return the points whose KL or reward is infinite or NaN, which are None in results."""
    return [point for point in _unknown(points) if not _has_few_samples(points[point])]


def _unknown(points: dict[str, dict[str, Any]]) -> list[str]:
    found = []
    for point, values in points.items():
        if point not in CURVES and None in (values['kl'], values['reward']):
            found.append(point)
    return found


def _has_few_samples(values: Mapping[str, Any]) -> bool:
    """Return whether nothing is said about the best there is at the KL of a point."""
    effective = values.get('effective_samples')  # None of rewards that are not finite
    return effective is not None and effective < FEW_SAMPLES


def points_of(
    results: dict[str, Any], reward: str
) -> tuple[dict[str, dict[str, Any]], dict[str, list[str]]]:
    """Return {point: values} to draw, and {kind: its points}; all best of n by one are a kind."""
    points = results['rewards'][reward]
    # A curve goes through OWN_BEST.
    left_out = (*CURVES, OWN_BEST, *_unknown(points))
    marks = {point: values for point, values in points.items() if point not in left_out}
    kinds: dict[str, list[str]] = {}
    for point in marks:
        kind = point_label(point, reward, _trained_on(results))
        if point.startswith('best_of_'):
            kind = f'best of n by {kind.split(" by ")[1]}'
        kinds.setdefault(kind, []).append(point)
    return marks, kinds


def from_base(points: dict[str, Any], curve: str) -> tuple[list[float], list[float]]:
    """Return KLs and rewards of a curve, as far as it is known, from the initial model on."""
    base, found = points['base'], well_sampled(points[curve])
    return [base['kl'], *found.get('kl', ())], [base['reward'], *found.get('reward', ())]


def margin(values: Mapping[str, Any], name: str, queries: int) -> float | None:
    """Return half the width of the 95 % interval of a number; None where it has no error.

    Queries are taken as independent; the mean of few has a t distribution; very few tell nothing.
    """
    error = values.get('standard_errors', {}).get(name)
    if not error or queries < (FEWEST_FOR_SHARE if name == 'share' else student.FEWEST):
        return None
    return student.quantile(queries - 1) * error


def value_of(values: Mapping[str, Any], name: str) -> float | None:
    """Return a number of a point; None where it is not known.

    Earlier versions wrote a frontier and a share also where samples were too few for them.
    """
    is_above = (values.get('share') or 0) > MOST_SHARE
    if name in ('frontier', 'share') and (is_above or _has_few_samples(values)):
        return None
    return values[name]


def well_sampled(curve: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return the part of a curve that is exact, or estimated from enough samples."""
    sizes = curve.get('effective_samples', ())
    count = sum(1 for _ in itertools.takewhile(lambda size: size >= FEW_SAMPLES, sizes))
    names = ('kl', 'reward', 'standard_errors')
    return {name: curve[name][: count if sizes else None] for name in names if name in curve}


COLUMNS = {
    'kl': 'KL',
    'reward': 'reward',
    'frontier': 'best at that KL',
    'share': 'share of the gain',
}
# The table mentions a KL that misses its target, or a coefficient that still moves, by this share.
SETTLED = 0.1


class Table(NamedTuple):
    """Table of the results of one reward: cells of text, heads first, and notes."""

    reward: str
    rows: list[list[str]]
    remarks: list[str]


def table(results: dict[str, Any]) -> Iterator[str]:
    """Yield the results of `evaluate` as lines of text."""
    yield how_measured(results)
    for each in tables(results):
        yield ''
        yield from aligned(each.rows)
        yield from each.remarks


def how_measured(results: dict[str, Any]) -> str:
    """Return a line on the data that the results are computed from."""
    has_errors = 'standard_errors' in results['rewards'][_trained_on(results)]['policy']
    return _told('how_measured', results=results, has_errors=has_errors, fewest=student.FEWEST)


def _told(macro: str, **facts: Any) -> str:
    """Return what a macro of report.jinja writes; LookupError where the results lack something."""
    template = environment(os.path.dirname(__file__)).get_template('report.jinja')
    try:
        return getattr(template.module, macro)(fewest_for_share=FEWEST_FOR_SHARE, **facts)
    except jinja2.UndefinedError as e:
        raise LookupError(str(e)) from e


def tables(results: dict[str, Any]) -> list[Table]:
    """Return the results of each reward, that of the training first."""
    return [
        Table(name, _rows(results, name, points), _remarks(results, name, points))
        for name, points in results['rewards'].items()
    ]


def _remarks(results: dict[str, Any], name: str, points: dict[str, dict[str, Any]]) -> list[str]:
    """Return lines about a table: its judge, the optimum, and why there are dashes."""
    policy, control = points['policy'], results.get('kl_control')
    trained_on = _trained_on(results)
    missed = moved = False
    if 'kl_to_optimum' in policy and policy['kl'] is not None and control is not None:
        before = control['kl_coef_before']  # it may be 0
        missed = abs(policy['kl'] / control['target'] - 1) > SETTLED
        moved = abs(control['kl_coef'] - before) > SETTLED * before
    broken = [point_label(point, name, trained_on) for point in not_finite(points)]
    text = _told(
        'remarks',
        results=results,
        judge=name,
        policy=policy,
        missed=missed,
        moved=moved,
        broken=broken,
        few_samples=FEW_SAMPLES,
        **({} if broken else _dashes(name, trained_on, points)),
    )
    return [line for line in text.split('\n') if line]


def _dashes(name: str, trained_on: str, points: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the points without a number for the best there is, or the share, and why."""
    few, above, shares, vague = [], [], [], False
    for point, values in points.items():
        label = point_label(point, name, trained_on)
        if point not in CURVES and _has_few_samples(values):
            few.append(label)
        elif 'share' in values and value_of(values, 'frontier') is None:
            above.append(label)
        elif 'share' in values:
            possible = values['frontier'] - points['base']['reward']
            shares.append(values['share'])
            vague = vague or (values['share'] is None and possible > 1e-5 * abs(values['frontier']))
    gain = 'none at that KL' if None in shares else ''
    if shares and not any(shares):
        gain = 'none'
    return {'few': few, 'above': above, 'gain': 'vague' if vague else gain}


def _trained_on(results: dict[str, Any]) -> str:
    return next(iter(results['rewards']))


def _rows(results: dict[str, Any], name: str, points: dict[str, dict[str, Any]]) -> list[list[str]]:
    queries = results['queries']
    rows = [[name, *COLUMNS.values()]]
    for point in points:
        if point not in CURVES:
            cells = [_cell(points[point], key, queries) for key in COLUMNS]
            rows.append([point_label(point, name, _trained_on(results)), *cells])
    if 'kl_to_optimum' in points['policy']:
        empty = [''] * (len(COLUMNS) - 1)
        distance = _cell(points['policy'], 'kl_to_optimum', queries)
        rows.append(['KL(policy || optimum)', distance, *empty])
    return rows


def _cell(values: dict[str, Any], name: str, queries: int) -> str:
    """Format a number with its 95 % interval; '' where none belongs, '-' for an unknown one."""
    if name not in values:
        return ''
    value = value_of(values, name)
    if value is None:
        return '-'
    digits = '.1%' if name == 'share' else '.3f'
    width = margin(values, name, queries)
    if width is None:
        return format(value, digits)
    return f'{value:{digits}} ± {width:{digits}}'
