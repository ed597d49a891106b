"""Results of an evaluation as text tables, and as a picture of reward against KL."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from lm_human_preferences import storage
from lm_human_preferences.labels.report.label_report import aligned
from lm_human_preferences.utils import student
from lm_human_preferences.utils.streams import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Point = Mapping[str, Any]  # {statistic's name: value} of a policy; may have 'standard_errors'

BEST_OF = (4, 16)
BEST_OF_N = 'best_of_'  # prefix of the names of best-of-n policies in an evaluation's results
JUDGE = 'judge'  # name, in an evaluation's results, of the reward that --judge selects
FRONTIER = 'frontier'  # key, in an evaluation's results, of the best possible reward at each KL
# suffix of a best-of-n policy's name if the reward model chooses the best response
BY_REWARD_MODEL = '_by_reward_model'
REWARD_MODEL, CLASSIFIER, FUNCTION = 'reward model', 'classifier', 'reward function'
COLUMNS = {
    'kl': 'KL',
    'reward': 'reward',
    'frontier': 'best at that KL',
    'share': 'share of the gain',
}
ESTIMATED = '; ±: 95 % interval, from 10 queries on'
UNKNOWN = (
    '-: nothing to gain, or too few --samples to tell; a share from samples takes 30 --queries'
)
MARKERS = {'base': 'o', 'policy': '*', 'optimum': 'D'}


def table(results: dict[str, Any]) -> Iterator[str]:
    """Yield the results of `evaluate` as lines of text."""
    way, more = (
        ('exact, from all', '') if results['exact'] else ('estimated, from samples:', ESTIMATED)
    )
    line = f'{way} {results["responses"]} responses to each of {results["queries"]} queries'
    if results.get('queries_trained_on'):
        line += f' ({results["queries_trained_on"]} of them are trained on, too)'
    yield line + more
    for reward in results['rewards']:
        rows = rows_of(results, reward)
        yield ''
        yield from aligned(rows)
        if reward == JUDGE:
            yield f'judge: {printable(str(results["judge"]))}'
        if 'optimum' in results['rewards'][reward]:
            yield f'optimum: the best policy at the KL coefficient {results["kl_coef"]:.4g}'
        if any('-' in row for row in rows):
            yield UNKNOWN


def rows_of(results: dict[str, Any], reward: str) -> list[list[str]]:
    """Return the results of one reward as rows of a table, of which the first has the headings."""
    queries, points = results['queries'], results['rewards'][reward]
    rows = [[reward, *COLUMNS.values()]]
    for label, point in labels_of(results, reward).items():
        rows.append([label, *(_cell(points[point], name, queries) for name in COLUMNS)])
    if 'kl_to_optimum' in points['policy']:
        distance = _cell(points['policy'], 'kl_to_optimum', queries)
        rows.append(['KL(policy || optimum)', distance, '', '', ''])
    return rows


def labels_of(results: dict[str, Any], reward: str) -> dict[str, str]:
    """Return {label to display: key in the results} for each policy that is scored by `reward`."""
    trained_on, found = next(iter(results['rewards'])), {}
    for point in results['rewards'][reward]:
        label = point.removesuffix(BY_REWARD_MODEL).replace('_', ' ')
        if point.startswith(BEST_OF_N):
            label += f' by {trained_on if point.endswith(BY_REWARD_MODEL) else reward}'
        if point != FRONTIER:
            found[label] = point
    return found


def _cell(values: Point, name: str, queries: int) -> str:
    """Format a number with its 95 % interval; '-' if the number is unknown, '' if there is none."""
    if name not in values:
        return ''
    if values[name] is None:
        return '-'
    digits = '.1%' if name == 'share' else '.3f'
    width = margin(values, name, queries)
    more = '' if width is None else f' ± {width:{digits}}'
    return f'{values[name]:{digits}}{more}'


def margin(values: Point, name: str, queries: int) -> float | None:
    """Return half the width of a 95 % interval; None if the error is unknown or queries are few.

    Queries are treated as independent, so that the mean over queries has a t distribution.
    """
    error = values.get('standard_errors', {}).get(name)
    if not error or queries < student.FEWEST:
        return None
    return student.quantile(queries - 1) * error


def draw(results: dict[str, Any], path: str) -> None:
    """Write a PNG to `path` that plots reward against KL, with one panel per reward."""
    # Figure is imported only here, as matplotlib loads slowly. A Figure needs no display.
    from matplotlib.figure import Figure

    rewards = results['rewards']
    figure = Figure(figsize=(6.4 * len(rewards), 4.4), layout='constrained')
    panels = figure.subplots(1, len(rewards), squeeze=False)[0]
    name = os.path.basename(os.path.abspath(results['save_dir']))[:80]
    figure.suptitle(f'Run {name}: the policy and the best one possible', parse_math=False)
    for axes, (reward, points) in zip(panels, rewards.items(), strict=True):
        axes.set(title=reward, xlabel='KL from the base model (nats)', ylabel='reward')
        axes.grid(color='#E5E5E5')
        labels = labels_of(results, reward)
        up_to = 1.2 * max(points[point]['kl'] or 0 for point in labels.values())
        _draw_frontier(axes, points['base'], points[FRONTIER], up_to)
        for label, point in labels.items():
            kl, score = points[point]['kl'], points[point]['reward']
            default = '^' if point.endswith(BY_REWARD_MODEL) else 's'
            marker, size = MARKERS.get(point, default), 13 if point == 'policy' else 7
            axes.plot([kl], [score], marker, markersize=size, markeredgecolor='black', label=label)
        axes.legend(loc='lower right', frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format='png', dpi=150)
    storage.write_bytes(path, buffer.getvalue())


def _draw_frontier(axes: Axes, base: Point, curve: dict[str, list[float]], up_to: float) -> None:
    """Draw the highest reward at each KL; a dotted line shows where only a lower bound is known."""
    kls, rewards = [base['kl'], *curve['kl']], [base['reward'], *curve['reward']]
    end = min(up_to, kls[-1])
    shown = [*(kl for kl in kls if kl < end), end]
    best = np.interp(shown, kls, rewards)
    axes.plot(shown, best, color='black', label='frontier')
    if end < up_to:
        label = 'frontier, at least'
        axes.plot([end, up_to], [best[-1], best[-1]], ':', color='black', label=label)
