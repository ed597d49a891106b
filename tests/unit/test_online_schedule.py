"""The schedule of an online run, against numbers computed by hand from the paper's formulas."""

import pytest

from lm_human_preferences.hparams.online_options import OnlineHParams, Schedule

# 100 steps: l(n) = 256 + 768 (1 - (1 - n)^2)
PAPER = Schedule(initial=256, labels=1024, retrainings=19, steps=100)


@pytest.mark.parametrize(
    'step, labels',
    [
        (0, 256),
        (1, 256 + 16),  # 768 * 0.0199 = 15.28
        (10, 256 + 146),  # 768 * 0.19 = 145.92
        (50, 256 + 576),  # 768 * 3/4
        (90, 256 + 761),  # 768 * 0.99 = 760.32
        (99, 1024),  # 768 * 0.9999 = 767.92
    ],
)
def test_labels_that_a_step_needs(step, labels):
    assert PAPER.labels_at(step) == labels


def test_steps_of_the_measured_runs():
    """12,800 episodes in batches of 256."""
    steps = Schedule(initial=256, labels=1024, retrainings=19, steps=50).training_steps()
    # ceil(50 (1 - sqrt(1 - k/20)))
    assert steps == [0, 2, 3, 4, 6, 7, 9, 10, 12, 13, 15, 17, 19, 21, 23, 25, 28, 31, 35, 39]
    assert 5000 in Schedule(0, 10, 19, 10_000).training_steps()  # exactly half of the episodes


def test_the_models_of_a_short_run():
    schedule = Schedule(initial=10, labels=20, retrainings=1, steps=10)
    assert schedule.training_steps() == [0, 3]  # 10 (1 - sqrt(1/2)) = 2.93
    assert [schedule.models_at(step) for step in (0, 2, 3, 9)] == [1, 1, 2, 2]


def test_shares_of_the_labels():
    """A quarter at first, and a fiftieth ahead, of 130 labels; both rounded up."""
    schedule = OnlineHParams(labels=130).schedule(steps=100)
    assert (schedule.initial, schedule.ahead) == (33, 3)


def test_questions_are_asked_ahead_in_whole_batches():
    schedule = Schedule(initial=256, labels=1024, retrainings=19, steps=100, ahead=100)
    assert schedule.questions_at(0) == 368  # 356 in batches of 16
    assert schedule.questions_at(10) == 512  # 402 + 100
    assert schedule.questions_at(99) == 1024
    assert Schedule(9, 9, 0, 5).questions_at(0) == 9  # not more than there will be labels
