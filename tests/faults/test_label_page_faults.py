"""The page's server, killed at random moments; requests from elsewhere.

LMHP_FAULTS=50 is the whole test: 50 kills, and 6,250 requests.
"""

import contextlib
import json
import random
import signal
import socket
import time
import uuid

import pytest
from label_folders import make_folder
from label_page import StubbornLabeller
from launched import FAULTS
from page_client import PATIENCE, Client, Server, check

from lm_human_preferences.labels.folder import LabelFolder

KILLS = max(5, FAULTS)

# ---------------------------------------------------------------- kills


@pytest.mark.slow
def test_a_kill_of_the_server_loses_and_doubles_nothing(tmp_path):
    """Kill -9, while a labeller answers."""
    rng = random.Random(0)
    path = tmp_path / 'f'
    make_folder(path, 400 * KILLS)
    server = Server(path, ['anna'])
    labeller = StubbornLabeller(Client(server.links['anna']))
    labeller.start()
    for _ in range(KILLS):
        time.sleep(rng.uniform(0, 0.6))
        server.end(signal.SIGKILL)
        server = Server(path, ['anna'], server.port)
    before = len(labeller.given)
    while len(labeller.given) == before:  # it goes on after the last restart
        assert labeller.is_alive()
        time.sleep(0.01)
    labeller.is_over.set()
    labeller.join(PATIENCE)
    server.end()
    assert check(path, {'anna': labeller.given}) == len(labeller.given) > KILLS


# ---------------------------------------------------------------- fuzz


class Fuzzer:
    """Makes requests that are nearly those of a page, each with something that forbids it."""

    def __init__(self, client, question, answer, seed):
        self.client, self.random = client, random.Random(seed)
        one = {'labeller': client.name, 'answer': str(uuid.UUID(int=1, version=4)), 'seconds': 1.0}
        self.bodies = {
            '/answer': {**one, 'question': question, 'choice': 1},
            '/skip': {**one, 'question': question, 'reason': 'other'},
            '/undo': {'labeller': client.name, 'answer': answer},
            '/questions': {'labeller': client.name, 'held': [], 'count': 3},
        }

    def request(self):
        """The bytes of a request."""
        path = self.random.choice(list(self.bodies))
        self.method, self.path = 'POST', path
        self.headers = {
            'Host': f'127.0.0.1:{self.client.port}',
            'Origin': self.client.origin,
            'Content-Type': 'application/json',
            'Cookie': self.client.cookie,
            'Labelling-Proof': self.client.proof,
            'Connection': 'close',
        }
        self.body = json.dumps(self.bodies[path]).encode()
        self.start = None
        self.random.choice(self.DEFECTS)(self)
        start = self.start
        if start is None:
            start = f'{self.method} {self.path} HTTP/1.1'.encode('latin-1')
        self.headers.setdefault('Content-Length', str(len(self.body)))
        lines = [f'{name}: {value}' for name, value in self.headers.items() if value is not None]
        head = '\r\n'.join(lines).encode('latin-1', 'replace')
        return start + b'\r\n' + head + b'\r\n\r\n' + self.body

    def _bytes(self, most):
        return self.random.randbytes(self.random.randint(0, most))

    def _text(self, most=40):
        return ''.join(
            chr(self.random.randint(33, 126)) for _ in range(self.random.randint(1, most))
        )

    def _wrong_header(self):
        text = self._text()
        values = {
            'Host': ['evil.example', '', f'x.127.0.0.1:{self.client.port}', text, None],
            'Origin': [None, 'null', 'http://evil.example', f'{self.client.origin}0', '*'],
            'Content-Type': [None, 'text/plain', 'multipart/form-data', text],
            'Content-Length': ['-1', '999999999', '1e3', '0x10', 'ten', '18446744073709551617'],
            'Transfer-Encoding': ['chunked', 'gzip', 'chunked, chunked', text],
        }
        name = self.random.choice(list(values))
        self.headers[name] = self.random.choice(values[name])
        if name == 'Transfer-Encoding':
            self.body = self.random.choice([b'-1\r\n', b'zz\r\nx\r\n', b'FFFFFFFFFFFFFFFFFF\r\n'])
            self.headers['Content-Length'] = None

    def _no_cookie(self):
        name, _, value = self.client.cookie.partition('=')
        place = self.random.randrange(len(value) - 1)  # the last one has bits that mean nothing
        changed = value[:place] + ('A' if value[place] != 'A' else 'B') + value[place + 1 :]
        self.headers['Cookie'] = self.random.choice(
            [None, '', name, f'{name}={changed}', f'{name}={self._text()}', f'{name}x={value}']
        )

    def _no_proof(self):
        self.headers['Labelling-Proof'] = self.random.choice([None, '', self._text()])

    def _wrong_field(self):
        fields = json.loads(self.body)
        name = self.random.choice([name for name in fields if name != 'held'])
        wrong = [None, True, -1, 1e308, 10**30, [], {}, [[]], 'x' * 300, self._text(), '\0']
        if name != 'seconds':
            wrong.append(0.5)
        fields[name] = self.random.choice(wrong)
        self.body = json.dumps(fields).encode()

    def _no_json(self):
        self.body = self.random.choice(
            [
                self.body[: self.random.randrange(len(self.body))],
                self._bytes(500),
                b'[' * self.random.randint(1, 60000),
                b'{"labeller":' * self.random.randint(1, 5000),
                b' ' * 70_000,
                self.body.replace(b'"', b"'"),
                b'\xff\xfe' + self.body,
            ]
        )

    def _wrong_path(self):
        self.path = self.random.choice(
            [
                '/page.key',
                '/../page.key',
                '/%2e%2e/task.json',
                '/answers/anna.jsonl',
                f'/{self._text()}?',
                f'{self.path}/',
                f'/{"a" * 5000}',
                f'http://evil.example{self.path}',
                '/%00',
                '*',
            ]
        )

    def _wrong_method(self):
        methods = ['GET', 'HEAD', 'PUT', 'DELETE', 'OPTIONS', 'TRACE', 'PATCH', 'CONNECT', 'X' * 50]
        self.method = self.random.choice(methods)

    def _no_http(self):
        self.start = self.random.choice(
            [
                self._bytes(200),
                b'\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03' + self._bytes(100),
                b'POST /answer',
                b'POST /answer FTP/1.1',
                b'POST  /answer HTTP/1.1',
                b'POST /answer HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ' + b'y' * 40_000,
                b'POST /answer HTTP/1.1\r\nX\0: y',
                b'PRI * HTTP/2.0',
                b'',
            ]
        )

    DEFECTS = (
        _wrong_header,
        _wrong_header,
        _no_cookie,
        _no_proof,
        _wrong_field,
        _no_json,
        _wrong_path,
        _wrong_method,
        _no_http,
    )


