"""Blobs on a server: their properties, reading, writing, deleting and listing, by blobfile.

The public account is read without credentials; every other one takes what the user has. A server
that does not answer is given up after seconds, not minutes. Every error is a StorageError of one
line that names the URL.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import hashlib
import os
import re
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from lm_human_preferences.storage.paths import (
    GOOGLE,
    PUBLIC,
    Blob,
    NotFound,
    is_offline,
    is_remote,
)

if TYPE_CHECKING:
    from blobfile import Context, Stat
    from urllib3 import PoolManager

Answer = TypeVar('Answer')

ANSWER_TIMEOUT = 8  # seconds in which a server must give its first answer, retries included
UNREACHABLE_SECONDS = 30  # for so long, a server that gave none is not asked again
MAX_CONNECTIONS = 16
RETRIES = 5
CONNECT_TIMEOUT = 5  # seconds, of one request
READ_TIMEOUT = 20  # seconds, of one request
BLOCK_SIZE = 8 << 20  # bytes of one request

# account -> (time until which it is not asked again, reason)
_unreachable: dict[str, tuple[float, str]] = {}


def stat(path: str) -> Stat:
    """Size, MD5, time and version of a remote file; asks the server even if there is a copy."""
    return stat_blob(Blob(path, for_reading=False))


def stat_blob(blob: Blob) -> Stat:
    """What the server says about a blob, or NotFound: always the first question to a server."""
    if is_offline():
        is_damaged = os.path.exists(blob.cached)
        problem = 'damaged since it was fetched' if is_damaged else 'not in the cache'
        raise blob.error(f'{problem}, and LMHP_OFFLINE=1')
    until, reason = _unreachable.get(blob.account, (0, ''))
    if time.monotonic() < until:
        raise blob.error(reason)
    with translate_errors(blob):
        try:
            return first_answer(lambda: _client(blob).stat(blob.path), blob.account)
        except FileNotFoundError:
            raise blob.error('there is no such file', NotFound) from None


def first_answer(question: Callable[[], Answer], server: str) -> Answer:
    """What `question` returns, or its error; TimeoutError if that takes ANSWER_TIMEOUT.

    One deadline covers name lookup, connection, encryption and all retries. The libraries have
    no such deadline, so the question is asked in a thread. server: for the thread's name.
    """
    answer: concurrent.futures.Future[Answer] = concurrent.futures.Future()

    def ask() -> None:
        """Hand the server's answer, or the error, to whoever waits for `answer`."""
        try:
            answer.set_result(question())
        except BaseException as e:
            answer.set_exception(e)

    threading.Thread(target=ask, name=f'asks {server}', daemon=True).start()
    return answer.result(ANSWER_TIMEOUT)


def open_for_reading(blob: Blob, stat: Stat) -> BinaryIO:
    """A blob as a binary file: the version that `stat` describes, or an error if that is gone."""
    version = None if blob.account == GOOGLE else stat.version  # blobfile has that for Azure only
    return _client(blob).BlobFile(blob.path, 'rb', file_size=stat.size, version=version)


def check_access(path: str) -> None:
    """StorageError if credentials to write a remote file are missing here.

    The server may still refuse: it is not asked.
    """
    with _writing(path):
        pass


def write(path: str, source: BinaryIO, size: int) -> tuple[int, str]:
    """Make a remote file of the next `size` bytes of `source`: all of it appears, or nothing.

    Returns (its size, its MD5 in hexadecimal), after a comparison with what has arrived; blobfile
    compares each block as well.
    """
    digest = hashlib.md5(usedforsecurity=False)
    with _writing(path) as (blob, client):
        target = client.BlobFile(blob.path, 'wb', streaming=True, partial_writes_on_exc=False)
        with _abandon_on_error(target), target:
            while target.tell() < size:
                block = source.read(min(BLOCK_SIZE, size - target.tell()))
                if not block:
                    break
                digest.update(block)
                target.write(block)
            sent = target.tell(), digest.hexdigest()
        arrived = client.stat(blob.path)
        if (arrived.size, arrived.md5) != sent:
            raise blob.error(
                f'damaged on the way, {arrived.size} of {sent[0]} bytes and MD5 {arrived.md5}'
            )
    return sent


