"""The simulated labeller: how often it errs, what it prefers, when it leaves."""

import random
import statistics
from itertools import islice

import pytest
from label_folders import make_folder

from lm_human_preferences import label_types
from lm_human_preferences.labels.folder import LabelFolder
from lm_human_preferences.labels.labeller import Labeller
from lm_human_preferences.labels.simulated import simulate, simulated_answer


def sums(queries, responses):
    return responses.sum(1).double()


def answers_of(path, name='sim', **settings):
    with Labeller(LabelFolder(str(path)), name) as labeller:
        given = simulate(labeller, sums, **settings)
        assert given == len(labeller.log.kept)
        return dict(labeller.log.last)


def test_it_chooses_the_sample_of_the_highest_reward(tmp_path):
    folder = make_folder(tmp_path / 'f', 300)  # more than are judged at a time
    given = answers_of(tmp_path / 'f')
    assert len(given) == 300
    for question in folder.questions.values():
        _, *samples = question.tokens().values()
        assert sum(samples[given[question.id].value]) == max(map(sum, samples))
        assert 0 <= given[question.id].seconds < 60


def test_its_answers_say_that_they_are_simulated(tmp_path):
    with Labeller(make_folder(tmp_path / 'f', 2), 'anna') as anna:
        anna.answer(anna.next_question(), 1, 1)
    answers_of(tmp_path / 'f')
    (answer,) = LabelFolder(str(tmp_path / 'f')).logs['sim'].kept.values()
    assert answer.is_simulated
    lines = [(tmp_path / f'f/answers/{name}.jsonl').read_text() for name in ('anna', 'sim')]
    assert ['"simulated": true' in line for line in lines] == [False, True]


def test_errors_are_as_frequent_as_told():
    rng, best_of_4, count = random.Random(0), label_types.get('best_of_4'), 20_000
    chosen = [simulated_answer(best_of_4, [0, 1, 5, 2], rng, error=0.32) for _ in range(count)]
    shares = [chosen.count(sample) / count for sample in range(4)]
    assert shares == pytest.approx([0.08, 0.08, 0.76, 0.08], abs=0.012)


def test_of_equals_each_is_chosen_as_often():
    best_of_4, rng = label_types.get('best_of_4'), random.Random(0)
    given = [simulated_answer(best_of_4, [0, 2, 2, 2], rng) for _ in range(3000)]
    shares = [given.count(sample) / 3000 for sample in range(4)]
    assert shares == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3], abs=0.03)


@pytest.mark.parametrize('reward, deviation', [(0.5, 1), (-3, 3)])
def test_a_wrong_rating_is_as_large_as_a_right_one(reward, deviation):
    """Whatever the sign: by chance it is about 0, and never so small that it says nothing."""
    rating, rng = label_types.get('scalar_rating'), random.Random(0)
    given = [simulated_answer(rating, [reward], rng, error=1.0) for _ in range(5000)]
    assert statistics.mean(given) == pytest.approx(0, abs=0.06 * deviation)
    assert statistics.stdev(given) == pytest.approx(deviation, rel=0.05)


def test_it_leaves_and_goes_on_as_if_it_had_stayed(tmp_path, monkeypatch):
    values = []
    for folder in ('whole', 'parts'):
        make_folder(tmp_path / folder, 20)
        with Labeller(LabelFolder(str(tmp_path / folder)), 'sim') as labeller:
            if folder == 'parts':
                some = lambda upcoming=labeller.upcoming: islice(upcoming(), 7)  # noqa: E731
                monkeypatch.setattr(labeller, 'upcoming', some)
                assert simulate(labeller, sums, error=0.5) == 7
                monkeypatch.undo()
            simulate(labeller, sums, error=0.5)
        log = LabelFolder(str(tmp_path / folder)).logs['sim']
        values.append({question: answer.value for question, answer in log.last.items()})
        assert len(values[-1]) == 20
    assert values[0] == values[1]


def test_equals_are_a_tie_where_ties_are_answers():
    best_of_4, rng = label_types.get('best_of_4').allow_ties(), random.Random(0)
    answers = [simulated_answer(best_of_4, each, rng) for each in ([0, 2, 2, 1], [1, 1, 2, 1])]
    assert answers == ['tie', 2]
