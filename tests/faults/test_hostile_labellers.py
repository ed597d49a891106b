"""Labellers who send what no page of ours would send."""

import hmac
import json

import pytest
from label_page import answers_of, served, web_options, write_texts, written
from page_client import Client, id_of_token

from lm_human_preferences.labels.folder import EVERYBODY, LabelFolder
from lm_human_preferences.labels.page.assignments import MOST_LEASES
from lm_human_preferences.labels.page.server import LabelServer

TEXTS = [(f'question {i}', *(f'{i}, sample {j}' for j in range(4))) for i in range(40)]


@pytest.fixture
def path(tmp_path):
    write_texts(tmp_path / 'f', TEXTS[:6])
    return tmp_path / 'f'


def test_only_who_was_given_a_question_answers_it(path):
    with served(path, 'anna', 'bob') as (page, anna, bob):
        mine = [question['id'] for question in anna.questions()]
        for question in mine:
            assert bob.answer(question)[0] == bob.skip(question)[0] == 409
            assert bob.post('/questions', held=[question], count=0)[1]['lost'] == [question]
        assert written(path) == []
        assert all(anna.answer(question)[0] == 200 for question in mine)
        assert all(bob.answer(question)[0] == 409 for question in mine)
    assert len(LabelFolder(str(path)).counted()) == len(mine) == len(written(path))


def test_nobody_has_taken_longer_than_the_server_was_waiting(path):
    now = [1000.0]
    with served(path, 'anna') as (page, anna):
        page.service.assignments.clock = lambda: now[0]
        first, second, _ = anna.questions()
        now[0] = 1020.0
        anna.questions(held=[first['id'], second['id']])
        _, reply = anna.answer(first['id'], seconds=86400)
        anna.answer(second['id'], seconds=19.5)
        assert [answer.seconds for answer in answers_of(path, 'anna')] == [23.0, 19.5]
        anna.undo(reply['last'])
        now[0] = 1030.0
        anna.answer(first['id'], seconds=3600.0)
        assert answers_of(path, 'anna')[-1].seconds == 13.0


def test_a_labeller_does_not_keep_all_questions_from_the_others(tmp_path):
    write_texts(tmp_path / 'f', TEXTS)
    with served(tmp_path / 'f', 'anna', 'bob') as (_, anna, bob):
        taken = []
        for _ in range(20):
            taken += [question['id'] for question in anna.questions(held=taken[-13:])]
        assert len(set(taken)) == MOST_LEASES
        given = []
        for _ in range(5):
            given += [question['id'] for question in bob.questions(held=given)]
        assert len(set(given)) == 15 and not set(given) & set(taken)
        mine = list(dict.fromkeys(taken))
        assert anna.answer(mine[0])[0] == 200
        first, second, new = [question['id'] for question in anna.questions(held=mine[3:])]
        assert [first, second] == mine[1:3] and new not in mine


def test_the_server_shows_a_page_that_it_is_the_one_it_knew(path):
    """Also after a restart; browsers are in commands/test_label_browser.py."""
    nonce = '0f' * 32

    def code(client, origin=None, **fields):
        body = json.dumps({'labeller': 'anna', 'nonce': nonce, **fields})
        more = {'Host': origin.partition('//')[2], 'Origin': origin} if origin else {}
        status, _, text = client.request(
            'POST', '/greeting', body, Cookie=None, Labelling_Proof=None, **more
        )
        return json.loads(text)['code'] if status == 200 else status

    with served(path, 'anna', 'bob') as (page, anna, bob):
        greeting, port = anna.task()['greeting'], page.port
        shown = code(anna)
        asked = f'{nonce} http://127.0.0.1:{port}'.encode()
        assert shown == hmac.digest(greeting.encode(), asked, 'sha256').hex()
        own = code(anna, f'http://localhost:{port}')
        assert isinstance(own, str) and own != shown
        assert greeting != bob.task()['greeting'] and shown != code(bob, labeller='bob')
        assert code(anna, nonce='') == code(anna, nonce='0f' * 31) == code(anna, labeller=7) == 400
    with served(path, 'anna', port=port) as (_, anna):
        assert code(anna) == shown
    # A program at that port does not get it from the server at another one, whatever it says.
    options = web_options(public_url='https://label.example/at/')
    with LabelServer(str(path), ['anna'], options) as page:
        anna = Client(f'http://127.0.0.1:{page.port}', signed_in=False)
        assert code(anna, f'http://127.0.0.1:{port}') == code(anna, 'http://127.0.0.1') == 403
        assert code(anna) != shown
        public = code(anna, 'https://label.example')
        assert isinstance(public, str) and public != shown


def asked(path, *names):
    """The kinds of the questions that labellers are asked in turn, {name: kinds in their order}."""
    folder = LabelFolder(str(path))
    kinds = {name: [] for name in names}
    with served(path, *names) as (_, *clients):
        waiting = dict(zip(names, clients, strict=True))
        while waiting:
            for name, client in list(waiting.items()):
                found = client.questions(count=1)
                if not found:
                    assert client.task()['left'] == 0
                    del waiting[name]
                    continue
                id = id_of_token(folder, found[0]['id'])
                kinds[name].append(folder.questions[id].kind)
                assert client.answer(found[0]['id'])[0] == 200
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
