"""Quantiles of Student's t, as in tables."""

import pytest

from lm_human_preferences.utils import student


@pytest.mark.parametrize(
    'dof, expected', [(1, 12.7062), (2, 4.3027), (10, 2.2281), (31, 2.0395), (1000, 1.9623)]
)
def test_quantiles_are_those_of_tables(dof, expected):
    assert student.quantile(dof) == pytest.approx(expected, abs=5e-5)
