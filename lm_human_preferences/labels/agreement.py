"""How far labellers agree, and how sure a share or a preference for a position is."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

NORMAL_95 = 1.959963984540054  # a standard normal lies within +- this with probability 0.95


def value_counts(answers: Sequence[Sequence[int]], categories: int) -> np.ndarray:
    """Counts (units, categories) of the values that each unit was given; answers: those of each."""
    counts = np.zeros((len(answers), categories), np.int64)
    for row, values in zip(counts, answers, strict=True):
        np.add.at(row, list(values), 1)
    return counts


def raw_agreement(counts: np.ndarray) -> tuple[float, int]:
    """(the share of pairs of answers to one unit that are equal, the number of pairs).

    counts (units, categories): see value_counts. The share is NaN where there is no pair.
    """
    totals = counts.sum(1)
    pairs = int((totals * (totals - 1) // 2).sum())
    equal = int((counts * (counts - 1) // 2).sum())
    return (equal / pairs if pairs else math.nan), pairs


def krippendorff_alpha(counts: np.ndarray) -> float:
    """Krippendorff's alpha for nominal values: 1 is perfect agreement, 0 what chance would give.

    counts (units, categories): see value_counts. Units with fewer than two values say nothing. NaN
    where nothing could be disagreed on: no such unit, or one value only in all of them.
    (K. Krippendorff, Computing Krippendorff's Alpha-Reliability, 2011.)
    """
    counts = counts[counts.sum(1) >= 2].astype(np.float64)
    totals = counts.sum(1)
    # Ordered pairs of unequal values inside units, each unit weighted by 1 / (its values - 1).
    observed = ((totals**2 - (counts**2).sum(1)) / (totals - 1)).sum()
    of_value, n = counts.sum(0), counts.sum()
    expected = n**2 - (of_value**2).sum()
    if expected == 0:
        return math.nan
    return float(1 - (n - 1) * observed / expected)


def wilson_interval(successes: int, n: int) -> tuple[float, float]:
    """The 95 % confidence interval of a share, by Wilson's score (without correction)."""
    if n == 0:
        return 0.0, 1.0
    share, z2 = successes / n, NORMAL_95**2
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = NORMAL_95 / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n**2))
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == n else centre + half
    return low, high


def chi_square(counts: Sequence[int]) -> tuple[float, float]:
    """(the statistic, its p-value) of Pearson's test that all cells are equally likely.

    Of no counts at all, or of one cell, it is (0, 1).
    """
    total, cells = sum(counts), len(counts)
    if total == 0 or cells < 2:
        return 0.0, 1.0
    expected = total / cells
    statistic = sum((count - expected) ** 2 for count in counts) / expected
    return statistic, chi_square_tail(statistic, cells - 1)


def chi_square_tail(x: float, degrees: int) -> float:
    """The probability that a chi-square variable of so many degrees of freedom is above x."""
    if x <= 0:
        return 1.0
    half = x / 2
    if degrees % 2:
        tail, order = math.erfc(math.sqrt(half)), 0.5
    else:
        tail, order = math.exp(-half), 1.0
    # Q(a + 1, y) = Q(a, y) + y^a exp(-y) / Gamma(a + 1)
    while order < degrees / 2:
        tail += math.exp(order * math.log(half) - half - math.lgamma(order + 1))
        order += 1
    return tail
