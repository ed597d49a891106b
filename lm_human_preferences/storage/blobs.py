"""Access to local and remote files by their paths; blobs of Azure through blobfile.

Copies of blobs are in $LMHP_CACHE, those of the hub in its own cache. Blobs of openaipublic never
change; for other blobs, the server is asked each time. A download becomes visible once its size and
MD5 are right. Errors are StorageErrors of one line with the path.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.request import getproxies

from lm_human_preferences.errors import os_errors_as
from lm_human_preferences.storage import hub
from lm_human_preferences.storage.files import atomic_write, md5
from lm_human_preferences.storage.paths import (
    PUBLIC,
    Blob,
    NotFound,
    StorageError,
    is_hub,
    is_offline,
    is_remote,
    join,
    make_cache_folder,
)

if TYPE_CHECKING:
    from blobfile import Context, Stat

MAX_CONNECTIONS = 16
RETRIES = 4
CONNECT_TIMEOUT = 3  # seconds to wait for a connection to a server
READ_TIMEOUT = 20  # seconds to wait for a server's data
LFS = b'version https://git-lfs'  # beginning of a Git LFS pointer, which stands for a large file
BLOCK_SIZE = 8 << 20  # bytes that one request transfers
NOT_SILENT = 1 << 20  # size in bytes from which a download is announced


def exists(path: str) -> bool:
    """Return whether a local or remote file exists; offline, a remote file must be in the cache."""
    if not is_remote(path):
        return os.path.exists(path)
    try:
        if is_hub(path):
            return bool(hub.fetched(path))
        blob = Blob(path)
        if not blob.may_change and os.path.exists(blob.cached):
            return True
        if is_offline():
            return False
        with _connected(path) as (blob, client):
            return bool(client.stat(blob.path))
    except NotFound:
        return False


def is_here(path: str) -> bool:
    """Return whether a file, a local folder or a hub model can be read without network access."""
    if is_hub(path):
        return hub.is_here(path)
    return os.path.isfile(Blob(path).cached) if is_remote(path) else os.path.exists(path)


def cached_path(path: str) -> str:
    """Return a file's local path, after downloading a remote file; NotFound if it is missing."""
    local = path
    if is_remote(path):
        local = hub.fetched(path) if is_hub(path) else _fetched(path)
    if not os.path.exists(local):
        raise NotFound(f'{path}: no such file or directory')
    if not os.path.isfile(local):  # reading from a pipe or a device might never end
        raise StorageError(f'{local} is not a file')
    with os_errors_as(f'{path} cannot be read', kind=StorageError), open(local, 'rb') as file:
        if file.read(len(LFS)) == LFS:
            raise StorageError(f'{local} is a Git LFS pointer: run `git lfs pull` in its folder')
    return local


def cached_paths(paths: Sequence[str]) -> list[str]:
    """Return the local paths of files; download missing files over several connections."""
    from tqdm.contrib.concurrent import thread_map

    if all(map(is_here, paths)):
        return [cached_path(path) for path in paths]
    print(f'fetching {paths[0]} ...', file=sys.stderr)
    # With `disable` None, tqdm shows a progress bar only on a terminal.
    progress: dict[str, Any] = {'unit': 'file', 'leave': False, 'disable': None}
    return thread_map(cached_path, paths, max_workers=MAX_CONNECTIONS, **progress)


def cached_directory(path: str) -> str:
    """Return a model's local directory; a model on the hub is downloaded with its weights."""
    return hub.fetched(path, with_weights=True) if is_hub(path) else path


def _fetched(path: str) -> str:
    """Return the path of a blob's copy in the cache; download an outdated copy again."""
    import filelock

    blob = Blob(path)
    if os.path.exists(blob.cached) and not blob.may_change:
        return blob.cached
    with _connected(path) as (blob, client):
        make_cache_folder(os.path.dirname(blob.cached))
        stat = client.stat(blob.path)
        with filelock.FileLock(f'{blob.cached}.lock') as lock:
            try:
                if not (os.path.exists(blob.cached) and md5(blob.cached) == stat.md5):
                    _download(blob, client, stat)
            finally:
                os.remove(lock.lock_file)
    return blob.cached


def _download(blob: Blob, client: Context, stat: Stat) -> None:
    """Download a blob and verify it before it becomes visible."""
    if stat.size >= NOT_SILENT:
        print(f'fetching {blob.path}, {stat.size >> 20} MiB', file=sys.stderr)
    # Each machine has its own temporary file, as locks may fail between machines that share a disk.
    with atomic_write(blob.cached, by=os.uname().nodename) as (file,):
        computed = client.copy(blob.path, file.name, overwrite=True, return_md5=True)
        size = os.path.getsize(file.name)
        if size != stat.size or stat.md5 not in (None, computed):  # a server may report no MD5
            raise blob.error(
                f'the file was damaged on the way: {size} of {stat.size} bytes, MD5 {computed}'
            )


def write(path: str, source: BinaryIO) -> None:
    """Upload the content of `source` to the blob at `path`, completely or not at all."""
    with _connected(path) as (blob, client):
        writing: Any = client.BlobFile(blob.path, 'wb', streaming=True, partial_writes_on_exc=False)
        with writing as target:
            shutil.copyfileobj(source, target, BLOCK_SIZE)
            # If close() fails inside the `with` block, blobfile does not upload the rest later.
            target.close()


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
    """Yield (blob, client for the blob's server); turn errors of a transfer into StorageErrors."""
    import blobfile
    import urllib3

    blob = Blob(path)
    if is_offline():
        raise blob.error('LMHP_OFFLINE=1 allows only what is in the cache')
    try:
        yield blob, _make_client(blob.account, blob.container)
    except FileNotFoundError as e:
        raise blob.error(f'the blob does not exist: {e}', NotFound) from e
    except (OSError, RuntimeError, blobfile.Error, urllib3.exceptions.HTTPError) as e:
        reason = getattr(e, 'message', e)
        raise blob.error(f'the transfer fails: {reason}') from e


@functools.lru_cache
def _make_client(account: str, container: str) -> Context:
    """Return a client with few retries and the user's proxy, anonymous for the account PUBLIC.

    An error of urllib3 says within seconds that the server cannot be reached.
    """
    import blobfile
    import urllib3

    if account == PUBLIC:
        _use_anonymous_access(account, container)
    pool = urllib3.PoolManager(maxsize=MAX_CONNECTIONS)
    proxy = getproxies().get('https')
    if proxy:
        pool = urllib3.proxy_from_url(proxy, maxsize=MAX_CONNECTIONS)
    # Test the network once, as blobfile would try again and again if nothing answers.
    host = f'https://{account}.blob.core.windows.net/{container}'
    with contextlib.suppress(urllib3.exceptions.ProtocolError, urllib3.exceptions.ReadTimeoutError):
        pool.request('HEAD', host, retries=False, timeout=CONNECT_TIMEOUT)
    return blobfile.create_context(
        retry_limit=RETRIES,
        connect_timeout=CONNECT_TIMEOUT,
        read_timeout=READ_TIMEOUT,
        get_http_pool=lambda: pool,
        default_buffer_size=BLOCK_SIZE,
        log_callback=lambda text: None,
        save_access_token_to_disk=False,
    )


def _use_anonymous_access(account: str, container: str) -> None:
    """Make blobfile read an Azure container without the user's credentials.

    Blobfile has no option for this; tests/unit/test_storage.py checks its private names used here.
    """
    from blobfile import _azure

    manager: Any = _azure.access_token_manager
    manager._tokens[account, container] = (_azure.ANONYMOUS, '')
    manager._expirations[account, container] = float('inf')
