"""Quantiles of Student's t distribution, for confidence intervals of the mean of few values."""

import functools

FEWEST = 10  # smallest number of independent values from which an interval is computed


@functools.cache
def quantile(dof: int) -> float:
    """Return the 97.5 % quantile of Student's t distribution with `dof` >= 1 degrees of freedom."""
    from scipy import special  # importing scipy is slow, and few commands need it

    return float(special.stdtrit(dof, 0.975))
