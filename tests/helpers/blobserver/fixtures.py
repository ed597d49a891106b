"""Fixtures around the server, for all tests: conftest.py loads this module as a plugin."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from blobfile import _azure

from blobserver.server import SUFFIX, BlobServer, redirect
from lm_human_preferences import storage

KEY = 'c2VjcmV0'  # of the account `private`
HERE = os.path.dirname(os.path.abspath(__file__))


@pytest.fixture(scope='session')
def certificate(tmp_path_factory):
    """PEM file of a certificate for this host, the storage's names and a page's, and its key."""
    if not shutil.which('openssl'):
        pytest.skip('no openssl to make a certificate for the loopback server with')
    folder = tmp_path_factory.mktemp('certificate')
    command = 'openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2'
    names = [
        '-subj',
        '/CN=loopback blob test',
        '-addext',
        f'subjectAltName=DNS:*{SUFFIX},DNS:localhost,DNS:label.example.org',
    ]
    files = ['-keyout', folder / 'key.pem', '-out', folder / 'cert.pem']
    subprocess.run([*command.split(), *names, *files], check=True, capture_output=True)
    both = folder / 'both.pem'
    both.write_bytes((folder / 'cert.pem').read_bytes() + (folder / 'key.pem').read_bytes())
    return str(both)


@pytest.fixture
def blobs():
    return {
        'openaipublic/lm-human-preferences': {
            'labels/a.json': b'[1]',
            'big': os.urandom(5 << 20),
            **{f'd/{i:03d}.story': b'x%d' % i for i in range(40)},
        },
        'openaipublic/gpt-2': {'encodings/main/encoder.json': b'{}'},
        'private/runs': {},
    }


@pytest.fixture
def cache(tmp_path, monkeypatch):
    for name in list(os.environ):
        if name.startswith('AZURE_') or name.lower().endswith('_proxy') or name == 'LMHP_OFFLINE':
            monkeypatch.delenv(name)
    monkeypatch.setenv('HOME', str(tmp_path / 'home'))
    monkeypatch.setenv('LMHP_CACHE', str(tmp_path / 'cache'))
    yield str(tmp_path / 'cache')
    storage.blobs._make_client.cache_clear()
    _azure.access_token_manager._expirations.clear()


@pytest.fixture
def server(blobs, certificate, cache):
    """Public storage of this process and of children that are started with `server.env`."""
    with BlobServer(blobs, certificate=certificate, private=['private']) as s, redirect(s):
        path = os.pathsep.join([HERE, str(Path(HERE).parents[2])])
        s.env = {**os.environ, 'PYTHONPATH': path}
        yield s
