"""HTTP server of the page for labellers: replies, records, refusals."""

import base64
import concurrent.futures
import errno
import hashlib
import itertools
import json
import os
import re
import shlex
import signal
import socket
import time
import uuid
from pathlib import Path

import command_line
import pytest
from label_folders import TASK, make_folder
from label_page import answers_of, served, web_options, write_texts, written
from launched import REPOSITORY, eventually
from page_client import Client, Server, id_of_token

from lm_human_preferences.commands import answer_questions
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.labelling_options import LabelHParams, WebHParams
from lm_human_preferences.labels.answers import asking_rank, question_id, shown_order
from lm_human_preferences.labels.folder import LabelFolder
from lm_human_preferences.labels.labeller import Labeller
from lm_human_preferences.labels.page import app, key, server
from lm_human_preferences.labels.page.key import folder_key

ROOT = Path(__file__).parents[2]
TEXTS = [(f'question {i}', *(f'{i}, sample {j}' for j in range(4))) for i in range(6)]


@pytest.fixture(scope='module')
def one(tmp_path_factory):
    path = tmp_path_factory.mktemp('page') / 'f'
    write_texts(path, TEXTS)
    with served(path, 'anna', 'bob') as (page, anna, bob):
        yield path, page, anna, bob
    assert written(path) == []


