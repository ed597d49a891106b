"""Statistics of labels: agreement, confidence intervals of fractions, preference for a position."""

import itertools
import math
from collections.abc import Sequence

import numpy as np

from lm_human_preferences.label_types import LabelType, Value
from lm_human_preferences.utils import student

NORMAL_95 = 1.959963984540054  # 95 % of a standard normal distribution is within +- this number
IMAGINED = 0.25  # weight of a pseudo-query that effective_answers adds; a real query weighs 1
LEAST_EXPECTED = 5  # least number of expected answers per cell for a chi-square test


def krippendorff_alpha(answers: Sequence[Sequence[Value]], label_type: LabelType) -> float:
    """Return Krippendorff's alpha over all questions: 1 for full agreement, 0 for that of chance.

    Chance must not depend on the order in which samples happen to be stored, so each question
    counts once for each rotation of its samples. NaN if no two answers differ after that.
    """
    places = list(range(len(label_type.samples)))
    units = []
    for of_question in answers:
        for first in places if len(of_question) > 1 else ():
            order = places[first:] + places[:first]
            units.append([label_type.moved(value, order) for value in of_question])
    if label_type.is_numeric:  # the package krippendorff needs too much memory for many numbers
        pooled = np.array([*itertools.chain(*units)], np.float64)
        with np.errstate(over='ignore', invalid='ignore'):  # large numbers may overflow
            inside = sum(len(unit) * np.var(unit, ddof=1) for unit in units) / max(len(pooled), 1)
            overall = pooled.var(ddof=1) if units else 0.0
            return float(1 - inside / overall) if overall > 0 else math.nan
    names = [[repr(value) for value in unit] for unit in units]  # lists are not hashable
    domain = sorted(set(itertools.chain(*names)))
    if len(domain) < 2:
        return math.nan
    import krippendorff  # only reports need this package

    counts = [[unit.count(name) for name in domain] for unit in names]
    return float(krippendorff.alpha(value_counts=counts, level_of_measurement='nominal'))


def clustered_interval(successes: Sequence[float], answers: Sequence[int]) -> tuple[float, float]:
    """Return the 95 % confidence interval of a fraction of answers that are clustered by query.

    successes, answers: numbers for each query. This is Wilson's interval for effective_answers, for
    these labellers only. (0, 1) if queries are too few.
    """
    effective = effective_answers(successes, answers)
    return wilson_interval(sum(successes) / max(sum(answers), 1) * effective, effective)


def effective_answers(successes: Sequence[float], answers: Sequence[int]) -> float:
    """Return the number of independent answers that are worth as much as these clustered answers.

    It is 0 if a query has several answers and there are too few queries: they count as
    (sum of answers)^2 / (sum of answers^2) queries with equally many answers. Else it is their
    number over the design effect (L. Kish), 1 + (sum of answers^2 / sum of answers - 1) rho. rho,
    the correlation of two answers to one query, is estimated as Krippendorff's alpha, with two
    queries of weight IMAGINED added: one whose answers are all right, and one with none right. This
    makes intervals correct from 10 questions on: see benchmarks/interval_coverage.py.
    """
    right, counts = np.array(successes, np.float64), np.array(answers, np.float64)
    total, squares = counts.sum(), (counts**2).sum()
    repeated = counts > 1
    if not repeated.any():
        return float(total)
    if total**2 < student.FEWEST * squares:
        return 0.0
    right, count = right[repeated], counts[repeated]
    wrong = count - right
    observed = (2 * right * wrong / (count - 1)).sum()
    imagined = IMAGINED * count.mean()
    all_right, all_wrong = right.sum() + imagined, wrong.sum() + imagined
    rho = 1 - (all_right + all_wrong - 1) * observed / (2 * all_right * all_wrong)
    return float(total / (1 + (squares / total - 1) * min(max(rho, 0.0), 1.0)))


def wilson_interval(successes: float, n: float) -> tuple[float, float]:
    """Return Wilson's 95 % confidence interval of the fraction `successes` / `n`."""
    if n == 0:
        return 0.0, 1.0
    share, z2 = successes / n, NORMAL_95**2
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = NORMAL_95 / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n**2))
    return max(centre - half, 0.0), min(centre + half, 1.0)


def in_words(low: float, high: float) -> str:
    """Describe the 95 % confidence interval from `low` to `high` in words; 0 to 1 means unknown."""
    if (low, high) == (0, 1):
        return f'no interval: ask about at least {student.FEWEST} queries, of similar weight'
    ends = f'{100 * low:.1f} to {100 * high:.1f} %'
    return f'95 % interval {ends}, for these labellers, independent queries'


def uniform_p_value(counts: Sequence[int]) -> float | None:
    """Return the p-value of Pearson's test that all cells are equally likely.

    None if fewer than LEAST_EXPECTED answers are expected in each cell.
    """
    if sum(counts) < LEAST_EXPECTED * max(len(counts), 1):
        return None
    from scipy import stats  # this import takes a second

    return float(stats.chisquare(counts).pvalue)
