"""Who is asked what: nobody the same twice, no question of more people than it needs."""

import random

import pytest
from label_folders import make_folder

from lm_human_preferences.labels.folder import LabelFolder
from lm_human_preferences.labels.labeller import Labeller
from lm_human_preferences.labels.page.assignments import Assignments

NAMES = ('anna', 'bob', 'carl')


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class World:
    def __init__(self, path, **folder):
        make_folder(path, **folder)
        self.path, self.folder, self.clock = path, LabelFolder(str(path)), Clock()
        self.writers = {name: Labeller(self.folder, name) for name in NAMES}
        self.assignments = Assignments(self.folder, NAMES, 600, self.clock)

    def give(self, name, count=1, held=()):
        return [question.id for question in self.assignments.give(name, count, held)]

    def answer(self, name, question, value=0):
        reason = 'other' if value is None else None
        self.writers[name].answer(self.folder.questions[question], value, 1, reason=reason)
        self.assignments.update([question])
        self.assignments.end(name, question)

    def undo(self, name):
        answer = self.writers[name].undo()
        self.assignments.update([answer.question])
        self.assignments.give_back(name, answer.question)
        return answer.question

    def close(self):
        for writer in self.writers.values():
            writer.close()


@pytest.fixture
def world(tmp_path):
    made = []

    def make(**folder):
        made.append(World(tmp_path / 'f', **folder))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_two_never_have_one_question_and_a_lease_that_has_ended_is_given_again(world):
    it = world(count=4)
    anna, bob = it.give('anna', 3), it.give('bob', 3)
    assert len(anna) == 3 and len(bob) == 1 and not set(anna) & set(bob)
    assert it.give('carl', 3) == []
    it.clock.now = 599
    assert it.give('carl', 3) == []
    assert it.assignments.renew('bob', bob) == []
    it.clock.now = 601
    assert set(it.give('carl', 4)) == set(anna)
    assert it.assignments.renew('anna', anna) == anna  # they are carl's now
    assert it.give('anna', 3) == []


def test_a_page_that_is_loaded_anew_gets_the_same_in_the_same_order(world):
    it = world(count=10)
    first = it.give('anna', 3)
    assert it.give('anna', 3) == first
    it.answer('anna', first[0])
    more = it.give('anna', 1, held=first[1:])
    assert it.give('anna', 3) == [*first[1:], *more]
    it.clock.now = 10_000  # after a night, as nobody else has come
    assert it.give('anna', 3) == [*first[1:], *more]


def test_after_a_restart_the_order_is_the_same_and_what_a_page_holds_is_its_own(world):
    it = world(count=10)
    first = it.give('anna', 3)
    again = Assignments(it.folder, NAMES)
    assert again.renew('anna', first) == []
    assert not {question.id for question in again.give('bob', 10)} & set(first)
    assert [q.id for q in Assignments(it.folder, NAMES).give('anna', 3)] == first


def test_what_was_taken_back_comes_first(world):
    it = world(count=6)
    first, second, third = it.give('anna', 3)
    it.answer('anna', first)
    assert it.undo('anna') == first
    assert it.give('anna', 3) == [first, second, third]
    it.answer('anna', first, None)
    assert it.undo('anna') == first  # a skip
    assert it.give('anna', 1) == [first]
    assert first not in it.give('bob', 6)


def test_what_others_write_counts(world):
    """A terminal, another process: the folder is read again."""
    it = world(count=3)
    with Labeller(LabelFolder(str(it.path)), 'dora') as dora:
        question = dora.next_question()
        dora.answer(question, 1, 1)
        it.assignments.update(it.folder.refresh())
        assert question.id not in it.give('anna', 3) and it.assignments.open() == 2
        dora.undo()
        it.assignments.update(it.folder.refresh())
        assert question.id in it.give('anna', 3) and it.assignments.open() == 3
    make_folder(it.path, 2, seed=1)
    it.assignments.update(it.folder.refresh())
    assert it.assignments.left('anna') == 5 and len(it.give('anna', 9)) == 5


def test_damaged_questions_are_left_out(world):
    it = world(count=2)
    first, second = it.give('anna', 2)
    it.assignments.leave_out(first)
    assert it.give('anna', 2) == [second] and it.assignments.left('anna') == 1
    it.assignments.update(it.folder.questions)
    assert it.give('anna', 2) == [second]


def test_random_work_keeps_every_rule(world):
    """Against a plain count of who has what, over 1,000 random steps."""
    it = world(count=40)
    make_folder(it.path, 20, seed=1, labellers=2)
    it.assignments.update(it.folder.refresh())
    rng = random.Random(0)
    held = {name: {} for name in NAMES}  # {question: when the lease ends}
    taken_back = set()  # who has taken an answer back is asked again, whoever was asked meanwhile
    finished = 0
    for _ in range(1000):
        name = rng.choice(NAMES)
        it.clock.now += rng.choice([1, 1, 1, 100, 400])
        action = rng.random()
        live = [question for question, ends in held[name].items() if ends > it.clock.now]
        if action < 0.5:
            for question in it.give(name, rng.randint(1, 3)):
                held[name][question] = it.clock.now + 600
        elif action < 0.85 and live:
            question = rng.choice(live)
            it.answer(name, question, rng.choice([0, 1, 2, None]))
            del held[name][question]
            finished += 1
        elif action > 0.98 and it.writers[name].log.last() is not None:
            question = it.undo(name)
            held[name][question] = it.clock.now + 600
            taken_back.add(question)
        for question in it.folder.questions.values():
            answers = it.folder.answers_to(question)
            has = {n for n in NAMES if held[n].get(question.id, 0) > it.clock.now}
            assert not has & {answer.labeller for answer in answers}
            given = sum(answer.value is not None for answer in answers)
            assert len(has) + given <= question.labellers or question.id in taken_back
        for name in NAMES:
            expected = sum(it.folder.is_open_for(q, name) for q in it.folder.questions.values())
            assert it.assignments.left(name) == expected
            done = it.folder.logs[name].by_question
            closed = {
                question.id
                for question in it.folder.questions.values()
                if not it.folder.needs_answers(question, it.folder.answers_to(question))
            }
            others = it.assignments.done_by_others(name, len(done))
            assert others == len(closed - done.keys())
    assert finished > 50 and len(taken_back) < len(it.folder.questions)
