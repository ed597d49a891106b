"""Blobs of Azure and Google, by blobfile; errors are StorageErrors of one line with the URL."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import io
import os
import re
import shutil
import threading
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
    join,
)

if TYPE_CHECKING:
    from blobfile import Context, Stat
    from urllib3 import PoolManager

Answer = TypeVar('Answer')

ANSWER_TIMEOUT = 8  # seconds in which a server must give its first answer, retries included
MAX_CONNECTIONS = 16
RETRIES = 5
CONNECT_TIMEOUT = 5  # seconds, of one request
READ_TIMEOUT = 20  # seconds, of one request
BLOCK_SIZE = 8 << 20  # bytes of one request


def stat(path: str) -> Stat:
    """Ask the server for size, MD5, time and version of a file."""
    return stat_blob(Blob(path, for_reading=False))


def stat_blob(blob: Blob) -> Stat:
    """Ask a server about a blob, before any other question; NotFound if there is none."""
    if is_offline():
        raise blob.error('not in the cache, and LMHP_OFFLINE=1')
    with translate_errors(blob):
        try:
            return first_answer(lambda: _client(blob).stat(blob.path), blob.account)
        except FileNotFoundError:
            raise blob.error('no such file', NotFound) from None


def first_answer(question: Callable[[], Answer], server: str) -> Answer:
    """Return the result of `question`; TimeoutError if it takes longer than ANSWER_TIMEOUT.

    The library's own timeouts leave out the look-up of the server's name.
    """
    answer: concurrent.futures.Future[Answer] = concurrent.futures.Future()

    def ask() -> None:
        """Hand the answer, or the error, to the thread that waits for it."""
        try:
            answer.set_result(question())
        except BaseException as e:
            answer.set_exception(e)

    threading.Thread(target=ask, name=f'asks {server}', daemon=True).start()
    return answer.result(ANSWER_TIMEOUT)


def open_for_reading(blob: Blob, stat: Stat) -> BinaryIO:
    """Open the version of a blob that `stat` describes."""
    version = None if blob.account == GOOGLE else stat.version  # blobfile has that for Azure only
    return _client(blob).BlobFile(blob.path, 'rb', file_size=stat.size, version=version)


def check_access(path: str) -> None:
    """Write and delete an empty file at `path`; StorageError if that is not allowed."""
    write(path, io.BytesIO())
    remove(path)


def write(path: str, source: BinaryIO) -> None:
    """Upload what can be read from `source`, or nothing."""
    with _writing(path) as (blob, client):
        target: Any = client.BlobFile(blob.path, 'wb', streaming=True, partial_writes_on_exc=False)
        try:
            shutil.copyfileobj(source, target, BLOCK_SIZE)
            target.close()
        except BaseException:
            target.had_exception = True  # else the garbage collector would upload it, at any time
            target.close()
            raise


def remove(path: str) -> None:
    """Delete a local or remote file, if it exists."""
    with contextlib.suppress(FileNotFoundError):
        if not is_remote(path):
            os.remove(path)
            return
        with _writing(path) as (blob, client), contextlib.suppress(FileNotFoundError):
            client.remove(blob.path)


def listing(directory: str) -> dict[str, tuple[int, str | None]]:
    """Return {relative path: (size, MD5 or None)} of all files below a remote directory."""
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
    """Yield (blob, client) for an operation on a directory of the user's own."""
    blob = Blob(join(path), for_reading=False)
    if is_offline():
        raise blob.error('LMHP_OFFLINE=1, so nothing can be stored there')
    with translate_errors(blob):
        yield blob, _client(blob)


@contextlib.contextmanager
def translate_errors(blob: Blob) -> Iterator[None]:
    """Raise errors of blobfile and urllib3 as StorageErrors."""
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
        raise blob.error(reason) from e


def _client(blob: Blob) -> Context:
    """Return the client for a blob's container; connections do not survive a fork."""
    return _make_client(blob.account, blob.container, os.getpid())


@functools.lru_cache
def _make_client(account: str, container: str, pid: int) -> Context:
    """Make a client with limited retries, proxies, and no credentials for the public account."""
    import blobfile

    if account == PUBLIC:
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
    """Return connections to `host`, through the proxy in the environment, if any."""
    from urllib.request import getproxies, proxy_bypass

    import urllib3.util

    proxy = getproxies().get('https')
    if not proxy or proxy_bypass(host):
        return urllib3.PoolManager(maxsize=MAX_CONNECTIONS)
    login = urllib3.util.parse_url(proxy).auth
    headers = urllib3.make_headers(proxy_basic_auth=urllib.parse.unquote(login) if login else None)
    return urllib3.ProxyManager(proxy, proxy_headers=headers, maxsize=MAX_CONNECTIONS)


def _use_anonymous_access(account: str, container: str) -> None:
    """Have blobfile read a container of Azure without the user's credentials.

    It has no option for that, so names of its own are used; tests/unit/test_storage.py checks them.
    """
    from blobfile import _azure

    manager: Any = _azure.access_token_manager
    manager._tokens[account, container] = (_azure.ANONYMOUS, '')
    manager._expirations[account, container] = float('inf')
