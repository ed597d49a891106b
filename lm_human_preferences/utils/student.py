"""Quantiles of Student's t distribution, for intervals of means of few values."""

import functools
import math
from collections.abc import Sequence

UPPER_95 = 0.975  # the probability below the upper end of a 95 % interval
FEWEST = 10  # independent values, of which there may be two kinds, that tell an interval


@functools.cache
def quantile(dof: int, probability: float = UPPER_95) -> float:
    """Return the quantile of t with `dof` >= 1 degrees of freedom; 0.5 <= probability < 1."""
    low, high = 0.0, 1.0
    while _below(high, dof) < probability:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        if _below(middle, dof) < probability:
            low = middle
        else:
            high = middle
    return high


def _below(t: float, dof: int) -> float:
    """Return the probability of less than `t` >= 0.

    Abramowitz and Stegun, Handbook of Mathematical Functions (1964), 26.7.3 and 26.7.4: finite sums
    of powers of the cosine of atan(t / sqrt(dof)).
    """
    angle = math.atan2(t, math.sqrt(dof))
    square = math.cos(angle) ** 2
    is_odd = dof % 2
    total, term = 0.0, math.cos(angle) if is_odd else 1.0
    for power in range(is_odd, dof, 2):
        total += term
        term *= square * (power + 1) / (power + 2)
    total *= math.sin(angle)
    within = 2 / math.pi * (angle + total) if is_odd else total
    return (1 + within) / 2


def dof_of(values: Sequence[float]) -> int:
    """Return the degrees of freedom, at least 1, of t for the mean of 2 or more `values`.

    They are fewer where tails are long: the variance of n values with the kurtosis k is known as
    well as that of 2 n / (k - 1) normal ones.
    """
    count, mean = len(values), sum(values) / len(values)
    squares = [(value - mean) ** 2 for value in values]
    kurtosis = count * sum(square**2 for square in squares) / max(sum(squares) ** 2, 1e-300)
    return max(1, round(min(count, 2 * count / max(kurtosis - 1, 1e-9))) - 1)
