"""Quantiles of Student's t, as in tables."""

import pytest

from lm_human_preferences.utils import student


@pytest.mark.parametrize(
    'dof, probability, expected',
    [
        (1, 0.975, 12.7062),
        (2, 0.975, 4.3027),
        (3, 0.995, 5.8409),
        (10, 0.975, 2.2281),
        (31, 0.975, 2.0395),
        (1000, 0.975, 1.9623),
        (7, 0.5, 0.0),
    ],
)
def test_quantiles_are_those_of_tables(dof, probability, expected):
    assert student.quantile(dof, probability) == pytest.approx(expected, abs=5e-5)
