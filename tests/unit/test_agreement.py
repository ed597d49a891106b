"""Agreement: published tables, sums by hand, and figures of other programs."""

import math
import random

import numpy as np
import pytest

from lm_human_preferences.labels.agreement import (
    chi_square,
    chi_square_tail,
    krippendorff_alpha,
    raw_agreement,
    value_counts,
    wilson_interval,
)

# krippendorff.alpha(..., level_of_measurement='nominal') of the package krippendorff 0.9.0 for the
# 200 tables of `random_tables`, rounded to 10 places; None where it has no value
# fmt: off
ALPHAS = [
    1.0, -0.002, -0.2171052632, 1.0, -0.1666666667, -0.037037037, -0.112716763, 0.4657534247,
    0.5384615385, -0.0211406096, 0.0454545455, -0.1612903226, 0.0296296296, 0.0447612732,
    -0.1574074074, 0.1710526316, -0.2857142857, 0.0327102804, -0.25, 0.0515536723, -0.0097192225,
    -0.3636363636, -0.1237161531, -0.0666666667, -0.05, -0.0833333333, -0.088372093, 0.0113636364,
    -0.0892857143, -0.0625, -0.2222222222, -0.5, 0.0909090909, 0.1012849584, 0.0526315789, 0.0,
    0.1218487395, -0.1011904762, 0.0454545455, 0.1689497717, -0.0340136054, None, 0.0714285714,
    -0.0208333333, -0.3333333333, -0.0784313725, 0.4923076923, 0.6, -0.2222222222, 0.1050724638,
    -0.1428571429, -0.25, -0.0544662309, 0.0782122905, -0.375, 0.1428571429, -0.1788617886,
    0.0909090909, -0.2727272727, -0.2459639126, -0.0569395018, 0.3125, -0.1002604167, 0.1836734694,
    0.0909090909, -0.0714285714, 0.0509259259, 0.0651695288, -0.1046025105, -0.0317460317, 0.0,
    -0.0476190476, -0.0106382979, 0.046728972, -0.0569105691, 0.1343283582, -0.2727272727,
    -0.1363636364, -0.0714285714, 0.1270301624, -0.1194852941, -0.2692307692, 0.1620111732,
    0.0520833333, -0.0921501706, 0.0277777778, -0.0918674699, 0.2881355932, -0.1612903226,
    0.0060240964, -0.05, -0.0112359551, 0.0372093023, 0.2153846154, -0.0365853659, 0.4444444444,
    0.0325203252, -0.012987013, 0.0814035088, -0.0309667674, 1.0, 0.0971128609, 0.0277777778,
    -0.0762527233, -0.2037037037, 0.303030303, 0.0626404494, -0.0304709141, 0.0922330097,
    -0.0659617321, -0.0515463918, -0.0195121951, -0.2692307692, -0.05, 0.2409638554, 0.0416666667,
    -0.125, 0.0235690236, -0.0909090909, 0.15, 0.3333333333, -0.0446265938, -0.2727272727, 0.0,
    -0.2, -0.0991735537, 0.3221757322, -0.1666666667, -0.1538461538, 0.1176470588, -0.4444444444,
    -0.0240963855, -0.1647058824, -0.019470405, -0.0050761421, -0.2729083665, 0.0222222222,
    0.4444444444, 0.28, 0.0833333333, 0.3333333333, 0.1878453039, 0.0434782609, -0.037037037,
    0.1333333333, -0.1904761905, -0.2857142857, 0.0909090909, -0.0429447853, -0.2222222222,
    0.1078431373, 0.2216582064, 0.0077473182, -0.1775362319, -0.02, 0.2368024133, -0.156462585,
    0.0322580645, 0.0067079463, -0.1476510067, 0.053030303, -0.0963855422, 0.3078703704,
    -0.1627906977, -0.0194063927, 0.0, 0.2038567493, 0.3, 0.1333333333, 0.010989011, -0.2786885246,
    -0.1953125, 0.4285714286, 0.0571428571, 0.4, -0.4042553191, -0.0135951662, 0.0909090909,
    -0.0186480186, -0.0256410256, 0.2631578947, -0.045, -0.1076388889, 0.0177875244, 0.1104972376,
    -0.1842105263, -0.0838574423, -0.0216216216, 0.1163793103, -0.1342592593, 0.2105263158,
    0.010989011, 0.0454545455, -0.0650887574, 0.0653594771, -0.0337552743, -0.0476190476,
    -0.0454545455, 0.0222222222, 0.1428571429,
]
# fmt: on


def random_tables():
    """200 tables of 2 to 5 labellers, 3 to 12 units, 2 to 5 values and gaps: (rows, values)."""
    rng = random.Random(15)
    for _ in range(200):
        labellers, units, values = rng.randrange(2, 6), rng.randrange(3, 13), rng.randrange(2, 6)
        choices = [None, *range(values), *range(values)]
        yield [[rng.choice(choices) for _ in range(units)] for _ in range(labellers)], values


