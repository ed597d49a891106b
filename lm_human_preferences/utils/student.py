"""Quantiles of Student's t distribution, for intervals of means of few values."""

import functools

FEWEST = 10  # fewest independent values from which an interval is computed


@functools.cache
def quantile(dof: int) -> float:
    """Return the upper end of the 95 % interval of t with `dof` >= 1 degrees of freedom."""
    from scipy import special  # slow to import, and few commands need it

    return float(special.stdtrit(dof, 0.975))
