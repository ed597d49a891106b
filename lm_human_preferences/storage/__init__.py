"""Files: whole or not there. Only here are remote paths opened: blobs become local files, fetched
once.

A path is a local path or one of
    az://ACCOUNT/CONTAINER/NAME
    https://ACCOUNT.blob.core.windows.net/CONTAINER/NAME
    gs://BUCKET/NAME    (gs://lm-human-preferences and gs://gpt-2, the original's, have moved to az://openaipublic)

A blob is kept as $LMHP_CACHE/ACCOUNT/CONTAINER/NAME, where LMHP_CACHE is
~/.cache/lm-human-preferences if unset and ACCOUNT is gs for Google:
gs://gpt-2/encodings/main/vocab.bpe is openaipublic/gpt-2/encodings/main/vocab.bpe in there. What
openaipublic has does not change, and is asked for without credentials; of any other blob the server
is asked each time whether it has changed. With LMHP_OFFLINE=1 there is nothing but what is in the
cache, put there by hand or not.

What is in the cache is complete: it had the server's size and MD5 before it got its name. Its MD5
stays with it, as an attribute of the file where the disk has such; what was damaged since is
fetched again. A download that was interrupted starts again from nothing. Every error is one line
that names the URL.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
import threading
import time
import urllib.parse
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, BinaryIO, overload

from lm_human_preferences.errors import UserError

if TYPE_CHECKING:
    from blobfile import Context, Stat

FIRST_ANSWER = 8  # seconds in which a server must give its first answer, retries included
STAY_AWAY = 30  # seconds for which a server that gave none is not asked again
THREADS, RETRIES, CONNECT_TIMEOUT, READ_TIMEOUT = (
    16,
    5,
    5,
    20,
)  # the last two in seconds, of one request
BLOCK = 8 << 20  # bytes of one request
TINY = 1 << 16  # bytes that are there before a progress bar is read
MD5 = 'user.lmhp.md5'
LARGE = (
    256 << 20
)  # bytes of a file that is not hashed again: a checkpoint, which has checksums of its own
# account -> (time until which it is not asked again, reason)
_silent: dict[str, tuple[float, str]] = {}
PUBLIC, GOOGLE = 'openaipublic', 'gs'  # accounts
REMOTE = re.compile(
    r'(?:az://([a-z0-9]+)/|https://([a-z0-9]+)\.blob\.core\.windows\.net/|(gs)://)'
    r'([a-z0-9][a-z0-9._-]*)/([^?#]+)'
)


class StorageError(UserError):
    """A file could not be had."""


class NotFound(StorageError):
    """There is no such file."""


class _Blob:
    """A URL taken apart, and the path of its copy in the cache, which no name given from outside
    may lead out of.

    wanted: whether it is to be read, so that a copy put there by hand would do.
    """

    def __init__(self, path: str, wanted: bool = True) -> None:
        match = REMOTE.fullmatch(path)
        name = match and (urllib.parse.unquote(match[5]) if match[2] else match[5])
        if (
            not name
            or any(part in ('', '.', '..') for part in name.split('/'))
            or re.search(r'[\\\x00-\x1f\x7f\ud800-\udfff]|\.(part|lock)(/|$)', name)
        ):
            raise StorageError(
                f'{path!r}: give a local path, az://ACCOUNT/CONTAINER/NAME, gs://BUCKET/NAME or '
                'https://ACCOUNT.blob.core.windows.net/CONTAINER/NAME'
            )
        assert match is not None
        moved = match[3] and match[4] in ('gpt-2', 'lm-human-preferences')
        self.account, self.container = (
            PUBLIC if moved else match[1] or match[2] or match[3],
            match[4],
        )
        self.may_change = self.account != PUBLIC and not _is_offline()
        self.path = self.url = f'gs://{self.container}/{name}'
        if self.account != GOOGLE:
            self.path = f'az://{self.account}/{self.container}/{name}'
            self.url = f'https://{self.account}.blob.core.windows.net/{self.container}/{urllib.parse.quote(name)}'
        self.place = os.path.join(self.account, self.container, name)
        self.cached = os.path.join(cache_root(), self.place)
        self.advice = f'; to do without it, put the file at {self.cached}' if wanted else ''

    def error(self, reason: str, kind: type[StorageError] = StorageError) -> StorageError:
        return kind(f'{self.url}: {" ".join(reason.split())}{self.advice}')


def _is_offline() -> bool:
    return os.environ.get('LMHP_OFFLINE') == '1'


def cache_root() -> str:
    """The folder for what is fetched or made once."""
    return os.environ.get('LMHP_CACHE') or os.path.expanduser('~/.cache/lm-human-preferences')


def is_remote(path: str) -> bool:
    """Whether `path` is a URL rather than a local path."""
    return '://' in path


def join(path: str, *names: str) -> str:
    """`path`, local or remote, extended by `names`."""
    return '/'.join([path.rstrip('/'), *names]) if is_remote(path) else os.path.join(path, *names)


@overload
def staging_dir(directory: str) -> str: ...
@overload
def staging_dir(directory: None) -> None: ...
def staging_dir(directory: str | None) -> str | None:
    """`directory` (or None), if local; else the local one in which a run that is kept there is
    written."""
    if not directory or not is_remote(directory):
        return directory
    try:
        blob = _Blob(directory.rstrip('/'))
        if re.search(r'[*?[\]]', blob.path):  # blobfile would list what matches
            raise StorageError(f'{directory} has one of * ? [ ] in its name')
    except StorageError as e:
        raise StorageError(f'--save_dir: {e}') from None
    return os.path.join(cache_root(), 'to-upload', blob.place)


def cached_path(path: str) -> str:
    """The local path of a file: `path` itself if it is local, else its copy in the cache, fetched
    if need be.

    Raises NotFound where there is no such file, StorageError where it cannot be had for another
    reason.
    """
    copy = path
    if is_remote(path):
        copy = (blob := _Blob(path)).cached
        if blob.may_change or not _is_intact(copy):
            _fetch(blob)
    if not os.path.exists(copy):
        raise NotFound(f'{path}: no such file or directory')
    if not os.path.isfile(copy):  # a pipe would be waited for without end, a device read
        raise StorageError(f'{copy} is not a file')
    return copy


def is_here(path: str) -> bool:
    """Whether a file, local or remote, can be read without the network."""
    return os.path.exists(_Blob(path).cached if is_remote(path) else path)


def make_cache_folder(path: str) -> None:
    """Make a folder in the cache; StorageError, which names the fix, where it cannot be written."""
    try:
        os.makedirs(path, exist_ok=True)
        writable = os.access(path, os.W_OK | os.X_OK)
        reason = 'Permission denied'
    except OSError as e:
        writable = False
        reason = e.strerror
    if not writable:
        raise StorageError(
            f'the cache folder {path} cannot be written ({reason}): set LMHP_CACHE to a folder'
            ' that can'
        )


def cached_paths(paths: Collection[str]) -> list[str]:
    """[cached_path(path) for path in paths], over several connections and with one progress bar."""
    from tqdm.contrib.concurrent import thread_map

    missing = [
        blob
        for path in filter(is_remote, paths)
        if not os.path.exists((blob := _Blob(path)).cached)
    ]
    if missing:
        thread_map(
            functools.partial(_fetch, show=False),
            missing,
            max_workers=THREADS,
            unit='file',
            leave=False,
            desc=f'fetching {missing[0].url} ...',
        )
    return [cached_path(path) for path in paths]


def _md5_when_fetched(path: str) -> str:
    """What was recorded of a file in the cache; of one put there by hand, what it is now."""
    try:
        return os.getxattr(path, MD5).decode()
    except OSError:
        return md5(path)


def _is_intact(path: str) -> bool:
    """Whether there is a file, and still what was fetched; of one put there by hand that is taken
    for granted."""
    try:
        return os.path.exists(path) and (
            os.path.getsize(path) > LARGE or md5(path) == _md5_when_fetched(path)
        )
    except OSError:  # it cannot be read, which whoever wants to will say
        return True


def _is_current(blob: _Blob, stat: Stat) -> bool:
    """Whether the copy in the cache is intact and what the server has, of which it has said
    `stat`."""
    return _is_intact(blob.cached) and (
        not blob.may_change or _md5_when_fetched(blob.cached) == stat.md5
    )


def md5(path: str) -> str:
    """The MD5 of a local file, in hexadecimal; looked at once, unless it has changed."""
    stat = os.stat(path)
    return _md5(path, stat.st_size, stat.st_mtime_ns)


@functools.cache
def _md5(path: str, size: int, modified: int) -> str:
    with open(path, 'rb') as file:
        return hashlib.file_digest(file, 'md5').hexdigest()


def exists(path: str) -> bool:
    """Whether there is a file `path`; offline, in the cache. Raises StorageError where the server
    cannot be reached."""
    if not is_remote(path):
        return os.path.exists(path)
    blob = _Blob(path)
    try:
        return (not blob.may_change and os.path.exists(blob.cached)) or (
            not _is_offline() and bool(_stat(blob))
        )
    except NotFound:
        return False


def stat(path: str) -> Stat:
    """What the server says of a remote file, though it be in the cache; StorageError where there is
    no good answer."""
    return _stat(_Blob(path, wanted=False))


def check_access(path: str) -> None:
    """StorageError where something is missing here to write a remote file; the server may have
    another opinion."""
    with _changing(path):
        pass


def write(path: str, source: BinaryIO, size: int) -> tuple[int, str]:
    """Make a remote file of the next `size` bytes of `source`, a binary file: all of it appears, or
    nothing.

    Returns (its size, its MD5 in hexadecimal), with which what arrives is compared, as is each
    block.
    """
    digest = hashlib.md5(usedforsecurity=False)
    with _changing(path) as (blob, blobs):
        target = blobs.BlobFile(blob.path, 'wb', streaming=True, partial_writes_on_exc=False)
        with _abandoned_on_error(target), target:
            while target.tell() < size and (block := source.read(min(BLOCK, size - target.tell()))):
                digest.update(block)
                target.write(block)
            written = target.tell(), digest.hexdigest()
        found = blobs.stat(blob.path)
        if (found.size, found.md5) != written:
            raise blob.error(
                f'damaged on the way, {found.size} of {written[0]} bytes and MD5 {found.md5}'
            )
    return written


@contextlib.contextmanager
def _abandoned_on_error(target: BinaryIO) -> Iterator[None]:
    """Close `target`, a remote file that is being written, without another upload if something
    fails.

    Where the upload that close() makes has failed, the file is open still, and Python calls close()
    once more when it collects the file: at any time, in any thread. That would overwrite what is
    there by then, and it deadlocks in a thread that holds blobfile's lock.
    """
    try:
        yield
    except BaseException:
        target.had_exception = True  # pyright: ignore[reportAttributeAccessIssue]
        target.close()
        raise


def remove(path: str) -> None:
    """Delete a file, local or remote, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        if not is_remote(path):
            return os.remove(path)
        with _changing(path) as (blob, blobs), contextlib.suppress(FileNotFoundError):
            blobs.remove(blob.path)


