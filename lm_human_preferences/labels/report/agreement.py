"""Statistics of labels: agreement, intervals of fractions, preference for a position."""

import itertools
import math
from collections.abc import Sequence

import numpy as np

from lm_human_preferences.label_types import LabelType, Value
from lm_human_preferences.utils import student

NORMAL_95 = 1.959963984540054  # a standard normal lies within +- this with probability 0.95
# Weight of imagined questions whose labellers all agree. With them, intervals have the coverage
# that they promise from 10 questions on, see benchmarks/interval_coverage.py.
IMAGINED = 0.25
LEAST_EXPECTED = 5  # a chi-square test with fewer expected answers in a cell is too inexact


def krippendorff_alpha(answers: Sequence[Sequence[Value]], label_type: LabelType) -> float:
    """Return Krippendorff's alpha of the answers to each question: 1 if all agree, 0 by chance.

    Chance must not depend on the order in which samples happen to be stored, so each question
    counts once for each rotation of its samples. NaN if no two answers differ after that.
    """
    places = list(range(len(label_type.samples)))
    units = []
    for of_question in answers:
        for first in places if len(of_question) > 1 else ():
            order = places[first:] + places[:first]
            units.append([label_type.moved(value, order) for value in of_question])
    if label_type.is_numeric:
        return _alpha_of_numbers(units)
    names = [[repr(value) for value in unit] for unit in units]  # a value may be a list
    domain = sorted(set(itertools.chain(*names)))
    if len(domain) < 2:
        return math.nan
    import krippendorff  # not above, as only reports need it

    counts = [[unit.count(name) for name in domain] for unit in names]
    return float(krippendorff.alpha(value_counts=counts, level_of_measurement='nominal'))


def _alpha_of_numbers(units: Sequence[Sequence[float]]) -> float:
    """Return Krippendorff's alpha, by squared differences, of the numbers given to each unit.

    The library would need an array (units, values, values): too much memory for many values.
    """
    pooled = np.array([*itertools.chain(*units)], np.float64)
    with np.errstate(over='ignore', invalid='ignore'):  # numbers near the largest float
        inside = sum(len(unit) * np.var(unit, ddof=1) for unit in units) / max(len(pooled), 1)
        overall = pooled.var(ddof=1) if units else 0.0
        return float(1 - inside / overall) if overall > 0 else math.nan


def clustered_interval(successes: Sequence[float], answers: Sequence[int]) -> tuple[float, float]:
    """Return the 95 % confidence interval of a fraction of answers, clustered by query.

    successes, answers: numbers for each query. As labellers agree, k answers about one query say
    less than answers about k queries: this is Wilson's interval for the number of answers divided
    by the design effect. It holds for these labellers only. (0, 1) if queries are too few.
    """
    effective = effective_answers(successes, answers)
    if effective == 0:
        return 0.0, 1.0
    return wilson_interval(sum(successes) / sum(answers) * effective, effective)


def effective_answers(successes: Sequence[float], answers: Sequence[int]) -> float:
    """Return the number of independent answers that would tell as much as clustered ones.

    It is 0 if a query has several answers and there are too few queries: they count as
    (sum of answers)^2 / (sum of answers^2) queries with equally many answers.
    """
    counts = np.array(answers, np.float64)
    if counts.max(initial=0) > 1 and counts.sum() ** 2 < student.FEWEST * (counts**2).sum():
        return 0.0
    return float(counts.sum()) / design_effect(np.array(successes, np.float64), counts)


def design_effect(right: np.ndarray, answers: np.ndarray) -> float:
    """Return the factor by which clusters raise the variance of a fraction (L. Kish).

    right, answers (questions,): counts. It is 1 + (sum of answers^2 / sum of answers - 1) rho. rho,
    the correlation of two answers to one question, is estimated as Krippendorff's alpha, with two
    questions of weight IMAGINED added: one whose answers are all right, and one with none right.
    """
    is_repeated = answers > 1
    if not is_repeated.any():
        return 1.0
    right_of, count = right[is_repeated], answers[is_repeated]
    wrong_of = count - right_of
    observed = (2 * right_of * wrong_of / (count - 1)).sum()
    imagined = IMAGINED * count.mean()
    all_right, all_wrong = right_of.sum() + imagined, wrong_of.sum() + imagined
    expected = 2 * all_right * all_wrong
    rho = 1 - (all_right + all_wrong - 1) * observed / expected
    spread = (answers**2).sum() / answers.sum() - 1
    return float(1 + spread * min(max(rho, 0.0), 1.0))


def wilson_interval(successes: float, n: float) -> tuple[float, float]:
    """Return Wilson's 95 % confidence interval of the fraction `successes` / `n`."""
    if n == 0:
        return 0.0, 1.0
    share, z2 = successes / n, NORMAL_95**2
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = NORMAL_95 / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n**2))
    return max(centre - half, 0.0), min(centre + half, 1.0)


def in_words(low: float, high: float) -> str:
    """Return a phrase for an interval and its assumptions; (0, 1) stands for no interval."""
    if (low, high) == (0, 1):
        return f'no interval: ask about at least {student.FEWEST} queries, of similar weight'
    ends = f'{100 * low:.1f} to {100 * high:.1f} %'
    return f'95 % interval {ends}, for these labellers, independent queries'


def uniform_p_value(counts: Sequence[int]) -> float | None:
    """Return the p-value of Pearson's test that all cells are equally likely.

    None if fewer than LEAST_EXPECTED answers are expected in each cell.
    """
    expected = sum(counts) / max(len(counts), 1)
    if expected < LEAST_EXPECTED:
        return None
    from scipy import special  # scipy.stats takes seconds to import

    statistic = sum((count - expected) ** 2 for count in counts) / expected
    return float(special.chdtrc(len(counts) - 1, statistic))
