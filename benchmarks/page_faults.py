"""The page's server, and `label` in a terminal, killed at random moments; requests from elsewhere.

Part of labelling.py; tests run it with few repetitions.
"""

import contextlib
import json
import os
import pty
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid

from page_client import PATIENCE, ROOT, Client, Server, check, insist

from label_folders import make_folder  # isort: skip (page_client says where it is)
from lm_human_preferences.labels.folder import LabelFolder

# ---------------------------------------------------------------- kills


class StubbornLabeller(threading.Thread):
    """Answers without a pause; what gets no reply is sent again under the same uuid, as the page
    does. given: {uuid: question} of what was acknowledged."""

    def __init__(self, client):
        super().__init__(daemon=True)
        self.client, self.given = client, {}
        self.is_over = threading.Event()

    def run(self):
        while not self.is_over.is_set():
            for question in insist(lambda: self.client.questions(count=3)):
                key = str(uuid.uuid4())
                status, reply = insist(lambda: self.client.answer(question['id'], 1, key))  # noqa: B023
                assert status == 200, reply
                self.given[key] = question['id']


def kills(folder, count, seed):
    """Kill the server and the terminal `count` times each."""
    kill_servers(folder / 'server', count, seed)
    kill_terminals(folder / 'terminal', count, seed)


def kill_servers(path, count, seed):
    """Kill -9 and restart the server while a labeller answers; how many answers there are."""
    rng = random.Random(seed)
    make_folder(path, 400 * count)
    server = Server(path, ['anna'])
    labeller = StubbornLabeller(Client(server.links['anna']))
    labeller.start()
    for _ in range(count):
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
    found = check(path, {'anna': labeller.given})
    assert found == len(labeller.given), (found, len(labeller.given))
    print(f'server killed {count} times: {found} answers, all that were acknowledged, each once')
    return found


def kill_terminals(path, count, seed):
    """Kill -9 `label` in a terminal at some key; how many answers there are."""
    rng = random.Random(seed)
    make_folder(path, 20 * count)
    shown = pressed = 0
    for _ in range(count):
        terminal = _Terminal(path)
        terminal.answer(rng.randint(1, 8))
        time.sleep(rng.uniform(0, 0.02))
        terminal.kill()
        shown += terminal.shown - 1  # the next question says that the answer before it is saved
        pressed += terminal.pressed
    found = check(path, {})
    assert shown <= found <= pressed, (shown, found, pressed)
    print(f'terminal killed {count} times: {found} answers; {shown} were seen to be saved')
    return found


class _Terminal:
    """`label` on a pseudo-terminal."""

    def __init__(self, path):
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / 'launch.py'), 'label', str(path), '--labeller', 'anna'],
            stdin=slave,
            stdout=slave,
            stderr=slave,
        )
        os.close(slave)
        self.printed = b''
        self.pressed = 0

    @property
    def shown(self):
        """How many questions have been shown."""
        return self.printed.count(b'q leave')

    def answer(self, count):
        """Press a key for each of so many questions, and do not look what becomes of the last."""
        until = time.monotonic() + PATIENCE
        while self.pressed == 0 or self.shown < count:
            assert time.monotonic() < until, self.printed
            if not select.select([self.master], [], [], 0.5)[0] and not self.shown:
                continue  # it has not started yet
            before = self.shown
            self._read()
            # What is typed before it reads the next key is dropped, so one key may not do.
            if self.shown > before or not select.select([self.master], [], [], 0.5)[0]:
                time.sleep(0.02)
                os.write(self.master, b'1')
                self.pressed += 1

    def _read(self):
        if select.select([self.master], [], [], 0)[0]:
            self.printed += os.read(self.master, 65536)

    def kill(self):
        self.process.kill()
        self.process.wait()
        os.close(self.master)


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


def fuzz(folder, count, seed):
    """Send such requests, and check that nothing was changed, served or complained of.

    Returns {status: replies}, None for no reply.
    """
    path = folder / 'fuzz'
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
    statuses = {}
    for number in range(count):
        data = fuzzer.request()
        status, reply = exchange(server.port, data)
        statuses[status] = statuses.get(status, 0) + 1
        is_allowed = status is None or 400 <= status < 500 or _is_harmless(fuzzer, status, reply)
        assert is_allowed and b'samples' not in reply, (number, data[:300], reply[:300])
    assert _answers(path) == before
    client.close()
    assert client.answer(questions[0])[0] == 200
    _, complaints = server.end()
    assert not complaints, complaints
    assert len(LabelFolder(str(path)).counted()) == 3
    shown = ', '.join(f'{status} {number}' for status, number in sorted(statuses.items(), key=str))
    print(
        f'{count} requests, seed {seed}: no answer changed, nothing served, no complaint ({shown})'
    )
    return statuses


def _is_harmless(fuzzer, status, reply):
    """Whether a request was one for the page itself, which everybody may have."""
    return status == 200 and b'<!doctype html>' in reply


def _answers(path):
    return {file.name: file.read_bytes() for file in (path / 'answers').iterdir()}
