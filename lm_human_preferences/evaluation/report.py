"""Results of an evaluation as text tables, and as the points of a picture."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from lm_human_preferences.labels.report.wording import aligned
from lm_human_preferences.utils import student
from lm_human_preferences.utils.terminal import printable

Point = Mapping[str, Any]  # {name: mean over queries}, and 'standard_errors': {name: error}

BEST_OF = (4, 16)
POINTS, BEST_OF_N = ('base', 'policy', 'optimum'), 'best_of_'  # names of points in results
JUDGE = 'judge'  # name of the reward of --judge in results
FRONTIER = 'frontier'  # key of the frontier, a curve, beside the points of a reward in results
FEW_SAMPLES = 10  # with fewer effective samples, the best possible reward is unknown
FEWEST_FOR_SHARE = 16  # fewest queries for the interval of a share; otherwise student.FEWEST
BY_REWARD_MODEL = '_by_reward_model'  # suffix of a best of n that another reward has chosen
REWARD_MODEL, CLASSIFIER, FUNCTION = 'reward model', 'classifier', 'reward function'
COLUMNS = {
    'kl': 'KL',
    'reward': 'reward',
    'frontier': 'best at that KL',
    'share': 'share of the gain',
}


def table(results: dict[str, Any]) -> Iterator[str]:
    """Yield the results of `evaluate` as lines of text."""
    yield how_measured(results)
    for reward in results['rewards']:
        yield ''
        yield from aligned(rows(results, reward))
        yield from remarks(results, reward)


def how_measured(results: dict[str, Any]) -> str:
    """Return a line that says what the results were computed from."""
    queries = results['queries']
    way = 'exact, from all' if results['exact'] else 'estimated, from samples:'
    line = f'{way} {results["responses"]} responses to each of {queries} queries'
    if results.get('queries_trained_on'):
        line += f' ({results["queries_trained_on"]} of them are trained on, too)'
    if 'standard_errors' not in results['rewards'][_trained_on(results)]['policy']:
        return line
    if queries < student.FEWEST:
        return f'{line}; no ±: it takes {student.FEWEST} queries, for a share {FEWEST_FOR_SHARE}'
    return f'{line}; ±: 95 % interval'


def _trained_on(results: dict[str, Any]) -> str:
    return next(iter(results['rewards']))


def _label(point: str, reward: str, trained_on: str) -> str:
    chooser = reward
    if point.endswith(BY_REWARD_MODEL):
        point, chooser = point.removesuffix(BY_REWARD_MODEL), trained_on
    text = point.replace('_', ' ')
    return f'{text} by {chooser}' if point.startswith(BEST_OF_N) else text


def rows(results: dict[str, Any], reward: str) -> list[list[str]]:
    """Return the results by a reward as rows of a table; the first row has the column headings."""
    queries = results['queries']
    found = [[reward, *COLUMNS.values()]]
    points = points_of(results, reward)
    for label, values in points.values():
        found.append([label, *(_cell(values, key, queries) for key in COLUMNS)])
    _, policy = points['policy']
    if 'kl_to_optimum' in policy:
        distance = _cell(policy, 'kl_to_optimum', queries)
        found.append(['KL(policy || optimum)', distance, '', '', ''])
    return found


def _cell(values: Point, name: str, queries: int) -> str:
    """Format a number with its 95 % interval: '' if a point has no such number, '-' if unknown."""
    if name not in values:
        return ''
    value = values[name]
    if value is None:
        return '-'
    digits = '.1%' if name == 'share' else '.3f'
    width = margin(values, name, queries)
    if width is None:
        return format(value, digits)
    return f'{value:{digits}} ± {width:{digits}}'


def margin(values: Point, name: str, queries: int) -> float | None:
    """Return half the width of a number's 95 % interval; None without an error or enough queries.

    Queries are treated as independent, so that the mean over queries has a t distribution.
    """
    error = values.get('standard_errors', {}).get(name)
    if not error or queries < (FEWEST_FOR_SHARE if name == 'share' else student.FEWEST):
        return None
    return student.quantile(queries - 1) * error


def _has_few_samples(values: Point) -> bool:
    """Return whether a point has too few samples to estimate the best policy at its KL."""
    effective = values.get('effective_samples')  # None if rewards are not finite
    return effective is not None and effective < FEW_SAMPLES


def not_finite(results: dict[str, Any], reward: str) -> list[str]:
    """Return the labels of points whose KL or reward is infinite or NaN (None in `results`)."""
    found = points_of(results, reward).values()
    return [label for label, of in found if not is_known(of) and not _has_few_samples(of)]


def remarks(results: dict[str, Any], reward: str) -> list[str]:
    """Return lines about a table: its judge, the optimum, and why there are dashes."""
    points = points_of(results, reward)
    _, policy = points['policy']
    lines = [f'judge: {printable(str(results["judge"]))}'] if reward == JUDGE else []
    if 'kl_to_optimum' in policy:
        last = ', the last of the run' if results.get('kl_coef_is_last') else ''
        coefficient = f'{results["kl_coef"]:.4g}{last}'
        lines.append(f'optimum: the best policy at the KL coefficient {coefficient}')
    broken = not_finite(results, reward)
    if broken:
        return [*lines, f'WARNING: the KL or the reward of {", ".join(broken)} is not finite']
    unknown = []
    for label, values in points.values():
        if _has_few_samples(values) or values.get('frontier', 0) is None:
            unknown.append(label)
    if unknown:
        lines.append(
            f'-: too few samples to tell the best there is at the KL of {", ".join(unknown)};'
            ' give more --samples'
        )
    known = [values for label, values in points.values() if label not in unknown]
    if any(values.get('share', 0) is None for values in known):
        lines.append(
            '-: nothing is gained, as all scores are alike or the KL is 0; or --queries are below'
            f' {FEWEST_FOR_SHARE}, or the queries differ too much'
        )
    return lines


def points_of(results: dict[str, Any], reward: str) -> dict[str, tuple[str, Point]]:
    """Return {point: (label, {name: number})} of the results by `reward`."""
    found = {}
    for point, values in results['rewards'][reward].items():
        if point in POINTS or point.startswith(BEST_OF_N):
            found[point] = _label(point, reward, _trained_on(results)), values
    return found


def is_known(values: Point) -> bool:
    """Return whether KL and reward of a point are finite numbers."""
    return values['kl'] is not None and values['reward'] is not None


def frontier_of(points: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return {'kl', 'reward'} of the frontier, from the initial model to the last known point.

    A point is known if it is exact, or estimated from enough samples.
    """
    base, curve = points['base'], points[FRONTIER]
    sizes = curve.get('effective_samples')
    count = None
    if sizes is not None:
        count = len(list(itertools.takewhile(lambda size: size >= FEW_SAMPLES, sizes)))
    return {name: [base[name], *curve[name][:count]] for name in ('kl', 'reward')}
