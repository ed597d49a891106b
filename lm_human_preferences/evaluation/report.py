"""Table of an evaluation."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from lm_human_preferences.labels.report.wording import aligned

BEST_OF = (4, 16, 64)
JUDGE = 'judge'  # what the reward is called that --judge names
OWN_OPTIMUM = 'own_optimum'  # the curve in the results of a reward that was not trained on
CURVES = ('frontier', OWN_OPTIMUM)  # what is no point among those of a reward
OWN_BEST = 'optimum_by_reward_model'  # the point of OWN_OPTIMUM at the policy's KL
FEW_SAMPLES = 10  # effective ones, below which estimates are too low to be of use
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


def point_label(point: str, reward: str, trained_on: str = 'reward model') -> str:
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
    found = []
    for point, values in points.items():
        if point not in CURVES and None in (values['kl'], values['reward']):
            found.append(point)
    return found


def points_of(
    results: dict[str, Any], reward: str
) -> tuple[dict[str, dict[str, Any]], dict[str, list[str]]]:
    """Return {point: values} to draw, and {kind: its points}; all best of n by one are a kind."""
    points = results['rewards'][reward]
    # A curve goes through OWN_BEST.
    left_out = (*CURVES, OWN_BEST, *not_finite(points))
    marks = {point: values for point, values in points.items() if point not in left_out}
    kinds: dict[str, list[str]] = {}
    for point in marks:
        kind = point_label(point, reward, _trained_on(results))
        if point.startswith('best_of_'):
            kind = f'best of n by {kind.split(" by ")[1]}'
        kinds.setdefault(kind, []).append(point)
    return marks, kinds


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
    kind = 'exact, from all' if results['exact'] else 'estimated, from samples:'
    return f'{kind} {results["responses"]} responses to each of {results["queries"]} queries'


def tables(results: dict[str, Any]) -> list[Table]:
    """Return the results of each reward, that of the training first."""
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
        yield from _without_share(points)
    undersampled = []
    for point, values in points.items():
        # None of rewards that are not finite.
        effective = None if point in CURVES else values.get('effective_samples')
        if effective is not None and effective < FEW_SAMPLES:
            undersampled.append(point_label(point, name, _trained_on(results)))
    if undersampled:
        yield (
            f'WARNING: less than {FEW_SAMPLES} effective samples at the KL of'
            f' {", ".join(undersampled)}; the best there is estimated too low: give more --samples'
        )


def _trust(curve: dict[str, Any], judge: str, trained_on: str) -> str:
    """Return a line about the KL up to which the reward `trained_on` can be trusted, by another."""
    trusted = curve['trusted_up_to']
    if trusted is None and 'effective_samples' not in curve:
        return f'{trained_on}: trusted at every KL: where it rises, the {judge} never falls'
    if trusted is None:
        enough = zip(curve['kl'], curve['effective_samples'])
        kl = max([0.0, *(kl for kl, samples in enough if samples >= FEW_SAMPLES)])
        return f'{trained_on}: trusted up to KL {kl:.1f} at least, as far as these samples tell'
    return f'{trained_on}: trusted up to KL {trusted:.1f}: beyond, the {judge} falls where it rises'


def _without_share(points: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield a line that says why there is a dash instead of a share, if there is one."""
    shares = [values['share'] for values in points.values() if 'share' in values]
    if all(share is None for share in shares):
        yield '-: there is no gain, as all responses to a query have the same score'
    elif None in shares:
        yield '-: there is no gain at that KL'


def _trained_on(results: dict[str, Any]) -> str:
    return next(iter(results['rewards']))


def _rows(name: str, points: dict[str, dict[str, Any]], trained_on: str) -> list[list[str]]:
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
    """Format a number with its standard error; '' where none belongs, '-' for an unknown one."""
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
