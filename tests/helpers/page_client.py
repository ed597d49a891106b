"""Scripted labellers and the server that they ask: what the page in a browser would do."""

import atexit
import http.client
import json
import re
import signal
import ssl
import subprocess
import sys
import urllib.parse
import uuid
from pathlib import Path

from lm_human_preferences.labels.page.key import QuestionTokens, folder_key

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 60.0  # seconds for a server to start, to answer, or to end


class Client:
    """One labeller with a link, over one connection that is kept.

    signed_in: whether to exchange the link for a cookie at once.
    """

    def __init__(self, link, signed_in=True, timeout=30, certificate=None):
        parts = urllib.parse.urlsplit(link)
        self.origin = f'{parts.scheme}://{parts.netloc}'
        self.token = parts.fragment
        self.host, self.port, self.timeout = str(parts.hostname), parts.port, timeout
        self.context = None
        if certificate:
            self.context = ssl.create_default_context(cafile=certificate)
        self.connection = None
        self.cookie = self.name = self.proof = None
        if signed_in:
            self.sign_in()

    def _connect(self):
        if self.context:
            return http.client.HTTPSConnection(
                self.host, self.port, timeout=self.timeout, context=self.context
            )
        return http.client.HTTPConnection(self.host, self.port, timeout=self.timeout)

    def request(self, method, path, body=None, **headers):
        """(status, headers, bytes) of a reply. headers: instead of those that the page sends; None
        leaves one out."""
        sent = {'Cookie': self.cookie, 'Labelling-Proof': self.proof}
        if method == 'POST':
            sent |= {'Origin': self.origin, 'Content-Type': 'application/json'}
        sent |= {name.replace('_', '-'): value for name, value in headers.items()}
        sent = {name: value for name, value in sent.items() if value is not None}
        if self.connection is None:
            self.connection = self._connect()
        try:
            self.connection.request(method, path, body, sent)
            reply = self.connection.getresponse()
            return reply.status, reply.headers, reply.read()
        except (OSError, http.client.HTTPException):
            self.close()
            raise

    def post(self, path, **fields):
        """(status, object) of the reply to an object."""
        body = json.dumps({'labeller': self.name, **fields})
        status, _, text = self.request('POST', path, body)
        return status, json.loads(text)

    def sign_in(self):
        """Exchange the link for a cookie and a proof, as the page does when it is opened."""
        status, headers, text = self.request('POST', '/session', json.dumps({'token': self.token}))
        assert status == 200, text
        self.cookie = headers['Set-Cookie'].partition(';')[0]
        self.name, self.proof = (json.loads(text)[field] for field in ('labeller', 'proof'))

    def task(self):
        """Return the page's content besides questions."""
        status, _, text = self.request('GET', '/task')
        assert status == 200, text
        return json.loads(text)

    def questions(self, held=(), count=3):
        """More questions."""
        status, reply = self.post('/questions', held=list(held), count=count)
        assert status == 200, reply
        return reply['questions']

    def answer(self, question, choice=1, answer=None, seconds=1.0):
        """(status, object) of the reply to an answer."""
        answer = answer or str(uuid.uuid4())
        return self.post(
            '/answer', answer=answer, question=question, choice=choice, seconds=seconds
        )

    def skip(self, question, reason='other', answer=None):
        """(status, object) of the reply to a skip."""
        answer = answer or str(uuid.uuid4())
        return self.post('/skip', answer=answer, question=question, reason=reason, seconds=1.0)

    def undo(self, answer):
        """(status, object) of the reply to an undo."""
        return self.post('/undo', answer=answer)

    def close(self):
        """Close the connection; the next request makes another."""
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

    def peak_megabytes(self):
        """The most memory that the process has had."""
        status = Path(f'/proc/{self.process.pid}/status').read_text()
        (kilobytes,) = re.findall(r'VmHWM:\s*(\d+)', status)
        return int(kilobytes) / 1024

    def end(self, number=signal.SIGTERM):
        """(what it still prints, its complaints); number: of the signal that ends it."""
        self.process.send_signal(number)
        return self.process.communicate(timeout=PATIENCE)


def id_of_token(folder, token):
    """The id of a question of a LabelFolder, by what the browser calls it."""
    return QuestionTokens(folder_key(folder.path)).id(token, folder.questions)
