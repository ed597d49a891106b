"""Quantiles of Student's t distribution, for intervals of means of few values."""

import functools
from collections.abc import Sequence

FEWEST = 10  # fewest independent values from which an interval is computed


@functools.cache
def quantile(dof: int) -> float:
    """Return the upper end of the 95 % interval of t with `dof` >= 1 degrees of freedom."""
    from scipy import special  # slow to import, and few commands need it

    return float(special.stdtrit(dof, 0.975))


def dof_of(values: Sequence[float]) -> int:
    """Return the degrees of freedom, at least 1, of t for the mean of 2 or more `values`.

    Long tails reduce the degrees: n values with kurtosis k yield a variance that is only as precise
    as that of 2 n / (k - 1) normal values.
    """
    count, mean = len(values), sum(values) / len(values)
    squares = fourths = 0.0
    for value in values:
        squares += (value - mean) ** 2
        fourths += (value - mean) ** 4
    kurtosis = count * fourths / max(squares**2, 1e-300)
    return max(1, round(min(count, 2 * count / max(kurtosis - 1, 1e-9))) - 1)