def local_files(directory: str, own: re.Pattern[str]) -> list[str]:
    """Names of the files below a local directory that match `own`, a regular expression."""
    paths = [
        os.path.relpath(os.path.join(root, name), directory)
        for root, _, names in os.walk(directory)
        for name in names
    ]
    return sorted(filter(own.fullmatch, paths))


def listing(directory: str) -> dict[str, tuple[int, str | None]]:
    """{name: (size, MD5 or None)} of all files below a remote directory."""
    with _changing(directory) as (blob, blobs):
        found = {}
        for entry in blobs.scanglob(f'{blob.path}/**'):
            if entry.is_file:
                assert entry.stat is not None
                found[entry.path.removeprefix(f'{blob.path}/')] = entry.stat.size, entry.stat.md5
        return found


@contextlib.contextmanager
def _changing(path: str) -> Iterator[tuple[_Blob, Context]]:
    """(a blob, blobfile) for a change by the user, who needs credentials for it."""
    from blobfile import _azure

    blob = _Blob(path.rstrip('/'), wanted=False)
    if _is_offline():
        raise blob.error('LMHP_OFFLINE=1, so that nothing can be kept there')
    with _translate_errors(blob):
        if blob.account != GOOGLE and not _azure._load_credentials():
            raise blob.error(
                'no credentials to write there: run `az login`, or set AZURE_STORAGE_KEY'
            )
        yield blob, _context(blob.account, blob.container, os.getpid())