def exchange(port, data):
    """(status, all bytes) of the reply; status None where the server has closed without one."""
    with socket.create_connection(('127.0.0.1', port), timeout=PATIENCE) as connection:
        reply = b''
        with contextlib.suppress(ConnectionError, TimeoutError):
            connection.sendall(data)
            connection.settimeout(0.5)  # a request that claims more than it sends is waited for
            while chunk := connection.recv(65536):
                reply += chunk
    words = reply.split(None, 2)
    return (int(words[1]) if reply.startswith(b'HTTP/') else None), reply


def fuzz(path, count, seed):
    """Send such requests, and check that nothing was changed, served or complained of.

    Returns the set of statuses, None for no reply.
    """
    make_folder(path, 50)
    server = Server(path, ['anna', 'bob'])
    try:
        return _fuzz(server, path, count, seed)
    finally:
        server.process.kill()


def _fuzz(server, path, count, seed):
    client = Client(server.links['anna'])
    first, second, _ = client.questions()
    _, reply = client.answer(first['id'])
    client.answer(second['id'])
    questions = [question['id'] for question in client.questions()]
    before = _answers(path)
    fuzzer = Fuzzer(client, questions[0], reply['last'], seed)
    statuses = set()
    for number in range(count):
        data = fuzzer.request()
        status, reply = exchange(server.port, data)
        statuses.add(status)
        is_allowed = status is None or 400 <= status < 500 or _is_harmless(fuzzer, status, reply)
        assert is_allowed and b'samples' not in reply, (number, data[:300], reply[:300])
    assert _answers(path) == before
    client.close()
    assert client.answer(questions[0])[0] == 200
    _, complaints = server.end()
    assert not complaints, complaints
    assert len(LabelFolder(str(path)).counted()) == 3
    return statuses


def _is_harmless(fuzzer, status, reply):
    """Whether a request was one for the page itself, which everybody may have."""
    return status == 200 and b'<!doctype html>' in reply


def _answers(path):
    return {file.name: file.read_bytes() for file in (path / 'answers').iterdir()}


def test_forged_and_damaged_requests_change_and_get_nothing(tmp_path):
    statuses = fuzz(tmp_path / 'f', 125 * FAULTS, seed=1)
    assert {400, 401, 403, 404, 405, 413, 415} <= statuses


def test_the_fuzzer_would_find_a_request_that_is_granted(tmp_path, monkeypatch):
    """Without its defects every request is one that the page might send."""
    monkeypatch.setattr(Fuzzer, 'DEFECTS', (lambda fuzzer: None,))
    with pytest.raises(AssertionError):
        fuzz(tmp_path / 'f', 20, seed=0)
