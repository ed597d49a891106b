"""Who is asked what: nobody the same twice, no question of more people than it needs."""

import contextlib
import functools

import pytest
from label_folders import make_folder

from lm_human_preferences.labels.folder import EVERYBODY, LabelFolder
from lm_human_preferences.labels.labeller import Labeller
from lm_human_preferences.labels.page.service import HOLD_SECONDS, Assignments

NAMES = ('anna', 'bob', 'carl')


class World:
    def __init__(self, path, stack, **folder):
        make_folder(path, **folder)
        self.folder, self.now = LabelFolder(str(path)), 0.0
        self.writers = {name: stack.enter_context(Labeller(self.folder, name)) for name in NAMES}
        self.assignments = Assignments(self.folder, self.writers, lambda: self.now)

    def give(self, name):
        question, self.left = self.assignments.give(name)
        return question and question.id

    def answer(self, name, question, value=0):
        reason = 'other' if value is None else None
        self.writers[name].answer(self.folder.questions[question], value, 1, reason=reason)

    def undo(self, name):
        answer = self.writers[name].undo()
        self.assignments.hold(name, answer.question)
        return answer.question


@pytest.fixture
def world(tmp_path):
    with contextlib.ExitStack() as stack:
        yield functools.partial(World, tmp_path / 'f', stack)


def test_a_labeller_has_one_question_until_they_have_answered_it(world):
    it = world(count=10)
    first = it.give('anna')
    it.now = 10_000  # after a night, as nobody else has come
    assert it.give('anna') == first and it.left == 10
    it.answer('anna', first)
    second = it.give('anna')
    assert second not in (first, None) and it.left == 9
    assert it.undo('anna') == it.give('anna') == first  # what was taken back comes first
    it.answer('anna', first, None)
    assert it.give('anna') == second


def test_two_people_at_few_questions_do_not_wait_for_each_other(world):
    """What one holds goes to others after two minutes, if they have nothing else to do."""
    it = world(count=5)
    it.now = -1000
    held = it.give('anna')
    it.now = 0
    question = it.give('bob')
    assert question not in (held, None)  # though anna has held hers for long
    it.answer('bob', question)
    it.assignments.hold('anna', held)
    for _ in range(3):
        question = it.give('bob')
        assert question != held
        it.answer('bob', question)
    assert it.give('bob') is None and it.left == 1
    it.now = HOLD_SECONDS - 1
    assert it.give('bob') is None
    it.now = HOLD_SECONDS
    assert it.give('bob') == held == it.give('anna')
    assert it.give('carl') is None  # bob has it now
    it.answer('bob', held)
    it.answer('anna', held)  # is kept, though the first counts
    assert it.give('anna') is it.give('carl') is None
    assert [answer.labeller for answer in it.folder.counted()] == ['bob'] * 5


def test_a_question_for_two_is_given_to_two(world):
    """Who has taken an answer back is asked again, whoever has the question now."""
    it = world(count=1, labellers=2)
    question = it.give('anna')
    assert it.give('bob') == question and it.give('carl') is None
    it.answer('anna', question)
    assert it.give('anna') is it.give('carl') is None  # bob has it
    it.answer('bob', question, None)
    assert it.give('bob') is None and it.give('carl') == question
    assert it.undo('anna') == it.give('anna') == question


def kinds_asked(it):
    """Return {labeller: kinds of the questions that they are asked}; all answer in turn."""
    kinds = {name: [] for name in NAMES}
    waiting = list(NAMES)
    while waiting:
        name = waiting.pop(0)
        if question := it.give(name):
            kinds[name].append(it.folder.questions[question].kind)
            it.answer(name, question)
            waiting.append(name)
    assert it.left == 0
    return kinds


def test_nobody_is_left_with_gold_questions_alone(world, tmp_path):
    gold = {'seed': 1, 'kind': 'gold', 'labellers': EVERYBODY, 'gold': 1}
    make_folder(tmp_path / 'f', 6, **gold)
    kinds = kinds_asked(world(count=30))
    assert sum(found.count('train') for found in kinds.values()) == 30
    assert all(found[-1] == 'train' for found in kinds.values())
    assert all(found.count('gold') >= 4 for found in kinds.values())
    with Labeller(LabelFolder(str(tmp_path / 'f')), 'dora') as dora:  # who comes when all is done
        assert Assignments(dora.folder, {'dora': dora}).give('dora') == (None, 0)


def test_gold_questions_are_asked_where_there_are_no_others(world):
    kinds = kinds_asked(world(count=3, kind='gold', labellers=EVERYBODY, gold=1))
    assert kinds == dict.fromkeys(NAMES, ['gold'] * 3)
