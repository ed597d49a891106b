"""HTTP server of the page for labellers: replies, records, refusals, hostile labellers."""

import base64
import concurrent.futures
import contextlib
import errno
import hashlib
import json
import os
import re
import signal
import socket
import time
import uuid
from pathlib import Path
from unittest import mock

import command_line
import pytest
from label_folders import make_folder
from label_page import answers_of, served, web_options, write_texts, written
from launched import REPOSITORY
from page_client import Client, Server

from lm_human_preferences.commands import answer_questions
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.command_options import WebHParams
from lm_human_preferences.labels.folder import LabelFolder
from lm_human_preferences.labels.page import server

TEXTS = [(f'question {i}', *(f'{i}, sample {j}' for j in range(4))) for i in range(30)]


@pytest.fixture(scope='module')
def one(tmp_path_factory):
    path = tmp_path_factory.mktemp('page') / 'f'
    write_texts(path, TEXTS[:6])
    with served(path, 'anna', 'bob') as (page, anna, bob):
        yield page, anna, bob
    assert written(path) == []


@pytest.fixture
def path(tmp_path):
    write_texts(tmp_path / 'f', TEXTS[:6])
    return tmp_path / 'f'


def outcome(client, path='/question', body='{}', method='POST', **headers):
    status, _, _ = client.request(method, path, body, **headers)
    return status


