"""storage against a loopback imitation of the public store: names, the cache, failures."""

import gc
import hashlib
import io
import os
import signal
import subprocess
import sys
import time

import pytest
from blobserver.fixtures import KEY
from blobserver.server import BlackHole, Fault, redirect
from launched import eventually

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError

BASE = 'az://openaipublic/lm-human-preferences'
URL = 'https://openaipublic.blob.core.windows.net/lm-human-preferences'
CONTAINER = 'openaipublic/lm-human-preferences'


def contents(path):
    with open(path, 'rb') as file:
        return file.read()


def files(root):
    return sorted(os.path.join(base, name) for base, _, names in os.walk(root) for name in names)


def child(server, url):
    """A process that prints the digest of what it fetches."""
    code = 'import hashlib, sys; from lm_human_preferences import storage; '
    code += 'print(hashlib.md5(open(storage.cached_path(sys.argv[1]), "rb").read()).hexdigest())'
    words = [sys.executable, '-c', code, url]
    return subprocess.Popen(words, env=server.env, stdout=subprocess.PIPE, text=True)


def failure(path=BASE + '/big', kind=storage.StorageError):
    with pytest.raises(kind) as e:
        storage.cached_path(path)
    assert '\n' not in str(e.value)
    return str(e.value)


def test_spellings_share_one_copy_at_the_documented_place(server, cache):
    spellings = [
        BASE + '/labels/a.json',
        'gs://lm-human-preferences/labels/a.json',
        URL + '/labels/a.json',
        URL + '/labels%2fa.json',
        'https://storage.googleapis.com/lm-human-preferences/labels%2fa.json',
    ]
    place = os.path.join(cache, CONTAINER, 'labels', 'a.json')
    assert [storage.cached_path(url) for url in spellings] == [place] * 5
    assert contents(place) == b'[1]' and files(cache) == [place] and server.count('GET') == 1


@pytest.mark.parametrize(
    'path',
    [
        f'{URL}/%2e%2e/x',
        f'{BASE}/a\\..\\x',
        f'{BASE}/x.part',
        's3://a/b',
        'https://openaipublic.blob.core.windows.net.evil.org/a/b',
    ],
)
def test_unusable_names(cache, path):
    assert 'give a local path, az://ACCOUNT/CONTAINER/NAME' in failure(path)
    assert not files(cache)


def test_local_paths(tmp_path):
    path = storage.join(str(tmp_path), 'a', 'b.txt')
    assert path == str(tmp_path / 'a' / 'b.txt')
    assert not storage.is_remote(path)
    assert not storage.exists(path)
    assert failure(path, storage.NotFound) == f'{path}: no such file or directory'
    (tmp_path / 'a').mkdir()
    (tmp_path / 'a' / 'b.txt').write_bytes('é\r\n'.encode())
    assert storage.exists(path)
    assert storage.exists(str(tmp_path))
    assert storage.cached_path(path) == path
    assert storage.cached_paths([path]) == [path]
    assert storage.read_text(path) == 'é\n'


def test_lines_are_read_up_to_one_that_a_kill_tore(tmp_path):
    """Even within a character. Only \\n ends a line, whatever else JSON holds."""
    path = tmp_path / 'lines.jsonl'
    path.write_bytes('["a\u2028b"]\n3\n"ä'.encode()[:-1])
    whole = storage.read_whole_lines(str(path))
    assert whole == '["a\u2028b"]\n3\n'
    assert [value for _, value in storage.parse_json_lines(whole, 'x')] == [['a\u2028b'], 3]


def test_files_are_for_those_whom_the_umask_lets(tmp_path):
    before = os.umask(0o020)
    try:
        storage.write_bytes(str(tmp_path / 'file'), b'')
    finally:
        os.umask(before)
    assert (tmp_path / 'file').stat().st_mode & 0o777 == 0o646


def test_exists_asks_and_does_not_fetch(server, cache):
    assert storage.exists(BASE + '/big') and not storage.exists(BASE + '/bigger')
    assert not files(cache) and server.count('GET') == 0
    failure(BASE + '/bigger', storage.NotFound)


