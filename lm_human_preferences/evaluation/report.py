"""Results of an evaluation for readers: a table in text, and what pictures and pages show."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from lm_human_preferences.labels.report.wording import aligned
from lm_human_preferences.utils import student

BEST_OF = (4, 16, 64)
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
    counts = f'{results["responses"]} responses to each of {results["queries"]} queries'
    trained_on = results.get('queries_trained_on')
    if trained_on:
        counts += f' ({trained_on} of them are trained on, too)'
    how = f'estimated, from samples: {counts}'
    if results['exact']:
        how = f'exact, from all {counts}'
    points = next(iter(results['rewards'].values()))
    if 'standard_errors' not in points['policy']:
        return how
    if results['queries'] < student.FEWEST:
        return f'{how}; no ±: it takes {student.FEWEST} queries, for a share {FEWEST_FOR_SHARE}'
    return f'{how}; ±: 95 % interval'


def tables(results: dict[str, Any]) -> list[Table]:
    """Return the results of each reward, that of the training first."""
    return [
        Table(
            name,
            _rows(results, name, points),
            list(_remarks(results, name, points)),
        )
        for name, points in results['rewards'].items()
    ]


def _remarks(
    results: dict[str, Any], name: str, points: dict[str, dict[str, Any]]
) -> Iterator[str]:
    if name == JUDGE:
        yield f'judge: {results["judge"]}'
    policy = points['policy']
    if 'kl_to_optimum' in policy:
        last = ', the last of the run' if results.get('kl_coef_is_last') else ''
        yield f'optimum: the best policy at the KL coefficient {results["kl_coef"]:.4g}{last}'
        if policy['kl'] is not None:
            yield from _unsettled(results.get('kl_control'), policy['kl'])
    if OWN_OPTIMUM in points:
        yield _trust(points[OWN_OPTIMUM], name, _trained_on(results))
    broken = [point_label(point, name, _trained_on(results)) for point in not_finite(points)]
    if broken:
        yield f'WARNING: the KL or the reward of {", ".join(broken)} is not finite'
    else:
        yield from _without_share(results, name, points)


def _trust(curve: dict[str, Any], judge: str, trained_on: str) -> str:
    """Return a line about the KL up to which the reward `trained_on` can be trusted, by another."""
    trusted = curve['trusted_up_to']
    if not curve.get('rises', True):
        return f'{trained_on}: not trusted: the {judge} does not clearly rise where it begins to'
    if trusted is not None:
        return (
            f'{trained_on}: trusted up to KL {trusted:.1f}: beyond, the {judge} falls where it'
            ' rises'
        )
    least = curve.get('least_fall')
    if least is None and 'effective_samples' not in curve:
        return f'{trained_on}: trusted at every KL: where it rises, the {judge} never falls'
    kl = max([0.0, *well_sampled(curve)['kl']])
    line = f'{trained_on}: no fall of the {judge} seen up to KL {kl:.1f}'
    return line if least is None else f'{line}; these data would show one above {least:.2g}'


def _without_share(
    results: dict[str, Any], name: str, points: dict[str, dict[str, Any]]
) -> Iterator[str]:
    """Yield lines that say why there are dashes instead of numbers, if there are some."""
    few, above, shares, vague = [], [], [], False
    for point, values in points.items():
        label = point_label(point, name, _trained_on(results))
        if point not in CURVES and _has_few_samples(values):
            few.append(label)
        elif 'share' in values and value_of(values, 'frontier') is None:
            above.append(label)
        elif 'share' in values:
            possible = values['frontier'] - points['base']['reward']
            shares.append(values['share'])
            vague = vague or (values['share'] is None and possible > 1e-5 * abs(values['frontier']))
    if few:
        yield (
            f'-: less than {FEW_SAMPLES} effective samples at the KL of {", ".join(few)}: too few'
            ' to tell the best there is; give more --samples'
        )
    if above:
        yield f'-: more than was found possible at its KL: {", ".join(above)}; give more --samples'
    if vague:
        yield (
            f'-: a share takes {FEWEST_FOR_SHARE} queries or more whose gains do not differ too'
            ' much; give more --queries'
        )
    elif shares and not any(shares):
        yield '-: nothing is gained, as all responses to a query have the same score'
    elif None in shares:
        yield '-: nothing is gained at that KL'


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


def _unsettled(control: dict[str, Any] | None, kl: float) -> Iterator[str]:
    """Yield a note if the policy's KL missed its target or the coefficient was still moving."""
    if control is None:
        return
    before = control['kl_coef_before']
    now = control['kl_coef']
    reasons = []
    if abs(kl / control['target'] - 1) > SETTLED:
        reasons.append(f'the KL is {kl:.2f}, not the target {control["target"]:g}')
    if abs(now - before) > SETTLED * before:  # it may be 0
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