def test_the_page_runs_its_own_script_and_every_reply_is_guarded(one):
    _, anna, _ = one
    status, headers, body = anna.request('GET', '/', Authorization=None)
    html = body.decode()
    assert status == 200
    policy = dict(part.split(' ', 1) for part in headers['Content-Security-Policy'].split('; '))
    for tag in ('script', 'style'):
        (content,) = re.findall(f'<{tag}>(.*?)</{tag}>', html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy[f'{tag}-src'] == f"'sha256-{digest}'"
    assert policy['default-src'] == policy['frame-ancestors'] == policy['base-uri'] == "'none'"
    assert policy['connect-src'] == "'self'"
    assert not re.search(r"(send|insist)\('/", html)  # a proxy may have a path before ours
    assert not re.search(r'innerHTML|insertAdjacent|document\.write|eval\(|style=', html)
    addresses = re.findall(r'(?:https?:)?//[\w.]+', re.sub(r'\s// .*', '', html))
    assert set(addresses) == {'http://www.w3.org'}  # the name of SVG, in the icon
    for path, more in (('/', {}), ('/nothing', {}), ('/', {'Host': 'evil.example'})):
        _, found, _ = anna.request('GET', path, **more)
        assert found['X-Content-Type-Options'] == 'nosniff'
        assert (found['Referrer-Policy'], found['Cache-Control']) == ('no-referrer', 'no-store')
        assert found['Content-Security-Policy'] == headers['Content-Security-Policy']
        assert 'Server' not in found and 'Set-Cookie' not in found
        assert not [name for name in found if name.lower().startswith('access-control')]


def test_only_the_key_of_a_link_opens_the_page(one):
    _, anna, bob = one
    assert anna.task()['labeller'] == 'anna' and bob.task()['labeller'] == 'bob'
    assert anna.key != bob.key and len(anna.key) >= 43
    for action in (*server.ACTIONS, 'ending'):
        for key in (None, '', 'x', anna.key[:-1], f'{anna.key} x', 'é'.encode()):
            given = key if key is None or isinstance(key, bytes) else f'Bearer {key}'
            assert outcome(anna, f'/{action}', Authorization=given) == 401
    for path in ('/question', '/question%0A', '/answer%0A', '/ending%0A'):
        assert outcome(anna, path, Authorization=None, Cookie=f'labelling={anna.key}') == 401
    for path in ('/question/', '/x/question', '/task%00', '/close', '/_next', '/../task.json'):
        assert outcome(anna, path) == 404
    for method in ('PUT', 'OPTIONS', 'GET'):
        assert outcome(anna, '/answer', method=method) == 405


PUBLIC = 'https://label.example.org/preferences/'


def test_other_names_of_the_host_are_refused(one, path):
    _, anna, _ = one
    assert outcome(anna, Host='127.0.0.1:1') == 200  # ssh -L has a port of its own
    others = ['localhost', '[::1]', 'evil.example', '127.0.0.1.evil.example', 'evil127.0.0.1', '']
    assert [outcome(anna, Host=host) for host in others] == [400] * len(others)
    with served(path, 'anna', public_url=PUBLIC) as (page, anna):
        assert page.links['anna'].startswith(f'{PUBLIC}#')
        anna.host, anna.port = '127.0.0.1', page.port
        for host in ('LABEL.example.org:443', '127.0.0.1:1'):
            assert outcome(anna, '/task', Host=host) == 200
        assert outcome(anna, '/task', Host='label.example.org.evil.example') == 400


GOOD = {'answer': uuid.uuid4().hex, 'question': '0' * 64, 'choice': [1], 'seconds': 1}


def test_requests_that_are_none_of_ours_are_refused(one):
    _, anna, _ = one
    question = anna.question()['id']
    assert anna.answer('0' * 64)[0] == 409
    assert anna.skip(question, 'no reason of ours')[0] == 400
    assert anna.undo('0' * 32)[0] == 404
    assert outcome(anna, body=json.dumps({'x': 'y' * server.MOST_BYTES})) == 413
    anna.close()
    for name, value in (
        *(('answer', value) for value in (7, '', '\ud800', '0' * 31, 'g' * 32)),
        *(('choice', value) for value in ([0], [5], [], [1, 2], [True])),
        *(('seconds', value) for value in (-1, float('nan'), True)),
    ):
        status, reply = anna.post('/answer', **{**GOOD, 'question': question, name: value})
        assert (status, bool(reply['error'])) == (400, True), (name, value)
    for body in ('', '[]', '7', '{', '[' * 60000, '\udcff', '{"answer": "a", "question": 1e999}'):
        assert outcome(anna, '/answer', body.encode(errors='surrogateescape')) == 400


def test_nothing_about_source_or_place_goes_to_the_browser(tmp_path):
    path, seen, guessed = tmp_path / 'f', [], []
    write_texts(path, TEXTS[:6], policies=['secret-a', 'secret-a', 'secret-b', 'secret-b'])
    with served(path, 'anna') as (_, anna):
        sent = json.dumps(anna.task())
        while question := anna.question():
            assert set(question) == {'id', 'query', 'samples'}
            number = question['query'].split()[1]
            status, reply = anna.answer(question['id'], 3)
            *_, answer = answers_of(path, 'anna')
            assert (status, reply['done'], reply['left']) == (200, len(seen) + 1, 5 - len(seen))
            assert question['samples'][2] == f'{number}, sample {answer.value}'
            assert question['samples'] == [f'{number}, sample {i}' for i in answer.order]
            sent += json.dumps(question)
            assert question['id'] not in (answer.question, *seen)
            seen.append(question['id'])
            ranks = [hashlib.sha256(f'anna/{answer.question}/{i}'.encode()) for i in range(4)]
            guess = sorted(range(4), key=lambda index: ranks[index].digest())  # without the key
            guessed.append(tuple(guess) == answer.order)
        assert 'secret' not in sent and str(tmp_path) not in sent
    assert len(guessed) == 6 and not all(guessed)


def test_nobody_takes_all_connections(one, monkeypatch):
    page, anna, _ = one
    monkeypatch.setattr(server, 'MOST_CONNECTIONS', 5)
    anna.close()
    held = []
    for number in range(12):
        address = ('127.0.0.1', 0) if number % 2 else ('127.0.0.2', 0)
        client = socket.create_connection(('127.0.0.1', page.port), 10, address)
        client.sendall(b'' if number % 3 else b'POST /question HTTP/1.1\r\n')
        held.append(client)
    with contextlib.suppress(ConnectionResetError):
        assert held[0].recv(1) == b''  # is closed
    assert anna.task()['labeller'] == 'anna'
    for client in held:
        client.close()


def test_who_connects_before_a_flood_is_answered(one):
    page, anna, _ = one
    anna.close()
    loop = page._server.servers[0].get_loop()
    loop.call_soon_threadsafe(time.sleep, 1)
    with contextlib.ExitStack() as stack, concurrent.futures.ThreadPoolExecutor() as pool:
        task = pool.submit(anna.task)
        time.sleep(0.2)
        for _ in range(server.MOST_CONNECTIONS + 100):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(('127.0.0.1', page.port))
        assert task.result()['labeller'] == 'anna'


def test_the_same_at_the_same_moment_is_one_answer(path):
    with served(path, 'anna') as (page, anna):
        question = anna.question()['id']
        key = uuid.uuid4().hex

        def send(again):
            client = Client(page.links['anna'])
            status, _ = client.answer(question, 2, answer=key if again else None)
            client.close()
            return status

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            first = list(pool.map(send, [True] * 8))
            question = anna.question()['id']
            second = list(pool.map(send, [False] * 8))
    assert first == [200] * 8
    assert sorted(second) == [200] + [409] * 7
    assert len(written(path)) == 2


def test_skips_have_a_reason_and_undo_asks_again(path):
    with served(path, 'anna', 'bob') as (page, anna, bob):
        first = anna.question()
        second = anna.skip(first['id'], 'offensive')[1]['question']
        assert [a.reason for a in answers_of(path, 'anna')] == ['offensive']
        _, reply = anna.answer(second['id'])
        status, undone = anna.undo(reply['last'])
        assert (status, undone['question'], undone['done']) == (200, second, 1)
        assert anna.undo(reply['last'])[1] == undone  # asked twice, done once
        assert anna.answer(second['id'], 3)[0] == 200
        assert anna.undo(undone['last'])[1]['question'] == first  # the skip
        assert bob.undo(reply['last'])[0] == 404  # another's
    assert len(written(path)) == 5


def test_what_is_not_on_the_disk_is_not_acknowledged(path, monkeypatch):
    error = OSError(errno.EIO, os.strerror(errno.EIO))
    with served(path, 'anna') as (_, anna):
        question, key = anna.question()['id'], uuid.uuid4().hex
        with monkeypatch.context() as patched:
            patched.setattr(os, 'fsync', mock.Mock(side_effect=error))
            status, reply = anna.answer(question, answer=key)
        assert status == 507 and reply['error'].endswith('its files: Input/output error.')
        assert written(path) == []
        assert anna.answer(question, answer=key)[0] == 200


def test_what_others_damage_is_told_and_the_page_goes_on(path):
    notes = []
    with served(path, 'anna', notes=notes) as (_, anna):
        (path / 'answers/bob.jsonl').write_text('nonsense\n')
        assert anna.answer(anna.question()['id'])[0] == 200
    assert any('bob.jsonl, line 1 is not JSON' in note for note in notes)


def test_a_port_has_one_server(path):
    with served(path, 'anna') as (page, _):
        with pytest.raises(UserError, match=f'--web.port {page.port} cannot be used'):
            server.LabelServer(str(path), ['bob'], web_options(port=page.port))
        with served(path, 'bob'):  # nothing is held by what failed
            pass


@pytest.mark.parametrize('host, name', [('::1', '[::1]'), ('::', socket.gethostname())])
def test_other_addresses_of_this_machine(path, host, name):
    if not Path('/proc/net/if_inet6').exists():
        pytest.skip('this machine has no IPv6')
    with served(path, 'anna', host=host) as (page, anna):
        assert page.url == f'http://{name}:{page.port}'
        assert anna.answer(anna.question()['id'])[0] == 200


def test_a_warning_where_there_is_no_tls(path):
    notes = []
    for options in (
        {'host': '0.0.0.0'},
        {'public_url': 'http://label.example.org/'},
        # As of a container whose port is published to this machine alone
        {'host': '0.0.0.0', 'public_url': 'http://[::1]/'},
        {'public_url': 'https://h/'},
    ):
        with served(path, 'anna', notes=notes, **options):
            pass
    places = [re.findall('between you and (.*) can read', note)[0] for note in notes]
    assert places == ['0.0.0.0', 'label.example.org']
    for url in ('label.example.org', 'https://a/?b', 'https://u@a/'):
        with pytest.raises(ValueError, match='--public_url .* must be http:// or https://'):
            WebHParams(public_url=url).validate()


def test_ctrl_c_ends_with_what_there_is_and_what_comes_next(path):
    """Without torch."""
    path = path.parent / 'letters'
    make_folder(path, 3)
    command = Server(path, ['anna', 'bob'])
    assert list(command.links) == ['anna', 'bob'] and 'Ctrl-C' in command.process.stdout.readline()
    assert 'libtorch' not in Path(f'/proc/{command.process.pid}/maps').read_text()
    anna = Client(command.links['anna'])
    anna.skip(anna.question()['id'])
    anna.close()
    printed, complaints = command.end(signal.SIGINT)
    assert printed.startswith('\nSaved: anna 1, bob 0. ')
    assert (complaints, command.process.returncode) == ('', 0)


def test_mistakes_of_the_command_are_one_line_and_those_of_the_documentation_none(
    path, monkeypatch
):
    def error(options):
        return command_line.error_of(command_line.invoke(f'label {path} {options}'))

    assert 'names anna twice' in error('--labeller anna,bob,anna --web on')
    assert "--labeller 'anna,bob'" in error('--labeller anna,bob')  # a terminal is of one person
    assert 'give 127.0.0.1' in error('--labeller anna --web.host localhost')
    assert 'either --web or --simulate' in error('--labeller anna --web on --simulate on')
    assert not list(path.glob('answers/*.jsonl'))
    page = (REPOSITORY / 'docs/labelling.md').read_text(encoding='utf-8')
    lines = re.findall(r'^    pipenv run ./launch.py (label .* --web.*)$', page, re.MULTILINE)
    folders = []
    monkeypatch.setattr(answer_questions, 'serve', lambda folder, options: folders.append(folder))
    for line in lines:
        command_line.succeed(line.replace('./my-labels', str(path)))
    assert len(folders) == len(lines) > 1


def test_only_who_was_given_a_question_answers_it(path):
    with served(path, 'anna', 'bob') as (_, anna, bob):
        mine = anna.question()['id']
        assert bob.answer(mine)[0] == bob.skip(mine)[0] == 409
        assert written(path) == []
        status, reply = anna.answer(mine)
        assert status == 200
        assert bob.answer(mine)[0] == anna.answer(mine)[0] == 409
        assert bob.answer(bob.question()['id'], answer=reply['last'])[0] == 409  # anna's uuid
    assert len(LabelFolder(str(path)).counted()) == len(written(path)) == 1


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
    written_seconds = [json.loads(line).get('seconds') for line in written(path)]
    assert written_seconds == [20.0, None, 10.0]