@pytest.mark.parametrize('path', ['az://bucket/run', 'gs:/bucket/run', 'az://'])
def test_a_url_without_its_bucket_is_no_folder(path):
    """As with an empty variable in --save_dir az://$ACCOUNT/runs."""
    assert storage.is_remote(path)
    with pytest.raises(UserError, match='give a local path, az://'):
        storage.staging_dir(path)
    with pytest.raises(UserError):
        storage.check_new_file(path)
    with pytest.raises(UserError, match='is remote'):
        storage.check_output_dir(path)


def test_offline(server, cache, monkeypatch):
    storage.cached_path(BASE + '/big')
    monkeypatch.setenv('LMHP_OFFLINE', '1')
    before = len(server.log)
    assert storage.exists(BASE + '/big') and storage.cached_path(BASE + '/big')
    assert not storage.exists(BASE + '/labels/a.json')
    place = os.path.join(cache, CONTAINER, 'labels', 'a.json')
    told = failure(BASE + '/labels/a.json')
    assert told.endswith('LMHP_OFFLINE=1 allows only what is in the cache')
    assert len(server.log) == before
    os.makedirs(os.path.dirname(place))
    with open(place, 'w', encoding='utf-8') as file:
        file.write('[2]')
    assert storage.read_json('gs://lm-human-preferences/labels/a.json') == [2]


def test_a_file_that_may_change_is_fetched_again_when_it_has(server, cache, monkeypatch):
    monkeypatch.setenv('AZURE_STORAGE_KEY', KEY)
    for content in (b'old', b'new'):
        storage.write('az://private/runs/file', io.BytesIO(content))
        for _ in range(2):
            assert contents(storage.cached_path('az://private/runs/file')) == content
    assert server.count('GET', 'runs/file$') == 2


def test_many_files_at_once(server, cache, capsys):
    urls = [f'{BASE}/d/{i:03d}.story' for i in range(40)]
    storage.cached_path(urls[3])
    assert [*map(contents, storage.cached_paths(urls))] == [b'x%d' % i for i in range(40)]
    assert server.count('GET') == 40 and len(files(cache)) == 40
    assert capsys.readouterr().err == f'fetching {BASE}/d/000.story ...\n'
    with pytest.raises(storage.NotFound, match='d/999.story'):
        storage.cached_paths([*urls, BASE + '/d/999.story'])


def test_a_large_file_is_not_fetched_in_silence(server, blobs, capsys):
    blobs['openaipublic/lm-human-preferences'].update(short=bytes(1 << 19))
    storage.cached_path(BASE + '/big')
    storage.cached_path(BASE + '/short')
    assert capsys.readouterr().err == f'fetching {BASE}/big, 5 MiB\n'


def test_one_download_for_many_processes(server, cache, blobs):
    server.faults.append(Fault('slow', 0.01, times=None, method='GET'))
    children = [child(server, BASE + '/big') for _ in range(2)]
    expected = hashlib.md5(blobs[CONTAINER]['big']).hexdigest()
    assert {c.communicate()[0].strip() for c in children} == {expected}
    assert server.count('GET') == 1 and files(cache) == [os.path.join(cache, CONTAINER, 'big')]


def test_a_killed_download_starts_again(server, cache, blobs):
    server.faults.append(Fault('slow', 0.05, times=None, method='GET'))
    first = child(server, BASE + '/big')
    eventually(lambda: any(name.endswith('.part') for name in files(cache)), 120)
    second = child(server, BASE + '/big')
    eventually(lambda: server.count('HEAD', 'big') == 2, 120)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    server.faults.clear()
    assert second.communicate()[0].strip() == hashlib.md5(blobs[CONTAINER]['big']).hexdigest()
    assert files(cache) == [os.path.join(cache, CONTAINER, 'big')]