def counts_of(table, values):
    """The counts of a table with a row for each labeller, None for a gap."""
    units = [[value for value in unit if value is not None] for unit in zip(*table, strict=True)]
    return value_counts(units, values)


def test_alpha_is_that_of_another_program_on_random_tables_with_gaps():
    found = [krippendorff_alpha(counts_of(*table)) for table in random_tables()]
    assert [None if math.isnan(alpha) else round(alpha, 10) for alpha in found] == ALPHAS


def test_alpha_of_the_published_example():
    """Krippendorff 2011, section C: four observers, twelve units, gaps: nominal alpha 0.743."""
    table = [
        [1, 2, 3, 3, 2, 1, 4, 1, 2, None, None, None],
        [1, 2, 3, 3, 2, 2, 4, 1, 2, 5, None, 3],
        [None, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, None],
        [1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, None],
    ]
    assert round(krippendorff_alpha(counts_of(table, 6)), 3) == 0.743


def test_alpha_by_hand():
    """Two labellers: (0,0) (1,1) (0,1). 2 unequal ordered pairs; n 6, three of each value.

    alpha = 1 - (6 - 1) 2 / (36 - 9 - 9) = 4 / 9.
    """
    counts = value_counts([[0, 0], [1, 1], [0, 1]], 2)
    assert counts.tolist() == [[2, 0], [0, 2], [1, 1]]
    assert krippendorff_alpha(counts) == pytest.approx(4 / 9, abs=1e-12)
    assert raw_agreement(counts) == (2 / 3, 3)


def test_units_with_one_answer_or_none_say_nothing():
    some = [[0, 0], [1, 1], [0, 1]]
    more = value_counts([*some, [3], []], 4)
    assert krippendorff_alpha(more) == krippendorff_alpha(value_counts(some, 2))
    assert raw_agreement(more) == (2 / 3, 3)
    assert math.isnan(krippendorff_alpha(value_counts([[1], [2]], 4)))
    assert math.isnan(krippendorff_alpha(value_counts([[1, 1], [1, 1]], 4)))
    share, pairs = raw_agreement(value_counts([[1]], 4))
    assert math.isnan(share) and pairs == 0


def test_raw_agreement_counts_pairs():
    """Five answers 2 2 2 0 1: 10 pairs of which 3 are equal."""
    assert raw_agreement(value_counts([[2, 2, 2, 0, 1]], 4)) == (0.3, 10)


def test_chance_gives_alpha_0_and_raw_agreement_of_one_in_four():
    counts = value_counts(np.random.default_rng(0).integers(0, 4, (20_000, 2)).tolist(), 4)
    share, pairs = raw_agreement(counts)
    assert pairs == 20_000
    assert abs(share - 0.25) < 0.01 and abs(krippendorff_alpha(counts)) < 0.015


@pytest.mark.parametrize(
    'successes, n, low, high',
    [  # Newcombe 1998, Statistics in Medicine 17, table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_interval_of_the_published_table(successes, n, low, high):
    assert [round(bound, 4) for bound in wilson_interval(successes, n)] == [low, high]
    mirrored = [round(bound, 4) for bound in wilson_interval(n - successes, n)]
    assert mirrored == [round(1 - high, 4), round(1 - low, 4)]


def test_wilson_interval_of_nothing_is_everything():
    assert wilson_interval(0, 0) == (0.0, 1.0)
    assert wilson_interval(20, 20)[1] == 1.0


@pytest.mark.parametrize(
    'x, degrees, tail',
    [  # scipy.stats.chi2.sf of SciPy 1.17.1
        (0.5, 3, 0.9188914116546758),
        (7.815, 3, 0.049993902974883875),
        (3, 1, 0.08326451666355042),
        (10, 4, 0.04042768199451279),
        (2.2, 7, 0.9479465123362596),
        (40, 3, 1.065509033425585e-08),
    ],
)
def test_chi_square_tail(x, degrees, tail):
    assert chi_square_tail(x, degrees) == pytest.approx(tail, rel=1e-10)


def test_chi_square_of_positions():
    """Expected 25 each: (25 + 121 + 81 + 9) / 25 = 9.44; p as scipy.stats.chisquare has it."""
    statistic, p = chi_square([30, 14, 34, 22])
    assert statistic == pytest.approx(9.44, abs=1e-12)
    assert p == pytest.approx(0.023978301316485748, rel=1e-10)
    assert chi_square([25, 25, 25, 25]) == (0.0, 1.0)
    assert chi_square([0, 0]) == chi_square([7]) == (0.0, 1.0)
