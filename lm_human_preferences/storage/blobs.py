"""Azure and Google blobs, through blobfile; errors are StorageErrors of one line with the URL."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import os
import re
import shutil
import sys
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from lm_human_preferences.storage.files import atomic_write, md5
from lm_human_preferences.storage.paths import (
    GOOGLE,
    PUBLIC,
    Blob,
    NotFound,
    is_offline,
    is_remote,
    join,
    make_cache_folder,
)

if TYPE_CHECKING:
    from blobfile import Context, Stat
    from urllib3 import PoolManager

Answer = TypeVar('Answer')

ANSWER_TIMEOUT = 8  # seconds until the first answer of a server, retries included
MAX_CONNECTIONS = 16
RETRIES = 5
CONNECT_TIMEOUT = 5  # seconds for each request
READ_TIMEOUT = 20  # seconds for each request
BLOCK_SIZE = 8 << 20  # bytes in each request
NO_PROGRESS_BELOW = 1 << 16  # bytes; for smaller files, a bar would be gone at once


def stat(path: str) -> Stat:
    """Ask the server for size, MD5, time and version of a file; NotFound if there is none."""
    with _connected(path) as (blob, client):
        return first_answer(lambda: client.stat(blob.path), blob.account)


def first_answer(question: Callable[[], Answer], server: str) -> Answer:
    """Return the result of `question`; TimeoutError if it takes longer than ANSWER_TIMEOUT.

    The libraries' own timeouts do not include the look-up of the server's name.
    """
    answer: concurrent.futures.Future[Answer] = concurrent.futures.Future()

    def ask() -> None:
        """Pass the answer or the error to the waiting thread."""
        try:
            answer.set_result(question())
        except BaseException as e:
            answer.set_exception(e)

    threading.Thread(target=ask, name=f'asks {server}', daemon=True).start()
    return answer.result(ANSWER_TIMEOUT)


def fetched(path: str, show_progress: bool) -> str:
    """Return the path of a file's copy in the cache; download it unless the copy is current."""
    import filelock

    blob = Blob(path)
    if os.path.exists(blob.cached) and not blob.may_change:
        return blob.cached
    with _connected(path) as (blob, client):
        make_cache_folder(os.path.dirname(blob.cached))
        # Asked before locking, so that without a network all processes fail at the same time.
        stat = first_answer(lambda: client.stat(blob.path), blob.account)
        with filelock.FileLock(f'{blob.cached}.lock') as lock:
            try:
                is_there = os.path.exists(blob.cached)
                if not is_there or (blob.may_change and md5(blob.cached) != stat.md5):
                    _download(blob, client, stat, show_progress)
            finally:
                os.remove(lock.lock_file)
    return blob.cached


def _download(blob: Blob, client: Context, stat: Stat, show_progress: bool) -> None:
    """Download a blob and verify it before it becomes visible."""
    from tqdm.auto import tqdm

    progress: dict[str, Any] = {'disable': True}
    if show_progress and stat.size >= NO_PROGRESS_BELOW:
        progress = progress_bar(f'fetching {blob.url}')
    version = None if blob.account == GOOGLE else stat.version  # blobfile accepts none for Google
    with (
        client.BlobFile(blob.path, 'rb', file_size=stat.size, version=version) as source,
        # Machines that share the disk may not share the lock: each has its own temporary file.
        atomic_write(blob.cached, by=os.uname().nodename) as (file,),
        tqdm.wrapattr(source, 'read', total=stat.size, **progress) as counted,
    ):
        shutil.copyfileobj(counted, file, BLOCK_SIZE)
        file.flush()
        computed = md5(file.name)
        expected = stat.md5 or computed  # a server may report no MD5
        if file.tell() != stat.size or computed != expected:
            raise blob.error(
                f'damaged on the way, {file.tell()} of {stat.size} bytes and MD5 {computed}'
            )


def progress_bar(what: str) -> dict[str, Any]:
    """Return tqdm's settings for a progress bar; without a terminal, print a line instead."""
    is_terminal = sys.stderr.isatty()
    if not is_terminal:
        print(what, file=sys.stderr)
    return {'desc': what, 'disable': not is_terminal}


def write(path: str, source: BinaryIO) -> None:
    """Upload the content of `source` to `path`, all of it or nothing."""
    with _connected(path) as (blob, client):
        writing: Any = client.BlobFile(blob.path, 'wb', streaming=True, partial_writes_on_exc=False)
        with writing as target:
            shutil.copyfileobj(source, target, BLOCK_SIZE)
            target.close()  # in the block: after an error here, nothing is uploaded later


def remove(path: str) -> None:
    """Delete a local or remote file, if it exists."""
    with contextlib.suppress(FileNotFoundError, NotFound):
        if not is_remote(path):
            os.remove(path)
            return
        with _connected(path) as (blob, client):
            client.remove(blob.path)


def listing(directory: str) -> dict[str, tuple[int, str | None]]:
    """Return {relative path: (size, MD5 or None)} of all files below a remote directory."""
    files = {}
    with _connected(join(directory)) as (blob, client):
        for entry in client.scanglob(f'{blob.path}/**'):
            if entry.is_file:
                assert entry.stat is not None
                name = entry.path.removeprefix(f'{blob.path}/')
                files[name] = (entry.stat.size, entry.stat.md5)
    return files


@contextlib.contextmanager
def _connected(path: str) -> Iterator[tuple[Blob, Context]]:
    """Yield (blob, client of its server); raise errors of blobfile and urllib3 as StorageErrors."""
    import blobfile
    import urllib3

    blob = Blob(path)
    if is_offline():
        raise blob.error('LMHP_OFFLINE=1 allows only what is in the cache')
    try:
        yield blob, _make_client(blob.account, blob.container)
    except FileNotFoundError as e:
        raise blob.error(str(e), NotFound) from e
    except (OSError, RuntimeError, blobfile.Error, urllib3.exceptions.HTTPError) as e:
        if type(e) is TimeoutError:
            reason = f'no answer within {ANSWER_TIMEOUT} s, is there a network?'
        else:
            message = getattr(e, 'message', str(e))
            reason = re.sub(r'^request failed with exception (\w+\(.*?\): )?', '', message)
        raise blob.error(reason) from e


@functools.lru_cache
def _make_client(account: str, container: str) -> Context:
    """Make a client with few retries and the user's proxies; the public account is anonymous."""
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

    Blobfile has no option for this; tests/unit/test_storage.py checks its private names used here.
    """
    from blobfile import _azure

    manager: Any = _azure.access_token_manager
    manager._tokens[account, container] = (_azure.ANONYMOUS, '')
    manager._expirations[account, container] = float('inf')
