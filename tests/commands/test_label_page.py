"""HTTP server of the page for labellers: replies, records, refusals."""

import base64
import concurrent.futures
import contextlib
import errno
import hashlib
import itertools
import json
import os
import re
import shlex
import signal
import socket
import uuid
from pathlib import Path

import command_line
import pytest
from label_folders import TASK, make_folder
from label_page import answers_of, id_of, served, web_options, write_texts, written
from launched import REPOSITORY, eventually
from page_client import Client, Server

from lm_human_preferences.commands import answer_questions
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.labelling_options import LabelHParams, WebHParams
from lm_human_preferences.labels.answers import question_id, shown_order
from lm_human_preferences.labels.folder import LabelFolder
from lm_human_preferences.labels.labeller import Labeller
from lm_human_preferences.labels.page import app, server

ROOT = Path(__file__).parents[2]
TEXTS = [(f'question {i}', *(f'{i}, sample {j}' for j in range(4))) for i in range(6)]


@pytest.fixture(scope='module')
def one(tmp_path_factory):
    path = tmp_path_factory.mktemp('page') / 'f'
    write_texts(path, TEXTS)
    with served(path, 'anna', 'bob') as (page, anna, bob):
        yield page, anna, bob
    assert written(path) == []


@pytest.fixture
def path(tmp_path):
    write_texts(tmp_path / 'f', TEXTS)
    return tmp_path / 'f'


def test_the_page_runs_its_own_script_and_nothing_else(one):
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
    addresses = re.findall(r'(?:https?:)?//[\w.]+', re.sub(r'\s// .*', '', html))
    assert set(addresses) == {'http://www.w3.org'}  # the name of SVG, in the icon
    assert not re.search(r'innerHTML|insertAdjacent|document\.write|eval\(|style=', html)


@pytest.mark.parametrize('path', ['/', '/nothing', '/answer'])
@pytest.mark.parametrize('host', [None, 'evil.example'])
def test_every_reply_is_guarded(one, path, host):
    _, anna, _ = one
    _, found, _ = anna.request('GET', path, **({'Host': host} if host else {}))
    assert found['X-Content-Type-Options'] == 'nosniff'
    assert found['Referrer-Policy'] == 'no-referrer'
    assert found['Cache-Control'] == 'no-store'
    assert "frame-ancestors 'none'" in found['Content-Security-Policy']
    assert "default-src 'none'" in found['Content-Security-Policy']
    assert 'Server' not in found and 'Set-Cookie' not in found
    assert not [name for name in found if name.lower().startswith('access-control')]


def outcome(client, path='/question', body='{}', method='POST', **headers):
    status, _, _ = client.request(method, path, body, **headers)
    return status


def test_only_the_key_of_a_link_opens_the_page(one):
    page, anna, bob = one
    assert anna.task()['labeller'] == 'anna' and bob.task()['labeller'] == 'bob'
    assert anna.key != bob.key and len(anna.key) >= 43
    for action in (*app.ACTIONS, 'ending'):
        for key in (None, '', 'x', anna.key[:-1], f'{anna.key} x', 'é'.encode()):
            given = key if key is None or isinstance(key, bytes) else f'Bearer {key}'
            assert outcome(anna, f'/{action}', Authorization=given) == 401
    for path in ('/question', '/question%0A', '/answer%0A', '/ending%0A'):
        assert outcome(anna, path, Authorization=None, Cookie=f'labelling={anna.key}') == 401
    for path in ('/question/', '/x/question', '/task%00'):
        assert outcome(anna, path) == 404


def test_keys_are_of_one_start_of_the_server(path):
    with served(path, 'anna') as (page, anna):
        port, key = page.port, anna.key
    with served(path, 'anna', port=port) as (page, anna):
        assert anna.key != key and outcome(anna, Authorization=f'Bearer {key}') == 401
        assert [file.name for file in path.iterdir() if 'key' in file.name] == []


@pytest.mark.parametrize(
    'host, status',
    [
        ('127.0.0.1:1', 200),  # ssh -L has a port of its own
        ('localhost', 400),  # another program may listen at its other address
        ('[::1]', 400),
        ('evil.example', 400),
        ('127.0.0.1.evil.example', 400),
        ('evil127.0.0.1', 400),
        ('', 400),
    ],
)
def test_other_names_of_the_host_are_refused(one, host, status):
    _, anna, _ = one
    assert outcome(anna, Host=host) == status


