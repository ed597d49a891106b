"""Agreement: published tables, sums by hand, and figures of other programs."""

import math
import random
import statistics

import numpy as np
import pytest

from lm_human_preferences.labels.report import wording
from lm_human_preferences.labels.report.agreement import (
    best_of_share,
    chi_square,
    chi_square_tail,
    clustered_interval,
    correlation_interval,
    correlation_words,
    design_effect,
    effective_pairs,
    in_words,
    interval_alpha,
    krippendorff_alpha,
    pairwise_share,
    raw_agreement,
    uniform_p_value,
    value_counts,
    wilson_interval,
)
from lm_human_preferences.run_story import words

# krippendorff.alpha(..., level_of_measurement='nominal') of the package krippendorff 0.9.0 for the
# 60 tables of `random_tables`, rounded to 10 places; None where it has no value
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
    0.0909090909, -0.2727272727, -0.2459639126,
]
# fmt: on


def random_tables():
    """60 tables of 2 to 5 labellers, 3 to 12 units, 2 to 5 values and gaps: (rows, values)."""
    rng = random.Random(15)
    for _ in range(60):
        labellers, units, values = rng.randrange(2, 6), rng.randrange(3, 13), rng.randrange(2, 6)
        choices = [None, *range(values), *range(values)]
        yield [[rng.choice(choices) for _ in range(units)] for _ in range(labellers)], values


def counts_of(table):
    return value_counts(units_of(table))


def units_of(table):
    return [[value for value in unit if value is not None] for unit in zip(*table, strict=True)]


def test_alpha_is_that_of_another_program_on_random_tables_with_gaps():
    found = [krippendorff_alpha(counts_of(table)) for table, _ in random_tables()]
    assert [None if math.isnan(alpha) else round(alpha, 10) for alpha in found] == ALPHAS


def test_alpha_by_hand():
    """Two labellers: (0,0) (1,1) (0,1). 2 unequal ordered pairs; n 6, three of each value.

    alpha = 1 - (6 - 1) 2 / (36 - 9 - 9) = 4 / 9.
    """
    counts = value_counts([[0, 0], [1, 1], [0, 1]])
    assert counts.tolist() == [[2, 0], [0, 2], [1, 1]]
    assert krippendorff_alpha(counts) == pytest.approx(4 / 9, abs=1e-12)
    assert raw_agreement(counts) == (2 / 3, 3)


def test_units_with_one_answer_or_none_say_nothing():
    some = [[0, 0], [1, 1], [0, 1]]
    more = value_counts([*some, [3], []])
    assert krippendorff_alpha(more) == krippendorff_alpha(value_counts(some))
    assert raw_agreement(more) == (2 / 3, 3)
    assert math.isnan(krippendorff_alpha(value_counts([[1], [2]])))
    assert math.isnan(krippendorff_alpha(value_counts([[1, 1], [1, 1]])))
    share, pairs = raw_agreement(value_counts([[1]]))
    assert math.isnan(share) and pairs == 0


def test_raw_agreement_counts_pairs():
    """Five answers 2 2 2 0 1: 10 pairs of which 3 are equal."""
    assert raw_agreement(value_counts([[2, 2, 2, 0, 1]])) == (0.3, 10)


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


@pytest.mark.parametrize(
    'correlation, n, low, high',
    [
        (0.5, 52, 0.2630, 0.6801),  # as tables of Fisher's transformation have it
        (-0.5, 52, -0.6801, -0.2630),
        (0.0, 103, -0.1935, 0.1935),
        (0.9, 4, -0.4524, 0.9979),
        (0.9, 3, -1, 1),
        (1.0, 4, 1, 1),
    ],
)
def test_interval_of_a_correlation(correlation, n, low, high):
    assert correlation_interval(correlation, n) == pytest.approx((low, high), abs=1e-4)


def test_with_one_answer_to_each_question_the_interval_is_wilsons():
    assert clustered_interval([1] * 81 + [0] * 182, [1] * 263) == wilson_interval(81, 263)
    assert clustered_interval([], []) == (0.0, 1.0)