@pytest.mark.parametrize(
    'fault',
    [Fault('status', 503, times=2), Fault('truncate', 1000, times=2, method='GET')],
    ids=lambda fault: fault.kind,
)
def test_passing_trouble_is_survived(server, blobs, fault):
    server.faults.append(fault)
    assert contents(storage.cached_path(BASE + '/big')) == blobs[CONTAINER]['big']
    assert fault.hits == fault.times


@pytest.mark.parametrize(
    'fault, expected',
    [
        (Fault('corrupt', 9, method='GET'), 'damaged on the way'),
        (Fault('status', 503, times=None), 'status 503'),
        (Fault('stall', 1, times=None), 'Read timed out'),
    ],
    ids=lambda x: f'{x.kind}{x.arg} {x.method}' if isinstance(x, Fault) else '',
)
def test_lasting_trouble_ends(server, cache, monkeypatch, fault, expected):
    monkeypatch.setattr(storage.blobs, 'READ_TIMEOUT', 0.2 if fault.kind == 'stall' else 20)
    monkeypatch.setattr(storage.blobs, 'RETRIES', 2)
    server.faults.append(fault)
    start = time.monotonic()
    message = failure()
    assert message.startswith(BASE + '/big: ') and expected in message
    assert not files(cache)
    assert len(server.log) <= 2 * storage.blobs.RETRIES + 3 and time.monotonic() - start < 20


@pytest.mark.parametrize('fault', ['comp=block&', 'comp=blocklist'])
def test_an_upload_that_failed_is_not_made_later(server, blobs, monkeypatch, fault):
    """blobfile's file objects would try once more when the garbage collector finds them."""
    monkeypatch.setenv('AZURE_STORAGE_KEY', KEY)
    server.faults.append(Fault('status', 403, times=None, method='PUT', path=fault))
    with pytest.raises(storage.StorageError, match='unexpected status 403') as error:
        storage.write('az://private/runs/old', io.BytesIO(b'old'))
    assert server.count('PUT')
    server.faults.clear()
    server.log.clear()
    del error
    gc.collect()
    assert not server.log and not blobs['private/runs']


def test_a_server_without_md5(server):
    server.with_md5 = False
    assert contents(storage.cached_path(BASE + '/labels/a.json')) == b'[1]'
    with storage.blobs._connected(BASE + '/labels/a.json') as (blob, client):
        longer = client.stat(blob.path)._replace(size=4)
        with pytest.raises(storage.StorageError, match='damaged on the way: 3 of 4 bytes'):
            storage.blobs._download(blob, client, longer)


def test_unwritable_cache(server, tmp_path, monkeypatch):
    (tmp_path / 'file').write_text('')
    monkeypatch.setenv('LMHP_CACHE', str(tmp_path / 'file'))
    assert 'Not a directory' in failure()


def test_own_credentials_stay_at_home(server, monkeypatch):
    monkeypatch.setenv('AZURE_STORAGE_KEY', 'c2VjcmV0')
    assert contents(storage.cached_path(BASE + '/labels/a.json')) == b'[1]'
    first, *others = server.log  # the first asks whether there is a network
    assert first.path == '/lm-human-preferences' and {r.status for r in others} == {200, 206}
    assert not os.path.exists(os.path.expanduser('~/.blobfile'))


def test_a_network_that_does_not_answer_is_told_within_seconds(cache):
    began = time.monotonic()
    with BlackHole() as hole, redirect(hole):
        assert 'timed out' in failure()
    assert time.monotonic() - began < 2 * storage.blobs.CONNECT_TIMEOUT


def test_a_proxy_is_used(cache, monkeypatch):
    monkeypatch.setenv('HTTPS_PROXY', 'http://127.0.0.1:9')
    monkeypatch.setattr(storage.blobs, 'RETRIES', 0)
    with redirect(None):  # without the proxy, this would be about the name
        assert 'Unable to connect to proxy' in failure()


def test_no_names_resolve(cache):
    start = time.monotonic()
    with redirect(None):
        message = failure()
    assert message.startswith(f'{BASE}/big: ')
    assert "Failed to resolve 'openaipublic.blob.core.windows.net'" in message
    assert time.monotonic() - start < 8