def read_text(path: str) -> str:
    """The contents of a UTF-8 file, local or remote, with every line end as \\n."""
    try:
        with open(cached_path(path), encoding='utf-8') as file:
            return file.read()
    except (UnicodeDecodeError, OSError) as e:
        raise StorageError(f'{path} cannot be read as UTF-8 text: {e}') from e


def read_json(path: str) -> Any:
    """The value in a JSON file, local or remote."""
    text = read_text(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as e:  # numbers of thousands of digits are a ValueError
        raise StorageError(f'{path} is not JSON: {e}') from e


def open_nofollow(path: str, flags: int) -> int:
    """For open(..., opener=...): OSError for a link, as whoever put it there has other plans."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)  # nor is a pipe waited for


@contextlib.contextmanager
def atomic_write(*targets: str, by: str | None = None) -> Iterator[list[BinaryIO]]:
    """Files, open for writing, that take the places of the local `targets`, in this order, once all
    are on the disk.

    On an error nothing has changed, short of one between the renames. What a kill leaves is
    TARGET.BY.part, where `by` is this process unless given.
    """
    parts = [f'{target}.{by or os.getpid()}.part' for target in targets]
    try:
        with contextlib.ExitStack() as stack:
            files: list[BinaryIO] = [
                stack.enter_context(open(part, 'wb', opener=open_nofollow)) for part in parts
            ]
            yield files
            for file in files:
                file.flush()
                os.fsync(file.fileno())
            for part, target in zip(parts, targets, strict=True):
                os.replace(part, target)
            directory = os.open(os.path.dirname(targets[0]) or '.', os.O_RDONLY)
            stack.callback(os.close, directory)
            os.fsync(directory)  # the names, too
    except BaseException:
        for part in parts:
            with contextlib.suppress(OSError):
                os.remove(part)
        raise


def _fetch(blob: _Blob, show: bool = True) -> None:
    """Bring a blob into the cache."""
    import filelock

    # Asked before locking: without a network, all processes find out at the same time.
    stat = _stat(blob)
    if _is_current(blob, stat):
        return
    make_cache_folder(os.path.dirname(blob.cached))
    with (
        _translate_errors(blob),
        filelock.FileLock(blob.cached + '.lock') as lock,
    ):  # the kernel frees it when its holder dies
        try:
            if not _is_current(blob, stat):
                _download(blob, stat, show)
        finally:
            os.remove(lock.lock_file)


def _download(blob: _Blob, stat: Stat, show: bool) -> None:
    from tqdm import tqdm

    if shutil.disk_usage(os.path.dirname(blob.cached)).free < stat.size:
        raise blob.error(
            f'no room for its {stat.size / 2**20:.0f} MiB in the cache, which LMHP_CACHE moves'
        )
    digest = hashlib.md5(usedforsecurity=False)
    # The lock may not reach other machines that share the disk; the name of the part keeps them
    # apart.
    blobs = _context(blob.account, blob.container, os.getpid())
    version = None if blob.account == GOOGLE else stat.version  # blobfile has that for Azure only
    with (
        blobs.BlobFile(blob.path, 'rb', file_size=stat.size, version=version) as source,
        atomic_write(blob.cached, by=os.uname().nodename) as (file,),
        tqdm(
            total=stat.size,
            desc=f'fetching {blob.url}',
            unit='B',
            unit_scale=True,
            disable=not show or stat.size < TINY,
        ) as bar,
    ):
        while block := source.read(BLOCK):
            digest.update(block)
            bar.update(file.write(block))
        if file.tell() != stat.size or digest.hexdigest() != (stat.md5 or digest.hexdigest()):
            raise blob.error(
                f'damaged on the way, {file.tell()} of {stat.size} bytes and MD5'
                f' {digest.hexdigest()}'
            )
        with contextlib.suppress(OSError):
            os.setxattr(file.fileno(), MD5, digest.hexdigest().encode())


def _stat(blob: _Blob) -> Stat:
    """Size, MD5 and version of a blob, or NotFound: always the first question to a server.

    One deadline covers name look-up, connection, encryption and all retries; for want of one in
    each, in a thread.
    """
    if _is_offline():
        is_there = os.path.exists(blob.cached)
        raise blob.error(
            f'{"damaged since it was fetched" if is_there else "not in the cache"}, and'
            ' LMHP_OFFLINE=1'
        )
    until, reason = _silent.get(blob.account, (0, ''))
    if time.monotonic() < until:
        raise blob.error(reason)
    answer: concurrent.futures.Future[Stat] = concurrent.futures.Future()

    def ask() -> None:
        """Give `answer` what the server says, or the error."""
        try:
            answer.set_result(_context(blob.account, blob.container, os.getpid()).stat(blob.path))
        except BaseException as e:
            answer.set_exception(e)

    threading.Thread(target=ask, daemon=True).start()
    with _translate_errors(blob):
        try:
            return answer.result(FIRST_ANSWER)
        except FileNotFoundError:
            raise blob.error('there is no such file', NotFound) from None


@contextlib.contextmanager
def _translate_errors(blob: _Blob) -> Iterator[None]:
    """Turn what goes wrong with a blob into StorageErrors, and remember a server that does not
    answer at all."""
    import blobfile
    import urllib3

    try:
        yield
    except (OSError, KeyError, RuntimeError, blobfile.Error, urllib3.exceptions.HTTPError) as e:
        said = re.sub(
            r'^request failed with exception (\w+\(.*?\): )?', '', getattr(e, 'message', str(e))
        )
        reason = {
            TimeoutError: f'no answer within {FIRST_ANSWER} s, is there a network?',
            KeyError: 'the answer is not from a blob store (a log-in page of the network?)',
        }.get(type(e), said)
        if type(e) is TimeoutError or getattr(e, 'response_status', None) == 0:
            _silent[blob.account] = time.monotonic() + STAY_AWAY, reason
        raise blob.error(reason) from e


@functools.lru_cache
def _context(account: str, container: str, pid: int) -> Context:
    """blobfile for a container, in this process (connections do not survive a fork), and with none
    of its defaults: it would retry for ever, ignore proxies, and send the user's own credentials
    even to PUBLIC, which refuses them.
    """
    from urllib.request import getproxies, proxy_bypass

    import blobfile
    import urllib3.util
    from blobfile import _azure

    if account == PUBLIC or (account != GOOGLE and not _azure._load_credentials()):
        # No option gives anonymous access. This also skips a listing that public containers need
        # not allow.
        tokens, key = _azure.access_token_manager, (account, container)
        tokens._tokens[key], tokens._expirations[key] = (_azure.ANONYMOUS, ''), float('inf')
    proxy = getproxies().get('https')
    pool = urllib3.PoolManager(maxsize=THREADS)
    host = 'storage.googleapis.com' if account == GOOGLE else f'{account}.blob.core.windows.net'
    if proxy and not proxy_bypass(host):
        login = urllib.parse.unquote(urllib3.util.parse_url(proxy).auth or '') or None
        pool = urllib3.ProxyManager(
            proxy, proxy_headers=urllib3.make_headers(proxy_basic_auth=login), maxsize=THREADS
        )
    return blobfile.create_context(
        retry_limit=RETRIES,
        connect_timeout=CONNECT_TIMEOUT,
        read_timeout=READ_TIMEOUT,
        get_http_pool=lambda: pool,
        default_buffer_size=BLOCK,
        log_callback=lambda text: None,
        save_access_token_to_disk=False,
    )