@pytest.mark.parametrize('method', ['PUT', 'DELETE', 'OPTIONS', 'PATCH', 'TRACE', 'GET'])
def test_other_methods_and_paths_are_refused(one, method):
    _, anna, _ = one
    assert outcome(anna, '/answer', method=method) == 405
    assert outcome(anna, '/../task.json') == 404


def test_long_bodies_are_refused_unread(one):
    _, anna, _ = one
    body = json.dumps({'x': 'y' * app.MOST_BYTES})
    assert outcome(anna, body=body) == 413
    assert outcome(anna, body=iter([body.encode()])) == 413  # in chunks
    anna.close()
    assert outcome(anna, body=body[: app.MOST_BYTES - 2] + '"}') == 200


GOOD = {'answer': uuid.uuid4().hex, 'question': '0' * 64, 'choice': [1], 'seconds': 1}


@pytest.mark.parametrize(
    'change',
    [
        {'answer': 'x'},
        {'answer': GOOD['answer'].upper()},
        {'question': '../../etc/passwd'},
        {'choice': [0]},
        {'choice': []},
        {'choice': [1, 2]},
        {'choice': [True]},
        {'choice': ['1']},
        {'choice': 1},
        {'seconds': -1},
        {'seconds': 1e9},
        {'seconds': float('nan')},
        {'seconds': True},
    ],
)
def test_fields_of_other_kinds_are_refused(one, change):
    _, anna, _ = one
    status, reply = anna.post('/answer', **{**GOOD, **change})
    assert (status, bool(reply['error'])) == (400, True)


@pytest.mark.parametrize('body', ['', '[]', '7', '{', '"x"', '[' * 60000, '\udcff', '{"a": 1e999}'])
def test_bodies_that_are_no_object_of_ours_are_refused(one, body):
    _, anna, _ = one
    assert outcome(anna, '/answer', body.encode(errors='surrogateescape')) == 400


def test_questions_and_choices_that_there_are_not(one):
    _, anna, _ = one
    question = anna.question()['id']
    assert anna.answer('0' * 64)[0] == 409
    assert anna.answer(question, 5)[0] == 400
    assert anna.skip(question, 'no reason of ours')[0] == 400
    assert anna.undo('0' * 32)[0] == 404


def test_nothing_about_source_or_place_goes_to_the_browser(tmp_path):
    path = tmp_path / 'f'
    write_texts(path, TEXTS, policies=['secret-a', 'secret-a', 'secret-b', 'secret-b'])
    with served(path, 'anna') as (page, anna):
        sent = json.dumps(anna.task())
        while question := anna.question():
            assert set(question) == {'id', 'query', 'samples'}
            number = question['query'].split()[1]
            anna.answer(question['id'])
            *_, answer = answers_of(path, 'anna')
            assert question['samples'] == [f'{number}, sample {i}' for i in answer.order]
            sent += json.dumps(question)
        assert 'secret' not in sent and str(tmp_path) not in sent


def test_who_has_the_program_and_a_reply_cannot_find_the_order_of_the_samples(path):
    guessed = []
    with served(path, 'anna') as (_, anna):
        while question := anna.question():
            query, *samples = [
                list(text.encode()) for text in (question['query'], *question['samples'])
            ]
            for order in itertools.permutations(range(4)):
                fields = {f'sample{index}': samples[place] for place, index in enumerate(order)}
                id = question_id({'query': query, **dict(sorted(fields.items()))})
                assert question['id'] != id
                if list(order) == [int(text[-1]) for text in question['samples']]:
                    guessed.append(order == shown_order('anna', id, 4))
            anna.answer(question['id'])
    assert len(guessed) == len(TEXTS) and not all(guessed)


def test_nobody_takes_all_connections(one, monkeypatch):
    """From whatever address, and whether they send something or not: the oldest is closed."""
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


def test_pages_that_wait_are_told_when_the_server_ends(path):
    with served(path, 'anna') as (page, anna), concurrent.futures.ThreadPoolExecutor() as pool:
        reply = pool.submit(anna.post, '/ending')
        eventually(lambda: page._server.server_state.tasks)
        page.close()
        assert reply.result() == (200, {})


