"""Scripted labellers and the server that they ask: what the page in a browser would do."""

import atexit
import http.client
import json
import signal
import subprocess
import sys
import urllib.parse
import uuid
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 60.0  # seconds for a server to start, to answer, or to end


class Client:
    """One labeller with a link, over one connection that is kept."""

    def __init__(self, link, timeout=30):
        parts = urllib.parse.urlsplit(link)
        self.key = parts.fragment
        self.host, self.port, self.timeout = str(parts.hostname), parts.port, timeout
        self.connection = None

    def request(self, method, path, body=None, **headers):
        """(status, headers, bytes) of a reply. headers: in place of the page's; None: left out."""
        sent = {'Authorization': f'Bearer {self.key}'}
        sent |= {name.replace('_', '-'): value for name, value in headers.items()}
        sent = {name: value for name, value in sent.items() if value is not None}
        if self.connection is None:
            self.connection = http.client.HTTPConnection(self.host, self.port, timeout=self.timeout)
        try:
            self.connection.request(method, path, body, sent)
            reply = self.connection.getresponse()
            return reply.status, reply.headers, reply.read()
        except (OSError, http.client.HTTPException):
            self.close()
            raise

    def post(self, path, **fields):
        """(status, object) of the reply to an object."""
        status, _, text = self.request('POST', path, json.dumps(fields))
        return status, json.loads(text)

    def task(self):
        status, reply = self.post('/task')
        assert status == 200, reply
        return reply

    def state(self):
        """Return the question to be answered now, and the progress."""
        status, reply = self.post('/question')
        assert status == 200, reply
        return reply

    def question(self):
        """Return the question to be answered now, or None."""
        return self.state()['question']

    def answer(self, question, *choice, answer=None, seconds=1.0):
        """(status, object) of the reply to an answer, which chooses the first by default."""
        return self.post(
            '/answer',
            answer=answer or uuid.uuid4().hex,
            question=question,
            choice=choice or [1],
            seconds=seconds,
        )

    def skip(self, question, reason='other', answer=None):
        answer = answer or uuid.uuid4().hex
        return self.post('/skip', answer=answer, question=question, reason=reason, seconds=1.0)

    def undo(self, answer):
        return self.post('/undo', answer=answer)

    def close(self):
        if self.connection is not None:
            self.connection.close()
        self.connection = None


class Server:
    """`./launch.py label --web on` in a process of its own. links: {labeller: URL}."""

    def __init__(self, path, names, port=0, options=()):
        command = ['label', str(path), '--labeller', ','.join(names), *options]
        command += ['--web.port', str(port)]
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / 'launch.py'), *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        atexit.register(self.process.kill)  # where a check has failed
        assert self.process.stdout is not None and self.process.stderr is not None
        lines = [self.process.stdout.readline() for _ in names]
        if not all(lines):
            sys.exit(self.process.stderr.read())
        self.links = dict(line.split() for line in lines)
        self.port = urllib.parse.urlsplit(next(iter(self.links.values()))).port

    def end(self, number=signal.SIGTERM):
        """(what it still prints, its complaints); number: of the signal that ends it."""
        self.process.send_signal(number)
        return self.process.communicate(timeout=PATIENCE)
