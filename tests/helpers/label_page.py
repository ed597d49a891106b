"""Pages for labellers that tests serve, with texts of their own."""

import contextlib
import threading
import uuid
from pathlib import Path

from label_folders import HEADER, TASK, fix_key
from page_client import Client, insist

from lm_human_preferences.hparams.labelling_options import LabelHParams, WebHParams
from lm_human_preferences.labels.folder import LabelFolder, QuestionWriter
from lm_human_preferences.labels.page.server import LabelServer


class ByteEncoder:
    """An encoding in which any text can be shown: a token is a byte of UTF-8."""

    padding_token = 256

    def decode(self, tokens):
        return bytes(tokens).decode()


def write_texts(path, texts, label_type='best_of_4', **header):
    """A folder whose questions are texts: each (query, sample, ...); see ByteEncoder.

    Its key is always the same, so that the order on the screen is.
    """
    samples = len(texts[0]) - 1
    names = ['sample'] if samples == 1 else [f'sample{i}' for i in range(samples)]
    task = {**TASK, 'label_type': label_type}
    header = {**HEADER, 'policies': ['initial'] * samples, **header}
    questions = [
        dict(zip(['query', *names], (list(text.encode()) for text in row), strict=True))
        for row in texts
    ]
    with QuestionWriter(str(path), task) as writer:
        writer.add(questions, [header] * len(texts))
    fix_key(path)


def web_options(**options):
    """Those of `label --web`, by default with a port that is free."""
    return LabelHParams(web=WebHParams(**{'port': 0, **options})).web


@contextlib.contextmanager
def served(path, *names, notes=None, **options):
    """The server of a folder's page, and a signed-in client for each labeller; notes: a list that
    gets what is said to who started it."""
    note = (lambda line: None) if notes is None else notes.append
    with LabelServer(str(path), names, web_options(**options), note=note) as server:
        server.service.encoder = ByteEncoder()
        clients = [Client(link) for link in server.links.values()]
        try:
            yield server, *clients
        finally:
            for client in clients:
                client.close()


def written(path):
    """All lines of all files of answers."""
    files = sorted(Path(path, 'answers').glob('*.jsonl'))
    return [line for file in files for line in file.read_text().splitlines()]


def answers_of(path, name):
    """The answers, and skips, of a labeller that were not taken back, the oldest first."""
    log = LabelFolder(str(path)).logs[name]
    return [answer for answer in log.uuids.values() if not log.is_taken_back(answer)]


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
