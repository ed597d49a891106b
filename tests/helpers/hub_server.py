"""A loopback imitation of the Hugging Face hub: models and data sets, their commits, and faults."""

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import huggingface_hub
import pytest
from huggingface_hub import constants

from lm_human_preferences.storage import hub

API = re.compile(r'/api/(models/|datasets/)([^/]+/[^/]+)/(revision|tree)/(.+)')
FILE = re.compile(r'/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)')


def commit_of(files):
    return hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()


def files_in(directory):
    files = (path for path in Path(directory).rglob('*') if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


class HubServer(ThreadingHTTPServer):
    """holds: {'org/name' or 'datasets/org/name': {revision: {file: bytes}}}. log: 'METHOD path'."""

    daemon_threads = True

    def __init__(self):
        super().__init__(('127.0.0.1', 0), Handler)
        self.holds, self.gated, self.log = {}, set(), []
        self.status = None
        self.url = f'http://127.0.0.1:{self.server_port}'

    def requests(self, text):
        return sum(text in line for line in self.log)


class Handler(BaseHTTPRequestHandler):
    server: HubServer

    def log_message(self, *args):
        """Nothing on the screen of the tests."""

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        self.server.log.append(f'{self.command} {path}')
        api, file = API.fullmatch(path), FILE.fullmatch(path)
        if not (api or file):
            return self.refuse(404, '')
        if api:
            repository, revision = api[1].replace('models/', '') + api[2], api[4]
        else:
            repository, revision = (file[1] or '') + file[2], file[3]
        revisions = self.server.holds.get(repository)
        if self.server.status:
            return self.refuse(self.server.status, '')
        if revisions is None:
            return self.refuse(401, 'RepoNotFound')
        if repository in self.server.gated and file:
            return self.refuse(403, 'GatedRepo')
        files = revisions.get(revision) or next(
            (files for files in revisions.values() if commit_of(files) == revision), None
        )
        if files is None:
            return self.refuse(404, 'RevisionNotFound')
        self.commit = commit_of(files)
        if file:
            if file[4] not in files:
                return self.refuse(404, 'EntryNotFound')
            return self.send(files[file[4]])
        if api[3] == 'revision':
            content = {'id': api[2], 'sha': self.commit, 'siblings': []}
            return self.send(json.dumps(content).encode())
        entries = [
            {'type': 'file', 'path': name, 'size': len(data), 'oid': hashlib.sha1(data).hexdigest()}
            for name, data in files.items()
        ]
        return self.send(json.dumps(entries).encode())

    do_HEAD = do_GET

    def refuse(self, status, code):
        self.send_response(status)
        self.send_header('X-Error-Code', code)
        if code == 'EntryNotFound':
            self.send_header('X-Repo-Commit', self.commit)
        self.send_header('Content-Length', '0')
        self.end_headers()

    def send(self, data):
        self.send_response(200)
        self.send_header('ETag', f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header('X-Repo-Commit', self.commit)
        self.send_header('Content-Length', str(len(data)))
        self.end_headers()
        if self.command == 'GET':
            self.wfile.write(data)


def forget():
    hub.fetched.cache_clear()
    hub.hub_problem.cache_clear()


@pytest.fixture
def hub_server(tmp_path, monkeypatch):
    """A hub for this process, and for children with its environment, and an empty cache."""
    for name in ('HF_TOKEN', 'HF_HUB_OFFLINE', 'LMHP_OFFLINE'):
        monkeypatch.delenv(name, raising=False)
    with HubServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={'poll_interval': 0.01})
        thread.start()
        home = tmp_path / 'hub-home'
        monkeypatch.setenv('HF_ENDPOINT', server.url)
        monkeypatch.setenv('HF_HOME', str(home))
        monkeypatch.setattr(constants, 'ENDPOINT', server.url)
        template = server.url + '/{repo_id}/resolve/{revision}/{filename}'
        monkeypatch.setattr(constants, 'HUGGINGFACE_CO_URL_TEMPLATE', template)
        monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(home / 'hub'))
        forget()
        yield server
        forget()
        huggingface_hub.close_session()
        server.shutdown()
        thread.join()
