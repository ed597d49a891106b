"""Labellers who send what no page of ours would send."""

import json

import pytest
from label_page import id_of, served, write_texts, written

from lm_human_preferences.labels.folder import EVERYBODY, LabelFolder

TEXTS = [(f'question {i}', *(f'{i}, sample {j}' for j in range(4))) for i in range(40)]


@pytest.fixture
def path(tmp_path):
    write_texts(tmp_path / 'f', TEXTS[:6])
    return tmp_path / 'f'


def test_only_who_was_given_a_question_answers_it(path):
    with served(path, 'anna', 'bob') as (_, anna, bob):
        mine = anna.question()['id']
        assert bob.answer(mine)[0] == bob.skip(mine)[0] == 409
        assert written(path) == []
        assert anna.answer(mine)[0] == 200
        assert bob.answer(mine)[0] == anna.answer(mine)[0] == 409
    assert len(LabelFolder(str(path)).counted()) == len(written(path)) == 1


def test_an_answer_with_the_id_of_anothers_does_not_damage_the_folder(path):
    with served(path, 'anna', 'bob') as (_, anna, bob):
        _, reply = anna.answer(anna.question()['id'])
        assert bob.answer(bob.question()['id'], answer=reply['last'])[0] == 409
    assert len(LabelFolder(str(path)).counted()) == 1


def test_nobody_has_taken_longer_than_the_server_was_waiting(path):
    now = [1000.0]
    with served(path, 'anna') as (page, anna):
        page.service.assignments.clock = lambda: now[0]
        question = anna.question()['id']
        now[0] = 1020.0
        _, reply = anna.answer(question, seconds=86400)
        anna.undo(reply['last'])
        now[0] = 1030.0
        anna.answer(question, seconds=3600.0)
        anna.answer(anna.question()['id'], seconds=0.0)
    written_seconds = [json.loads(line).get('seconds') for line in written(path)]
    assert written_seconds == [20.0, None, 10.0, 0.0]


def test_a_labeller_does_not_keep_all_questions_from_the_others(path):
    with served(path, 'anna', 'bob') as (_, anna, bob):
        for _ in range(20):
            assert anna.question() == anna.question()
        for _ in range(5):
            assert bob.answer(bob.question()['id'])[0] == 200
        assert bob.question() is None


def asked(path, *names):
    """The kinds of the questions that labellers are asked in turn, {name: kinds in their order}."""
    folder = LabelFolder(str(path))
    kinds = {name: [] for name in names}
    with served(path, *names) as (page, *clients):
        waiting = dict(zip(names, clients, strict=True))
        while waiting:
            for name, client in list(waiting.items()):
                found = client.question()
                if not found:
                    assert client.state()['left'] == 0
                    del waiting[name]
                    continue
                kinds[name].append(folder.questions[id_of(page, found['id'])].kind)
                assert client.answer(found['id'])[0] == 200
    return kinds


def test_nobody_is_left_with_gold_questions_alone(tmp_path):
    """By which they would be known; they come in between, to everybody."""
    write_texts(tmp_path / 'f', TEXTS[:30])
    gold = [(f'gold {i}', *'abcd') for i in range(6)]
    write_texts(tmp_path / 'f', gold, kind='gold', labellers=EVERYBODY, gold=1)
    kinds = asked(tmp_path / 'f', 'anna', 'bob', 'carl')
    assert sum(found.count('train') for found in kinds.values()) == 30
    assert all(found[-1] == 'train' for found in kinds.values())
    assert all(found.count('gold') >= 4 for found in kinds.values())
    assert asked(tmp_path / 'f', 'dora') == {'dora': []}  # who comes when all is done


def test_a_folder_of_gold_questions_is_asked(tmp_path):
    write_texts(tmp_path / 'f', TEXTS[:3], kind='gold', labellers=EVERYBODY, gold=1)
    assert asked(tmp_path / 'f', 'anna', 'bob') == {'anna': ['gold'] * 3, 'bob': ['gold'] * 3}