def test_a_choice_is_recorded_as_the_sample_that_was_shown_there(path):
    with served(path, 'anna') as (_, anna):
        control = anna.task()['control']
        assert (control['template'], control['choices'], control['keys']) == ('choose', 4, 1)
        shown = anna.question()
        for number in (1, 2, 3, 4):
            status, reply = anna.answer(shown['id'], number, seconds=0.001)
            assert (status, reply['done'], reply['left']) == (200, number, 6 - number)
            answer = answers_of(path, 'anna')[-1]
            assert shown['samples'][number - 1].endswith(f'sample {answer.value}')
            assert answer.order.index(answer.value) == number - 1 and answer.seconds == 0.001
            assert reply['last'] == answer.uuid
            shown = reply['question']


def test_the_same_at_the_same_moment_is_one_answer(path):
    """Two windows, or an answer that is sent again while the first is on its way to the disk."""
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
        assert anna.question() == second
        assert anna.answer(second['id'], 3)[0] == 200
        assert anna.undo(undone['last'])[1]['question'] == first  # the skip
        assert bob.undo(reply['last'])[0] == 404  # another's
        expected = id_of(page, second['id'])
    assert len(written(path)) == 5
    (answer,) = answers_of(path, 'anna')
    assert answer.question == expected


def test_an_answer_that_a_training_has_used_stays(path):
    with served(path, 'anna') as (_, anna):
        _, reply = anna.answer(anna.question()['id'])
        (path / 'used.jsonl').write_text(json.dumps({'answers': {'anna': 1}}) + '\n')
        status, refused = anna.undo(reply['last'])
        assert (status, 'That answer stays' in refused['error']) == (409, True)


def test_what_is_not_on_the_disk_is_not_acknowledged(path, monkeypatch):
    def fail(number):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with served(path, 'anna') as (page, anna):
        question, key = anna.question()['id'], uuid.uuid4().hex
        with monkeypatch.context() as patched:
            patched.setattr(os, 'fsync', fail)
            status, reply = anna.answer(question, answer=key)
            assert (status, reply['error']) == (507, 'It could not be saved: Input/output error.')
        assert written(path) == []
        assert anna.answer(question, answer=key)[0] == 200
        (path / 'answers/anna.jsonl').rename(path / 'moved')
        status, reply = anna.answer(anna.question()['id'])
        assert status == 507 and 'the file of your answers was moved' in reply['error']
    assert len((path / 'moved').read_text().splitlines()) == 1


def test_questions_that_cannot_be_read_now_are_asked_when_they_can(path):
    notes = []
    with served(path, 'anna', notes=notes) as (_, anna):
        (path / 'questions.jsonl').rename(path / 'moved')
        assert anna.post('/question')[0] == 503
        (path / 'moved').rename(path / 'questions.jsonl')
        assert anna.question() and anna.state()['left'] == 6
    assert notes[0].endswith(': No such file or directory')


def test_what_others_damage_does_not_stop_the_page(path):
    notes = []
    file = path / 'questions.jsonl'
    file.write_bytes(file.read_bytes().replace(b'"sample2": [', b'"sample2": [1, ', 1))
    with served(path, 'anna', notes=notes) as (page, anna):
        (path / 'answers/bob.jsonl').write_text('nonsense\n')
        page.service._refreshed = 0
        for _ in range(5):
            assert anna.answer(anna.question()['id'])[0] == 200
        state = anna.state()
        assert (state['question'], state['done'], state['left'], state['others']) == (None, 5, 0, 0)
    assert 'bob.jsonl, line 1 is not JSON' in notes[0]
    assert any('is left out' in note and 'is damaged' in note for note in notes)


def error_of(path, *names, **options):
    with pytest.raises(UserError) as error:
        server.LabelServer(str(path), names, web_options(**options))
    return str(error.value)


def test_a_file_has_one_writer_and_a_port_one_server(path):
    with served(path, 'anna') as (page, _):
        with pytest.raises(UserError, match='anna is labelling already'):
            Labeller(LabelFolder(str(path)), 'anna')
        with Labeller(LabelFolder(str(path)), 'bob'):
            pass
        make_folder(path.parent / 'other', task=TASK)
        error = error_of(path.parent / 'other', 'anna', port=page.port)
        assert '--web.port' in error and 'Address already in use' in error
    with Labeller(LabelFolder(str(path)), 'anna'):
        assert 'anna is labelling already' in error_of(path, 'bob', 'anna')
    assert '--web.host' in error_of(path, 'anna', host='no.such.host.invalid')
    assert '--web.host' in error_of(path, 'anna', host='x' * 300)
    with served(path, 'bob', 'anna'):  # nothing is held by what failed
        pass


