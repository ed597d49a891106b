"""Agreement: published tables, sums by hand, and figures of other programs."""

import math

import pytest

from lm_human_preferences import label_types
from lm_human_preferences.label_types import TIE
from lm_human_preferences.labels.agreement import (
    clustered_interval,
    effective_answers,
    in_words,
    krippendorff_alpha,
    uniform_p_value,
    wilson_interval,
)
from lm_human_preferences.utils import student


def test_chance_is_over_all_orders_of_the_samples():
    """(0, 0), (1, 1), (0, 1), and the other way round: 4 unequal ordered pairs of 12 answers."""
    best_of_2 = label_types.get('best_of_2')
    answers = [[0, 0], [1, 1], [0, 1], [1], []]
    expected = 1 - 11 * 4 / (144 - 36 - 36)
    assert krippendorff_alpha(answers, best_of_2) == pytest.approx(expected, abs=1e-12)
    for nothing in ([], [[0], [1]], [[TIE, TIE], [TIE, TIE]]):
        assert math.isnan(krippendorff_alpha(nothing, best_of_2))
    compared = [[1.0, 2.0], [-5.0, -5.0]]
    # Variances inside .5 and 0; of 1, 2, -5, -5 and their opposites 110 / 7
    alpha = krippendorff_alpha(compared, label_types.get('scalar_compare'))
    assert alpha == pytest.approx(1 - 0.25 / (110 / 7), abs=1e-12)


@pytest.mark.parametrize(
    'name, agreed, other, expected',
    [('best_of_2', 0, 1, 0.901), ('best_of_4', 2, 3, 0.934), ('scalar_compare', 2.0, -1.0, 0.943)],
)
def test_alpha_does_not_depend_on_which_sample_is_stored_first(name, agreed, other, expected):
    """Two labellers, who agree in 38 of 40 questions; each sample in turn comes first."""
    label_type = label_types.get(name)
    places = list(range(len(label_type.samples)))
    stored = [[agreed, agreed]] * 38 + [[agreed, other]] * 2
    moved = []
    for number, answers in enumerate(stored):
        first = number % len(places)
        order = places[first:] + places[:first]
        moved.append([label_type.moved(value, order) for value in answers])
    assert moved != stored
    for answers in stored, moved:
        assert krippendorff_alpha(answers, label_type) == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize(
    'successes, n, low, high',
    [  # Newcombe 1998, Statistics in Medicine 17, table I, method 3
        (81, 263, 0.2553, 0.3662),
        (20, 20, 0.8389, 1.0000),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_interval_of_the_published_table(successes, n, low, high):
    assert [round(bound, 4) for bound in wilson_interval(successes, n)] == [low, high]


def test_the_design_effect_by_hand():
    """Ten times two questions of three answers, 3 and 1 of them right, and one with one answer.

    Unequal ordered pairs over (3 - 1): 0 and 4 / 2. An imagined question has .25 * 3 = .75 answers
    on either side: 40.75 right, 20.75 wrong. rho = 1 - (61.5 - 1) 20 / (2 * 40.75 * 20.75). The
    squares of 3, 3 and 1 over their sum: 19 / 7.
    """
    right, answers = [3.0, 1.0, 1.0] * 10, [3, 3, 1] * 10
    rho = 1 - 1210 / (2 * 40.75 * 20.75)
    effective = 70 / (1 + 12 / 7 * rho)
    assert effective_answers(right, answers) == pytest.approx(effective, abs=1e-12)
    interval = wilson_interval(50 / 70 * effective, effective)
    assert clustered_interval(right, answers) == pytest.approx(interval)


@pytest.mark.parametrize('few, has_interval', [([10] * 9, False), ([10] * 10, True)])
def test_an_interval_takes_ten_queries_that_have_most_of_the_answers(few, has_interval):
    for counts in few, [10, 10, 10, *few[9:], *[1] * (37 if has_interval else 16)]:
        low, high = clustered_interval([count // 2 for count in counts], counts)
        assert ((low, high) != (0, 1)) == has_interval
        assert ('no interval' in in_words(low, high)) != has_interval


def test_labellers_who_all_agree_count_as_one():
    assert clustered_interval([5] * 20, [5] * 20) == pytest.approx(wilson_interval(20, 20))
    assert effective_answers([5.0] * 10 + [0.0] * 10, [5] * 20) == pytest.approx(20)


def test_alpha_of_numbers_that_are_too_large_is_not_defined():
    rating = label_types.get('scalar_rating')
    assert krippendorff_alpha([[1, 2], [5, 5], [9]], rating) == pytest.approx(1 - 0.25 / 4.25)
    for ratings in ([[3, 3]], [[1e308, -1e308], [1e308, 1]]):
        assert math.isnan(krippendorff_alpha(ratings, rating))


def test_p_value_of_positions():
    """Expected 25 each: (25 + 121 + 81 + 9) / 25 = 9.44; p as scipy.stats.chisquare has it."""
    assert uniform_p_value([30, 14, 34, 22]) == pytest.approx(0.023978301316485748, rel=1e-10)
    assert uniform_p_value([25, 25, 25, 25]) == 1.0
    assert uniform_p_value([9, 1, 5, 5]) is not None  # 5 are expected in each
    assert uniform_p_value([9, 1, 5, 4]) is uniform_p_value([0, 0]) is uniform_p_value([]) is None


def test_quantiles_of_students_t_are_those_of_tables():
    for dof, expected in ((1, 12.7062), (10, 2.2281), (1000, 1.9623)):
        assert student.quantile(dof) == pytest.approx(expected, abs=5e-5)