def remove(path: str) -> None:
    """Delete a file, local or remote, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        if not is_remote(path):
            os.remove(path)
            return
        with _writing(path) as (blob, client), contextlib.suppress(FileNotFoundError):
            client.remove(blob.path)


def listing(directory: str) -> dict[str, tuple[int, str | None]]:
    """{relative path: (size, MD5 or None)} of all files below a remote directory."""
    files = {}
    with _writing(directory) as (blob, client):
        for entry in client.scanglob(f'{blob.path}/**'):
            if entry.is_file:
                assert entry.stat is not None
                name = entry.path.removeprefix(f'{blob.path}/')
                files[name] = (entry.stat.size, entry.stat.md5)
    return files


@contextlib.contextmanager
def _writing(path: str) -> Iterator[tuple[Blob, Context]]:
    """(a blob, its client) for what the user needs credentials for; StorageError without them."""
    blob = Blob(path.rstrip('/'), for_reading=False)
    if is_offline():
        raise blob.error('LMHP_OFFLINE=1, so nothing can be stored there')
    with translate_errors(blob):
        if blob.account != GOOGLE and not _has_credentials():
            raise blob.error(
                'no credentials to write there: run `az login`, or set AZURE_STORAGE_KEY'
            )
        yield blob, _client(blob)


@contextlib.contextmanager
def _abandon_on_error(target: BinaryIO) -> Iterator[None]:
    """On an error, close `target`, a remote file that is being written, without another upload.

    After close() failed to upload, the file is still open, and Python calls close() once more when
    it collects the file: at any time, in any thread. That would overwrite what is there by then,
    and it deadlocks in a thread that holds blobfile's lock.
    """
    try:
        yield
    except BaseException:
        _discard_buffer(target)
        target.close()
        raise


@contextlib.contextmanager
def translate_errors(blob: Blob) -> Iterator[None]:
    """Raise the libraries' errors about a blob as StorageErrors; remember a silent server."""
    import blobfile
    import urllib3

    try:
        yield
    except (OSError, KeyError, RuntimeError, blobfile.Error, urllib3.exceptions.HTTPError) as e:
        if type(e) is TimeoutError:
            reason = f'no answer within {ANSWER_TIMEOUT} s, is there a network?'
        elif type(e) is KeyError:
            reason = 'the answer is not from a blob store (a log-in page of the network?)'
        else:
            message = getattr(e, 'message', str(e))
            reason = re.sub(r'^request failed with exception (\w+\(.*?\): )?', '', message)
        if type(e) is TimeoutError or getattr(e, 'response_status', None) == 0:
            _unreachable[blob.account] = (time.monotonic() + UNREACHABLE_SECONDS, reason)
        raise blob.error(reason) from e


def _client(blob: Blob) -> Context:
    """The client for a blob's container in this process: connections do not survive a fork."""
    return _make_client(blob.account, blob.container, os.getpid())


@functools.lru_cache
def _make_client(account: str, container: str, pid: int) -> Context:
    """blobfile with none of its defaults.

    By itself it would retry for ever, ignore proxies, and send the user's own credentials even to
    the public account, which refuses them.
    """
    import blobfile

    if account == PUBLIC or (account != GOOGLE and not _has_credentials()):
        _use_anonymous_access(account, container)
    host = 'storage.googleapis.com' if account == GOOGLE else f'{account}.blob.core.windows.net'
    pool = _connection_pool(host)
    return blobfile.create_context(
        retry_limit=RETRIES,
        connect_timeout=CONNECT_TIMEOUT,
        read_timeout=READ_TIMEOUT,
        get_http_pool=lambda: pool,
        default_buffer_size=BLOCK_SIZE,
        log_callback=lambda text: None,
        save_access_token_to_disk=False,
    )


def _connection_pool(host: str) -> PoolManager:
    """Connections to `host`, through the proxy that the environment names, if any."""
    from urllib.request import getproxies, proxy_bypass

    import urllib3.util

    proxy = getproxies().get('https')
    if not proxy or proxy_bypass(host):
        return urllib3.PoolManager(maxsize=MAX_CONNECTIONS)
    login = urllib.parse.unquote(urllib3.util.parse_url(proxy).auth or '') or None
    headers = urllib3.make_headers(proxy_basic_auth=login)
    return urllib3.ProxyManager(proxy, proxy_headers=headers, maxsize=MAX_CONNECTIONS)


# --- What blobfile has no public name for: tests/unit/test_storage.py tells which has gone. ---


def _has_credentials() -> bool:
    """Whether blobfile finds credentials for Azure in the environment or in the files of `az`."""
    from blobfile import _azure

    return bool(_azure._load_credentials())


def _use_anonymous_access(account: str, container: str) -> None:
    """Have blobfile read a container of Azure without credentials, for which it has no option.

    A token that never expires also spares the listing by which blobfile finds out whether a
    container is public, and which public containers need not allow.
    """
    from blobfile import _azure

    manager: Any = _azure.access_token_manager
    manager._tokens[account, container] = (_azure.ANONYMOUS, '')
    manager._expirations[account, container] = float('inf')


def _discard_buffer(target: Any) -> None:
    """Have close() of a blobfile that is being written upload nothing."""
    target.had_exception = True