@pytest.mark.parametrize('host', ['::1', '::'])
def test_other_addresses_of_this_machine(path, host):
    if not Path('/proc/net/if_inet6').exists():
        pytest.skip('this machine has no IPv6')
    with served(path, 'anna', host=host) as (page, anna):
        name = {'::': socket.gethostname(), '::1': '[::1]'}[host]
        assert page.url == f'http://{name}:{page.port}'
        assert anna.answer(anna.question()['id'])[0] == 200


PUBLIC = 'https://label.example.org/preferences/'


@pytest.mark.parametrize(
    'host, status',
    [
        ('label.example.org', 200),
        ('LABEL.example.org:443', 200),
        ('127.0.0.1:1', 200),  # a proxy may say the address of the server
        ('evil.example', 400),
        ('label.example.org.evil.example', 400),
    ],
)
def test_the_public_address_is_let_in_and_no_other(path, host, status):
    options = web_options(public_url=PUBLIC)
    with server.LabelServer(str(path), ['anna'], options, note=lambda line: None) as page:
        link = page.links['anna']
        assert link.startswith(f'{PUBLIC}#')
        anna = Client(f'http://127.0.0.1:{page.port}/#{link.partition("#")[2]}')
        for prefix in ('', '/preferences'):  # which a proxy may leave in requests
            assert outcome(anna, f'{prefix}/task', Host=host) == status
            assert outcome(anna, f'{prefix}/', None, 'GET', Host=host) == status
        assert outcome(anna, '/other/task') == 404
        anna.close()


@pytest.mark.parametrize(
    'url',
    ['label.example.org', 'ftp://a/', 'https://', 'https://a/?b', 'https://a:b/', 'https://u@a/'],
)
def test_a_public_address_that_is_none(url):
    with pytest.raises(ValueError, match='--public_url .* must be http:// or https://'):
        WebHParams(public_url=url).validate()


def test_ctrl_c_ends_with_what_there_is_and_what_comes_next(path):
    """Without torch, and in little memory."""
    command = Server(path, ['anna', 'bob'])
    assert list(command.links) == ['anna', 'bob'] and 'Ctrl-C' in command.process.stdout.readline()
    assert 'libtorch' not in Path(f'/proc/{command.process.pid}/maps').read_text()
    assert command.peak_megabytes() < 97
    anna = Client(command.links['anna'])
    anna.skip(anna.question()['id'])
    anna.close()
    printed, complaints = command.end(signal.SIGINT)
    assert printed.startswith('\nSaved: anna 0 (1 skipped), bob 0. ')
    assert printed.endswith(f': {REPOSITORY}/launch.py labels {path}\n')
    assert (complaints, command.process.returncode) == ('', 0)


@pytest.mark.parametrize('url', ['http://[::1]/', 'https://h/'])
def test_no_warning_of_an_address_of_this_machine_or_with_tls(url):
    """As of a container whose port is published to this machine alone."""
    assert server.missing_tls(WebHParams(host='0.0.0.0', public_url=url)) is None


def test_a_warning_where_there_is_no_tls(path, monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(server.LabelServer, 'wait', interrupt)
    options = LabelHParams(labeller='anna', web=WebHParams(port=0, host='0.0.0.0'))
    answer_questions.serve(str(path), options)
    printed = capsys.readouterr()
    assert printed.err.startswith('warning: no TLS') and 'use ssh -L' in printed.err
    assert 'leave --web.host out' in printed.err and '--web.public_url' in printed.err
    assert f'http://{socket.gethostname()}:' in printed.out
    options.web.public_url = 'http://label.example.org/'
    answer_questions.serve(str(path), options)
    assert 'is between you and http://label.example.org/ can' in capsys.readouterr().err


def test_mistakes_of_the_command_are_one_line(path):
    def error(options):
        return command_line.error_of(command_line.invoke(f'label {path} {options}'))

    assert 'names anna twice' in error('--labeller anna,bob,anna --web on')
    assert "--labeller ''" in error('--labeller anna, --web on')
    assert "--labeller 'anna,bob'" in error('--labeller anna,bob')  # a terminal is of one person
    assert '--web.port must be from 0 to 65535' in error('--labeller anna --web.port 70000')
    assert 'give 127.0.0.1' in error('--labeller anna --web.host localhost')
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