def test_the_design_effect_by_hand():
    """Two questions of three answers, 3 and 1 of them right, and one with one answer.

    Unequal ordered pairs over (3 - 1): 0 and 4 / 2. An imagined question has .25 * 3 = .75 answers
    on either side: 4.75 right, 2.75 wrong. rho = 1 - (7.5 - 1) 2 / (2 * 4.75 * 2.75). The squares
    of 3, 3 and 1 over their sum: 19 / 7.
    """
    right, answers = np.array([3.0, 1.0, 1.0]), np.array([3.0, 3.0, 1.0])
    rho = 1 - 13 / 26.125
    assert design_effect(right, answers) == pytest.approx(1 + 12 / 7 * rho, abs=1e-12)
    assert clustered_interval([3, 1, 1], [3, 3, 1]) == (0, 1)  # too few queries


@pytest.mark.parametrize('few, has_interval', [([10] * 9, False), ([10] * 10, True)])
def test_an_interval_takes_ten_queries_that_have_most_of_the_answers(few, has_interval):
    for counts in few, [10, 10, 10, *few[9:], *[1] * (37 if has_interval else 16)]:
        right = [count // 2 for count in counts]
        low, high = clustered_interval(right, counts)
        assert ((low, high) != (0, 1)) == has_interval
        assert ('no interval' in in_words(low, high)) != has_interval
        if has_interval:
            effective = sum(counts) / design_effect(np.array(right), np.array(counts))
            share = sum(right) / sum(counts)
            assert (low, high) == pytest.approx(wilson_interval(share * effective, effective))


@pytest.mark.parametrize('kind', ['normal', 'exponential', 'by query'])
def test_the_interval_of_a_correlation_of_pairs(kind):
    """400 times 30 queries with 4 pairs: with as many as queries, independent and normal ones, the
    interval of Fisher's held the truth in 100 % here, and in 85 % of single exponential pairs."""
    rng = np.random.default_rng(1)
    draw = rng.exponential if kind == 'exponential' else rng.normal
    each = 1 if kind == 'exponential' else 4
    clusters = np.arange(30).repeat(each)
    held, widths = 0, []
    for _ in range(400):
        first, other = draw(size=(2, 30 * each))
        if kind == 'by query':
            first, other = first + 2 * rng.normal(size=30)[clusters], other
        second = 0.6 * first + 0.8 * other
        deviation = first.std() if kind != 'by query' else math.sqrt(5)
        truth = 0.6 if kind != 'by query' else 0.6 * deviation / math.hypot(0.6 * deviation, 0.8)
        found = float(np.corrcoef(first, second)[0, 1])
        low, high = correlation_interval(found, effective_pairs(first, second, clusters))
        held += low <= truth <= high
        widths.append(high - low)
    assert 0.92 < held / 400 < 0.98
    assert kind != 'normal' or statistics.mean(widths) < 0.3  # of 30 pairs it is .5


def test_a_correlation_of_few_queries_has_no_interval():
    first, second = np.random.default_rng(0).normal(size=(2, 90))
    for queries, has_interval in (9, False), (10, True):
        clusters = np.arange(90) % queries
        low, high = correlation_interval(0.3, effective_pairs(first, second, clusters))
        assert ((low, high) != (-1, 1)) == has_interval
        assert ('no interval' in correlation_words(low, high)) != has_interval
    assert correlation_interval(1.0, effective_pairs(first, 2 * first, clusters))[0] > 0.99


def test_labellers_who_all_agree_count_as_one():
    assert design_effect(np.array([5.0] * 10 + [0.0] * 10), np.full(20, 5.0)) == 5
    low, high = clustered_interval([5] * 20, [5] * 20)
    assert (low, high) == (pytest.approx(wilson_interval(20, 20)[0]), 1.0)


@pytest.mark.parametrize('agreeing', [0.4, 0.95])
def test_intervals_of_equal_policies_hold_one_half(agreeing):
    """50 questions of 5 labellers, 2000 times: 95 % with a standard error of .5 %."""
    rng = np.random.default_rng(27)
    common = rng.random((2000, 50, 1)) < 0.5
    own = rng.random((2000, 50, 5)) < 0.5
    wins = np.where(rng.random((2000, 50, 5)) < agreeing, common, own).sum(2)
    intervals = [clustered_interval(of_trial, [5] * 50) for of_trial in wins]
    assert 0.935 < np.mean([low <= 0.5 <= high for low, high in intervals]) < 0.965
    independent = [wilson_interval(of_trial.sum(), 250) for of_trial in wins]
    assert np.mean([low <= 0.5 <= high for low, high in independent]) < 0.9


@pytest.mark.parametrize('each', [1, 2, 4])
@pytest.mark.parametrize('pair', [0.1, 0.5, 0.6, 0.8])
def test_the_best_of_several_is_further_from_one_half_than_a_pair(pair, each):
    """Against 200,000 simulated questions, whose standard error is .0011 at most."""
    rng = np.random.default_rng(0)
    ahead = math.sqrt(2) * statistics.NormalDist().inv_cdf(pair)
    own = rng.normal(ahead, 1, (200_000, each)).max(1)
    other = rng.normal(0, 1, (200_000, each)).max(1)
    share = best_of_share(pair, each)
    assert share == pytest.approx(np.mean(own > other), abs=0.005)
    assert pairwise_share(share, each) == pytest.approx(pair, abs=1e-6)


def test_few_answers_have_the_p_value_of_an_exact_test():
    """Of 4^4 tables of 4 answers: 4 with all in one cell, 48 with three in one. 52 / 256."""
    assert uniform_p_value([3, 1, 0, 0]) == pytest.approx(52 / 256, abs=0.01)
    assert uniform_p_value([4, 0, 0, 0]) == pytest.approx(4 / 256, abs=0.004)
    assert uniform_p_value([1, 1, 1, 1]) == 1
    assert uniform_p_value([2, 0, 1, 1]) == uniform_p_value([1, 2, 1, 0])  # no chance in it
    assert uniform_p_value([0, 0]) == 1
    # 5 are expected in each
    assert uniform_p_value([9, 1, 5, 5]) == chi_square([9, 1, 5, 5])


# krippendorff.alpha(..., level_of_measurement='interval') of the package krippendorff 0.9.0 for
# the 60 of `random_tables`, rounded to 10 places; None where it has no value
# fmt: off
INTERVAL_ALPHAS = [
    1.0, -0.0026420079, -0.2050359712, 1.0, -0.1666666667, -0.0666666667, -0.2017167382,
    -0.0184331797, 0.5384615385, -0.0403628118, -0.1213592233, -0.2857142857, -0.1306042885,
    0.1864649829, -0.2345679012, 0.3532338308, -0.2857142857, 0.2611731844, -0.25, -0.110483871,
    -0.0015710919, -0.5517241379, -0.1121863799, -0.3043478261, 0.0454545455, 0.1913875598,
    -0.0546875, 0.0857771261, -0.1792828685, -0.1987179487, -0.2222222222, -0.5, -0.4705882353,
    0.1012849584, 0.1800643087, 0.0, 0.1302816901, -0.1011904762, -0.2103448276, 0.1728907331,
    0.1796200345, None, -0.0196078431, -0.0208333333, -0.3333333333, 0.0434782609, 0.4923076923,
    0.48, -0.0888888889, -0.0352564103, -0.186440678, -0.4583333333, 0.0058939096, 0.0, -0.375,
    0.1428571429, -0.1790780142, -0.4705882353, -0.6578947368, -0.2557319224,
]
# fmt: on


def test_alpha_of_numbers_is_that_of_another_program():
    found = [interval_alpha(units_of(table)) for table, _ in random_tables()]
    assert [None if math.isnan(alpha) else round(alpha, 10) for alpha in found] == INTERVAL_ALPHAS


def test_alpha_of_numbers_by_hand():
    """(1, 2) and (5, 5): variances inside .5 and 0, weighted 2 each of 4: .25; of all 4.25."""
    assert interval_alpha([[1, 2], [5, 5], [9]]) == pytest.approx(1 - 0.25 / 4.25, abs=1e-12)
    assert math.isnan(interval_alpha([[1], [2]])) and math.isnan(interval_alpha([[3, 3]]))
    assert math.isnan(interval_alpha([[1e308, -1e308], [1e308, 1]]))


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
    assert chi_square([30, 14, 34, 22]) == pytest.approx(0.023978301316485748, rel=1e-10)
    assert chi_square([25, 25, 25, 25]) == chi_square([0, 0]) == chi_square([7]) == 1.0


def test_what_is_not_defined_says_why():
    counts = {'pairs': 2, 'questions': 2, 'raw': 1.0, 'low': 0.2, 'high': 1.0, 'chance': 0.5}
    template = words.environment(wording.TEMPLATES, str).get_template('label_words.jinja')
    told = template.module.alpha({**counts, 'alpha': None})
    assert told.endswith('alpha is undefined, because all these answers are the same.')