def test_the_page_runs_its_own_script_and_nothing_else(one):
    _, _, anna, _ = one
    status, headers, body = anna.request('GET', '/', Cookie=None)
    html = body.decode()
    assert status == 200
    policy = dict(part.split(' ', 1) for part in headers['Content-Security-Policy'].split('; '))
    for tag in ('script', 'style'):
        (content,) = re.findall(f'<{tag}>(.*?)</{tag}>', html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy[f'{tag}-src'] == f"'sha256-{digest}'"
    assert policy['default-src'] == policy['frame-ancestors'] == policy['base-uri'] == "'none'"
    assert policy['connect-src'] == "'self'"
    addresses = re.findall(r'(?:https?:)?//[\w.]+', re.sub(r'\s// .*', '', html))
    assert set(addresses) == {'http://www.w3.org'}  # the name of SVG, in the icon
    assert not re.search(r'innerHTML|insertAdjacent|document\.write|eval\(|style=', html)


@pytest.mark.parametrize('path', ['/', '/task', '/nothing', '/answer'])
def test_every_reply_is_guarded(one, path):
    _, _, anna, _ = one
    for host in (None, 'evil.example'):
        headers = {} if host is None else {'Host': host}
        _, found, _ = anna.request('GET', path, **headers)
        assert found['X-Content-Type-Options'] == 'nosniff'
        assert found['Referrer-Policy'] == 'no-referrer'
        assert found['Cache-Control'] == 'no-store'
        assert "frame-ancestors 'none'" in found['Content-Security-Policy']
        assert "default-src 'none'" in found['Content-Security-Policy']
        assert 'Server' not in found


def test_a_link_is_exchanged_for_a_cookie_that_scripts_cannot_read(one):
    _, page, anna, _ = one
    _, headers, text = anna.request('POST', '/session', json.dumps({'token': anna.token}))
    name, *attributes = headers['Set-Cookie'].split('; ')
    assert {'HttpOnly', 'SameSite=strict', 'Path=/'} <= set(attributes)
    assert anna.token not in name and json.loads(text)['labeller'] == 'anna'
    for token in ('', 'x', anna.token[:-1], f'{anna.token} ', 'é', '\ud800'):
        status, headers, text = anna.request('POST', '/session', json.dumps({'token': token}))
        assert status == 401 and 'Set-Cookie' not in headers
    assert len({link for link in page.links.values()}) == 2
    assert all(len(link.partition('#')[2]) >= 43 for link in page.links.values())


def outcome(client, method='POST', path='/questions', body=None, **headers):
    body = json.dumps({'labeller': client.name, 'held': [], 'count': 0}) if body is None else body
    status, _, text = client.request(method, path, body, **headers)
    is_json = text.startswith(b'{')  # starlette refuses long bodies in plain words
    return status, json.loads(text).get('error', '') if is_json else text.decode()


def test_a_request_of_the_page_is_granted(one):
    _, page, anna, _ = one
    assert outcome(anna) == (200, '')
    for host in ('localhost', '127.0.0.1', 'LOCALHOST', '[::1]'):  # ssh -L has a port of its own
        assert outcome(anna, Host=f'{host}:9', Origin=f'http://{host}:9') == (200, '')
    assert outcome(anna, Content_Type='application/json; charset=utf-8') == (200, '')


@pytest.mark.parametrize(
    'status, headers',
    [
        (403, {'Host': 'evil.example'}),
        (403, {'Host': '127.0.0.1.evil.example'}),
        (403, {'Host': 'evil-localhost', 'Origin': 'http://evil-localhost'}),
        (403, {'Host': 'evil127.0.0.1', 'Origin': 'http://evil127.0.0.1'}),
        (403, {'Host': 'user@127.0.0.1'}),
        (403, {'Host': ''}),
        (403, {'Origin': None}),
        (403, {'Origin': 'null'}),
        (403, {'Origin': 'http://evil.example'}),
        (403, {'Origin': 'https://127.0.0.1'}),
        (403, {'Origin': 'http://127.0.0.1:1'}),
        (415, {'Content_Type': 'text/plain'}),
        (415, {'Content_Type': 'application/x-www-form-urlencoded'}),
        (401, {'Cookie': None}),
        (401, {'Cookie': 'labelling=x'}),
        # a cookie goes to every port of the host, so that who listens there may have it
        (401, {'Labelling_Proof': None}),
        (401, {'Labelling_Proof': 'x'}),
    ],
)
def test_a_request_from_elsewhere_is_refused(one, status, headers):
    _, _, anna, _ = one
    found, error = outcome(anna, **headers)
    assert found == status and error


def test_a_changed_cookie_is_refused(one):
    _, _, anna, bob = one
    for cookie in (anna.cookie[:-1], f'{anna.cookie}x', anna.cookie.replace('=', '=é', 1)):
        assert outcome(anna, Cookie=cookie.encode())[0] == 401
    # a window of another labeller in the same browser
    assert outcome(anna, Cookie=bob.cookie)[0] == 401
    assert outcome(anna, Cookie=bob.cookie, Labelling_Proof=bob.proof)[0] == 401
    assert outcome(anna, Labelling_Proof=bob.proof)[0] == 401
    assert anna.request('GET', '/task', Cookie=None)[0] == 401


@pytest.mark.parametrize('method', ['PUT', 'DELETE', 'OPTIONS', 'PATCH', 'TRACE', 'GET'])
def test_other_methods_and_paths_are_refused(one, method):
    _, _, anna, _ = one
    assert outcome(anna, method, '/answer', Origin=anna.origin)[0] in (403, 405, 415)
    assert outcome(anna, path=f'/{method}')[0] == 404
    assert outcome(anna, path='/../page.key')[0] == 404


def test_long_bodies_are_refused_unread(one):
    _, _, anna, _ = one
    body = json.dumps({'labeller': 'anna', 'held': [], 'count': 0, 'x': 'y' * app.MOST_BYTES})
    assert outcome(anna, body=body)[0] == 413
    assert outcome(anna, body=iter([body.encode()]))[0] == 413  # in chunks
    anna.close()
    assert outcome(anna, body=body[: app.MOST_BYTES - 2] + '"}')[0] == 200


GOOD = {'answer': str(uuid.uuid4()), 'question': '0' * 64, 'choice': 1, 'seconds': 1}


NOT_RANDOM_IDS = (
    uuid.uuid1(),
    uuid.uuid5(uuid.NAMESPACE_DNS, 'x'),
    uuid.UUID(int=0),
    'f47ac10b-58cc-4372-c567-0e02b2c3d479',  # of another variant
    GOOD['answer'].upper(),
)


@pytest.mark.parametrize(
    'change',
    [
        {'answer': 'x'},
        *({'answer': str(id)} for id in NOT_RANDOM_IDS),
        {'question': '../../etc/passwd'},
        {'choice': 0},
        {'choice': True},
        {'choice': '1'},
        {'choice': ['1']},
        {'seconds': -1},
        {'seconds': 1e9},
        {'seconds': float('nan')},
        {'labeller': 7},
    ],
)
def test_fields_of_other_kinds_are_refused(one, change):
    _, _, anna, _ = one
    status, reply = anna.post('/answer', **{**GOOD, **change})
    assert (status, bool(reply['error'])) == (400, True)


@pytest.mark.parametrize('body', ['', '[]', '7', '{', '"x"', '[' * 60000, '\udcff', '{"a": 1e999}'])
def test_bodies_that_are_no_object_of_ours_are_refused(one, body):
    _, _, anna, _ = one
    body = body.encode(errors='surrogateescape')
    assert outcome(anna, body=body, path='/answer')[0] == 400


def test_questions_and_choices_that_there_are_not(one):
    _, _, anna, _ = one
    question = anna.questions()[0]['id']
    assert anna.answer('0' * 64)[0] == 404
    assert anna.answer(question, 5)[0] == 400
    assert anna.skip(question, 'no reason of ours')[0] == 400
    assert anna.undo('nothing')[0] == 404
    for held in ('x', ['x'], [question] * 17, [7]):
        assert anna.post('/questions', held=held, count=1)[0] == 400
    assert anna.post('/questions', held=[], count=99)[0] == 400


def test_nothing_about_source_or_place_goes_to_the_browser(tmp_path):
    write_texts(tmp_path / 'f', TEXTS, policies=['secret-a', 'secret-a', 'secret-b', 'secret-b'])
    with served(tmp_path / 'f', 'anna') as (_, anna):
        _, _, task = anna.request('GET', '/task')
        _, reply = anna.post('/questions', held=[], count=3)
        assert 'secret' not in task.decode() + json.dumps(reply)
        assert str(tmp_path) not in task.decode() + json.dumps(reply)
        assert {tuple(question) for question in reply['questions']} == {('id', 'query', 'samples')}
        for question in reply['questions']:
            number = question['query'].split()[1]
            id = id_of_token(LabelFolder(str(tmp_path / 'f')), question['id'])
            order = shown_order('anna', id, 4, folder_key(str(tmp_path / 'f')).order)
            assert question['samples'] == [f'{number}, sample {index}' for index in order]


def test_who_has_the_program_and_a_reply_cannot_find_the_order_of_the_samples(path):
    with served(path, 'anna') as (_, anna):
        questions = []
        for _ in TEXTS:
            questions += anna.questions(count=1)
            anna.answer(questions[-1]['id'])
    guessed = []
    ranks = []
    for question in questions:
        texts = [question['query'], *question['samples']]
        query, *samples = [list(text.encode()) for text in texts]
        for order in itertools.permutations(range(4)):
            fields = {f'sample{index}': samples[place] for place, index in enumerate(order)}
            id = question_id({'query': query, **dict(sorted(fields.items()))})
            assert question['id'] != id
            if list(order) == [int(text[-1]) for text in question['samples']]:
                guessed.append(order == shown_order('anna', id, 4))
                ranks.append(asking_rank('anna', id))
    assert len(guessed) == len(ranks) == len(TEXTS)
    assert not all(guessed) and ranks != sorted(ranks)


def test_slow_clients_are_cut_off(one, monkeypatch):
    _, page, anna, _ = one
    monkeypatch.setattr(server, 'REQUEST_SECONDS', 0.3)
    monkeypatch.setattr(app, 'BODY_SECONDS', 0.3)

    def reply_to(data):
        with socket.create_connection(('127.0.0.1', page.port), timeout=10) as client:
            client.sendall(data)
            return client.recv(100)  # which ends when the server closes

    head = f'POST /session HTTP/1.1\r\nHost: 127.0.0.1:{page.port}\r\nOrigin: {anna.origin}\r\n'
    assert reply_to(b'') == reply_to(b'GET / HT') == reply_to(head.encode()) == b''
    head += 'Content-Type: application/json\r\nContent-Length: 9\r\n\r\n{'
    assert b' 408 ' in reply_to(head.encode())
    # a connection that had one request, and begins another
    with socket.create_connection(('127.0.0.1', page.port), timeout=10) as client:
        request = f'GET /task HTTP/1.1\r\nHost: 127.0.0.1:{page.port}\r\n'.encode()
        client.sendall(request + b'\r\n')
        reply = b''
        while b'were given' not in reply:
            reply += client.recv(4096)
        assert reply.startswith(b'HTTP/1.1 401 ') and reply.endswith(b'}')
        client.sendall(request)
        assert client.recv(4096) == b''


def test_pages_that_wait_are_told_when_the_server_ends(path, monkeypatch):
    monkeypatch.setattr(app, 'ENDING_SECONDS', 0.05)
    with served(path, 'anna') as (page, anna), concurrent.futures.ThreadPoolExecutor() as pool:
        assert anna.post('/ending') == (200, {'ended': False})
        monkeypatch.setattr(app, 'ENDING_SECONDS', 60.0)
        reply = pool.submit(anna.post, '/ending')
        eventually(lambda: page._server.server_state.tasks)
        page.close()
        assert reply.result() == (200, {'ended': True})


def test_uvicorn_still_says_when_a_reply_is_complete(one, monkeypatch):
    """It may take longer than a request may, and then the time for the next request begins."""
    _, page, anna, _ = one
    monkeypatch.setattr(server, 'REQUEST_SECONDS', 1.0)
    completed = []
    on_response_complete = server.TimedProtocol.on_response_complete

    def note_completion(protocol):
        on_response_complete(protocol)
        completed.append(protocol)

    monkeypatch.setattr(server.TimedProtocol, 'on_response_complete', note_completion)
    task = page.service.task

    def task_at_leisure(name):
        time.sleep(1.5)
        return task(name)

    monkeypatch.setattr(page.service, 'task', task_at_leisure)
    anna.close()  # a new connection has the new limit
    assert anna.task()['labeller'] == 'anna'
    eventually(lambda: completed)


@pytest.fixture
def path(tmp_path):
    write_texts(tmp_path / 'f', TEXTS)
    return tmp_path / 'f'


def test_a_choice_is_recorded_as_the_sample_that_was_shown_there(path):
    with served(path, 'anna') as (_, anna):
        control = anna.task()['control']
        assert (control['template'], control['choices'], control['keys']) == ('choose', 4, 1)
        for number in (1, 2, 3, 4):
            (question,) = anna.questions(count=1)
            status, reply = anna.answer(question['id'], number, seconds=2.5)
            assert (status, reply['done'], reply['left']) == (200, number, 6 - number)
            answer = answers_of(path, 'anna')[-1]
            assert question['samples'][number - 1].endswith(f'sample {answer.value}')
            assert answer.order.index(answer.value) == number - 1 and answer.seconds == 2.5
            assert reply['last'] == answer.uuid


def test_the_same_at_the_same_moment_is_one_answer(path):
    """Two windows, or an answer that is sent again while the first is on its way to the disk."""
    with served(path, 'anna') as (page, anna):
        first, second, _ = anna.questions()
        key = str(uuid.uuid4())

        def send(number):
            client = Client(page.links['anna'])
            again, _ = client.answer(first['id'], 2, key)
            other, _ = client.answer(second['id'], 1 + number % 4)
            client.close()
            return again, other

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            statuses = list(pool.map(send, range(8)))
    assert [again for again, _ in statuses] == [200] * 8
    assert sorted(other for _, other in statuses) == [200] + [409] * 7
    assert len(written(path)) == 2


def test_skips_have_a_reason_and_undo_asks_again(path):
    with served(path, 'anna', 'bob') as (_, anna, bob):
        first, second, third = anna.questions()
        _, reply = anna.skip(first['id'], 'offensive')
        assert [a.reason for a in answers_of(path, 'anna')] == ['offensive']
        _, reply = anna.answer(second['id'], 1)
        status, undone = anna.undo(reply['last'])
        assert (status, undone['question'], undone['done']) == (200, second, 1)
        assert anna.undo(reply['last'])[1] == undone  # asked twice, done once
        assert anna.questions(count=1)[0]['id'] == second['id']
        assert anna.answer(second['id'], 3)[0] == 200
        assert anna.undo(undone['last'])[1]['question'] == first  # the skip
        assert bob.undo(reply['last'])[0] == 404  # another's
    assert len(written(path)) == 5
    (answer,) = answers_of(path, 'anna')
    assert answer.question == id_of_token(LabelFolder(str(path)), second['id'])


def test_an_answer_that_was_given_again_elsewhere_is_not_said_to_be_taken_back(path):
    with served(path, 'anna') as (_, anna):
        (question,) = anna.questions(count=1)
        _, before = anna.answer(question['id'], 1)
        assert anna.undo(before['last'])[0] == 200
        _, after = anna.answer(question['id'], 2)
        # the window that did not see this
        status, reply = anna.undo(before['last'])
        assert (status, reply['error']) == (409, 'Your newer answer to that question stays.')
        assert anna.undo(after['last'])[1]['question'] == question
    assert len(written(path)) == 4


def test_the_link_and_the_cookie_outlive_the_server(path):
    with served(path, 'anna') as (page, anna):
        links, port = page.links, page.port
        shown = anna.questions()
        question = shown[0]['id']
        key = str(uuid.uuid4())
        assert anna.answer(question, 2, key)[0] == 200
    with served(path, 'anna', 'bob', port=port) as (page, _, _):
        assert anna.questions(count=2) == shown[1:]
        assert page.links['anna'] == links['anna']
        status, reply = anna.answer(question, 2, key)  # which it had not been told of
        assert (status, reply['done']) == (200, 1)
        anna.close()
    assert len(written(path)) == 1
    assert (path / 'page.key').stat().st_mode & 0o777 == 0o600


def test_what_is_not_on_the_disk_is_not_acknowledged(path, monkeypatch):
    def fail(number):
        anna_sees.append(LabelFolder(str(path)).logs['anna'].uuids.keys())
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    anna_sees = []
    with served(path, 'anna') as (page, anna):
        question = anna.questions()[0]['id']
        key = str(uuid.uuid4())
        with monkeypatch.context() as patched:
            patched.setattr(os, 'fsync', fail)
            status, reply = anna.answer(question, 1, key)
            assert (status, reply['error']) == (507, 'It could not be saved: Input/output error.')
        assert anna_sees == [{key}] and written(path) == []
        assert anna.answer(question, 1, key)[0] == 200
    assert len(written(path)) == 1


def test_questions_that_cannot_be_read_now_are_asked_when_they_can(path):
    file, whole = path / 'questions.jsonl', (path / 'questions.jsonl').read_bytes()
    notes = []
    with served(path, 'anna', notes=notes) as (page, anna):
        file.rename(path / 'moved')
        status, reply = anna.post('/questions', held=[], count=3)
        assert status == 503 and 'No such file or directory' in reply['error']
        (path / 'moved').rename(file)
        assert len(anna.questions()) == 3 and anna.task()['left'] == 6
        for change in (b'nonsense\n', b''):  # nobody is told that nothing is left
            page.service._refreshed = 0
            file.write_bytes(change)
            status, reply = anna.post('/questions', held=[], count=3)
            assert (status, 'their file was changed' in reply['error']) == (503, True)
        file.write_bytes(whole)
        assert len(anna.questions()) == 3 and anna.task()['left'] == 6
    assert notes[0].endswith(': No such file or directory')
    assert 'questions.jsonl is empty now: put it back as it was' in notes[-1]


def test_what_others_damage_does_not_stop_the_page(path):
    notes = []
    with served(path, 'anna', notes=notes) as (page, anna):
        (path / 'answers/bob.jsonl').write_text('nonsense\n')
        page.service._refreshed = 0
        assert len(anna.questions()) == 3
    assert 'bob.jsonl, line 1 is not JSON' in notes[0]


def error_of(path, *names, **options):
    with pytest.raises(UserError) as error:
        server.LabelServer(str(path), names, web_options(**options))
    return str(error.value)


def test_a_folder_has_one_server_and_a_file_one_writer(path):
    with served(path, 'anna') as (page, _):
        assert 'has a page already' in error_of(path, 'bob')
        (path / 'page.key').unlink()
        assert 'has a page already' in error_of(path, 'bob')
        with pytest.raises(UserError, match='anna is labelling already'):
            Labeller(LabelFolder(str(path)), 'anna')
        with Labeller(LabelFolder(str(path)), 'bob'):
            pass
        make_folder(path.parent / 'other', task=TASK)
        error = error_of(path.parent / 'other', 'anna', port=page.port)
        assert '--web.port' in error and 'Address already in use' in error
    with Labeller(LabelFolder(str(path)), 'anna'):
        assert 'anna is labelling already' in error_of(path, 'bob', 'anna')
    with served(path, 'bob', 'anna'):  # nothing is held by what failed
        pass


def test_mistakes_are_told(path, tmp_path):
    assert '--web.host' in error_of(path, 'anna', host='no.such.host.invalid')
    assert '--web.host' in error_of(path, 'anna', host='x' * 300)
    (tmp_path / 'x.pem').write_text('nothing')
    for name in (f'{tmp_path}/x.pem', f'{tmp_path}/none.pem'):
        assert '--web.certificate' in error_of(path, 'anna', certificate=name, key=name)
    with served(path, 'anna'):
        pass


def test_links_are_new_where_others_could_read_the_key(path):
    file, before = path / 'page.key', folder_key(str(path))
    file.chmod(0o644)
    notes = []
    with served(path, 'anna', notes=notes) as (page, _):
        old = key.Access(before, ['anna']).code('link', 'anna')
        assert page.links['anna'].partition('#')[2] != old
    assert 'could be read by others: all links are new' in notes[0]
    assert file.stat().st_mode & 0o777 == 0o600
    file.write_text('nonsense')
    assert 'is damaged: all links are new' in folder_key(str(path)).notes[0]
    file.unlink()
    file.symlink_to('/etc/passwd')
    assert 'page.key cannot be used: it is a symbolic link' in error_of(path, 'anna')


def test_a_key_of_somebody_else_is_neither_used_nor_changed(path, monkeypatch):
    file, other = path / 'page.key', path / 'other'
    text = file.read_text()
    file.rename(other)
    file.hardlink_to(other)
    assert 'page.key is a hard link' in error_of(path, 'anna')
    file.unlink()
    own = folder_key(str(path))
    assert file.read_text() != text == other.read_text()
    text = file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    owner = os.geteuid()
    with monkeypatch.context() as patched:
        patched.setattr(key.os, 'geteuid', lambda: owner + 1)
        first, second = folder_key(str(path)), folder_key(str(path))
    assert len({own.secret, first.secret, second.secret}) == 3
    assert 'belongs to another user: links, and the order' in first.notes[0]

    def refuse(path, flags):
        raise PermissionError(errno.EACCES, 'Permission denied')

    monkeypatch.setattr(key.storage, 'open_private', refuse)
    (note,) = folder_key(str(path)).notes
    assert 'cannot be opened (Permission denied): links, and the order' in note
    assert file.read_text() == text


@pytest.mark.parametrize('host', ['localhost', '::1', '::'])
def test_other_names_of_this_machine(path, host):
    if '::' in host and not Path('/proc/net/if_inet6').exists():
        pytest.skip('this machine has no IPv6')
    with served(path, 'anna', host=host) as (page, anna):
        name = {'::': socket.gethostname(), '::1': '[::1]'}.get(host, host)
        assert page.url == f'http://{name}:{page.port}'
        assert anna.answer(anna.questions()[0]['id'])[0] == 200
        for name in ('127.0.0.1', '[::1]') if host == '::' else ():
            client = Client(f'http://{name}:{page.port}/#{anna.token}')
            assert client.questions()
            client.close()


PUBLIC = 'https://label.example.org/preferences/'


OF_DOCKER = 'http://192.0.2.1:9000'


@pytest.mark.parametrize(
    'url, host, origin, status',
    [
        (PUBLIC, 'label.example.org', 'https://label.example.org', 200),
        (PUBLIC, 'LABEL.example.org:443', 'https://label.example.org', 200),
        # a proxy may say the address of the server
        (PUBLIC, '127.0.0.1:1', 'https://label.example.org', 200),
        (PUBLIC, '127.0.0.1:1', 'http://127.0.0.1:1', 200),
        (PUBLIC, 'label.example.org', 'http://label.example.org', 403),
        (PUBLIC, 'label.example.org', 'https://label.example.org:444', 403),
        (PUBLIC, 'label.example.org', 'https://evil.example', 403),
        (PUBLIC, 'label.example.org', None, 403),
        (PUBLIC, '127.0.0.1:1', None, 403),
        (PUBLIC, 'evil.example', 'https://label.example.org', 403),
        (PUBLIC, 'evil.example', 'https://evil.example', 403),
        (PUBLIC, 'label.example.org.evil.example', 'https://label.example.org', 403),
        (OF_DOCKER, '192.0.2.1:9000', OF_DOCKER, 200),
        (OF_DOCKER, '192.0.2.2:9000', 'http://192.0.2.2:9000', 403),
        (OF_DOCKER, '192.0.2.1:9000', 'http://192.0.2.1:9001', 403),
    ],
)
def test_the_public_address_is_let_in_and_no_other(path, url, host, origin, status):
    options = web_options(public_url=url)
    with server.LabelServer(str(path), ['anna'], options, note=lambda line: None) as page:
        link = page.links['anna']
        assert link.startswith(f'{url.rstrip("/")}/#')
        anna = Client(f'http://127.0.0.1:{page.port}/#{link.partition("#")[2]}')
        for prefix in ('', '/preferences') if url == PUBLIC else ('',):
            assert outcome(anna, path=f'{prefix}/questions', Host=host, Origin=origin)[0] == status
        assert outcome(anna, path='/other/questions')[0] == 404
        body = json.dumps({'token': anna.token})
        _, headers, _ = anna.request('POST', '/session', body, Host=host, Origin=origin)
        if status == 200:
            is_secure = 'Secure' in headers['Set-Cookie'].split('; ')
            assert is_secure == origin.startswith('https:')
        anna.close()


@pytest.mark.parametrize(
    'url',
    ['label.example.org', 'ftp://a/', 'https://', 'https://a/?b', 'https://a:b/', 'https://u@a/'],
)
def test_a_public_address_that_is_none(url):
    with pytest.raises(ValueError, match='--public_url .* must be http:// or https://'):
        WebHParams(public_url=url).validate()


def test_tls(path, certificate):
    options = web_options(host='localhost', certificate=certificate, key=certificate)
    with server.LabelServer(str(path), ['anna'], options) as page:
        assert page.url.startswith('https://localhost:')
        anna = Client(page.links['anna'], certificate=certificate)
        _, headers, _ = anna.request('POST', '/session', json.dumps({'token': anna.token}))
        assert 'Secure' in headers['Set-Cookie'].split('; ')
        assert anna.answer(anna.questions()[0]['id'])[0] == 200
        assert outcome(anna, Origin=anna.origin.replace('https', 'http'))[0] == 403
        anna.close()
    assert Path(path, 'answers/anna.jsonl').read_text().count('\n') == 1


def test_ctrl_c_ends_with_what_there_is_and_what_comes_next(path):
    """Without torch, and in little memory."""
    command = Server(path, ['anna', 'bob'])
    assert list(command.links) == ['anna', 'bob'] and 'Ctrl-C' in command.process.stdout.readline()
    assert 'libtorch' not in Path(f'/proc/{command.process.pid}/maps').read_text()
    assert command.peak_megabytes() < 97
    Client(command.links['anna']).close()
    printed, complaints = command.end(signal.SIGINT)
    assert printed.startswith('\nSaved: anna 0, bob 0. 6 questions are open. ')
    assert printed.endswith(f': {REPOSITORY}/launch.py labels {path}\n')
    assert (complaints, command.process.returncode) == ('', 0)


def test_the_end_says_whose_answers_are_not_in_their_file(path, monkeypatch, capsys):
    def wait(page):
        anna = page.service.labellers['anna']
        anna.answer(anna.next_question(), 1, 1)
        (path / 'answers/anna.jsonl').write_text('')
        raise KeyboardInterrupt

    monkeypatch.setattr(server.LabelServer, 'wait', wait)
    answer_questions.serve(str(path), LabelHParams(labeller='anna,bob', web=WebHParams(port=0)))
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith('anna 1: ') and 'anna.jsonl was changed while this program' in last
    assert 'Saved: bob 0. ' in last


@pytest.mark.parametrize('url', ['http://localhost:8080/labels/', 'http://[::1]/', 'https://h/'])
def test_no_warning_of_an_address_of_this_machine_or_with_tls(url):
    """As of a container whose port is published to this machine alone."""
    assert server.missing_tls(WebHParams(host='0.0.0.0', public_url=url)) is None


def test_a_warning_where_there_is_no_tls(path, monkeypatch, capsys):
    monkeypatch.setattr(server.LabelServer, 'wait', interrupt)
    options = LabelHParams(labeller='anna', web=WebHParams(port=0, host='0.0.0.0'))
    answer_questions.serve(str(path), options)
    printed = capsys.readouterr()
    assert printed.err.startswith('warning: no TLS') and 'ssh -L' in printed.err
    assert 'give --web.certificate and --web.key, or leave --web.host out' in printed.err
    assert f'http://{socket.gethostname()}:' in printed.out
    options.web.public_url = 'http://label.example.org/'
    answer_questions.serve(str(path), options)
    assert 'is between you and http://label.example.org/ can' in capsys.readouterr().err
    for options.web.host, options.web.public_url in (('0.0.0.0', PUBLIC), ('localhost', None)):
        answer_questions.serve(str(path), options)
        assert capsys.readouterr().err == ''


def interrupt(*_):
    raise KeyboardInterrupt


def test_mistakes_of_the_command_are_one_line(path):
    def error(options):
        return command_line.error_of(command_line.invoke(f'label {path} {options}'))

    assert 'names anna twice' in error('--labeller anna,bob,anna --web on')
    assert "--labeller ''" in error('--labeller anna, --web on')
    assert "--labeller 'anna,bob'" in error('--labeller anna,bob')  # a terminal is of one person
    assert '--web.key FILE' in error('--labeller anna --web.certificate x.pem')
    assert '--web.certificate FILE' in error('--labeller anna --web.key x.pem')
    assert '--web.port must be from 0 to 65535' in error('--labeller anna --web.port 70000')
    assert 'either --web or --simulate' in error('--labeller anna --web on --simulate on')
    assert not list(path.glob('answers/*.jsonl'))


def test_the_commands_of_the_documentation(path):
    page = (ROOT / 'docs/labelling.md').read_text(encoding='utf-8')
    lines = re.findall(r'^    pipenv run ./launch.py label (.* --web.*)$', page, re.MULTILINE)
    assert len(lines) > 1
    for line in lines:
        folder, option, names, *options = shlex.split(line)
        assert (folder, option) == ('./my-labels', '--labeller')
        command = Server(path, names.split(','), options=options)
        assert 'The report' in command.end(signal.SIGINT)[0]
