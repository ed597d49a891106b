"""A scripted labeller: what the page in a browser asks of its server. Tests use it, too."""

import http.client
import json
import ssl
import time
import urllib.parse
import uuid


class Client:
    """One labeller with a link, over one connection that is kept.

    signed_in: whether to exchange the link for a cookie at once.
    """

    def __init__(self, link, signed_in=True, timeout=30, certificate=None):
        parts = urllib.parse.urlsplit(link)
        self.origin = f'{parts.scheme}://{parts.netloc}'
        self.token = parts.fragment
        self.host, self.port, self.timeout = parts.hostname, parts.port, timeout
        self.context = certificate and ssl.create_default_context(cafile=certificate)
        self.connection = None
        self.cookie = self.name = None
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
        sent = {'Cookie': self.cookie}
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
        """Exchange the link for a cookie, as the page does when it is opened."""
        status, headers, text = self.request('POST', '/session', json.dumps({'token': self.token}))
        assert status == 200, text
        self.cookie = headers['Set-Cookie'].partition(';')[0]
        self.name = json.loads(text)['labeller']

    def task(self):
        """What the page shows besides questions."""
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


def insist(call, seconds=60):
    """What `call` returns, once the server is there: the page, too, sends what it has again."""
    until = time.monotonic() + seconds
    while True:
        try:
            return call()
        except (OSError, http.client.HTTPException):
            if time.monotonic() > until:
                raise
            time.sleep(0.02)
