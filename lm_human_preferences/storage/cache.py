"""Reading files, local or remote: a remote one becomes a local copy in the cache, fetched once.

The copy of a blob is $LMHP_CACHE/ACCOUNT/CONTAINER/NAME, where LMHP_CACHE is
~/.cache/lm-human-preferences if unset and ACCOUNT is gs for Google. For instance,
gs://gpt-2/encodings/main/vocab.bpe becomes openaipublic/gpt-2/encodings/main/vocab.bpe in there.
What openaipublic has does not change, and is read without credentials; about any other blob the
server is asked each time whether it has changed. With LMHP_OFFLINE=1 there is only what the cache
holds, be it downloaded or put there by hand.

A copy in the cache is complete: it had the server's size and MD5 before it got its name. Its MD5
stays with it, as an attribute of the file if the disk has such; a copy that was damaged since then
is fetched again. A download that was interrupted starts again from the beginning.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from lm_human_preferences.errors import UserError
from lm_human_preferences.storage import blobs, hub
from lm_human_preferences.storage.files import atomic_write, md5
from lm_human_preferences.storage.paths import (
    Blob,
    NotFound,
    StorageError,
    is_hub,
    is_offline,
    is_remote,
)

if TYPE_CHECKING:
    from blobfile import Stat

MD5_ATTRIBUTE = 'user.lmhp.md5'
NO_PROGRESS_BELOW = 1 << 16  # bytes: such a download is over before a progress bar is read
# A larger copy is not hashed again: it is a checkpoint, which has checksums of its own.
MAX_HASHED_AGAIN = 256 << 20  # bytes


def read_text(path: str) -> str:
    """The contents of a UTF-8 file, local or remote, with every line end as \\n."""
    try:
        with open(cached_path(path), encoding='utf-8') as file:
            return file.read()
    except (UnicodeDecodeError, OSError) as e:
        raise StorageError(f'{path} cannot be read as UTF-8 text: {e}') from e


def read_whole_lines(path: str) -> str:
    """The contents of a UTF-8 file, local or remote, up to its last line end.

    What comes after that is the part of a line that a kill has left of the last write.
    """
    try:
        with open(cached_path(path), 'rb') as file:
            data = file.read()
        return data[: data.rfind(b'\n') + 1].decode()
    except (UnicodeDecodeError, OSError) as e:
        raise StorageError(f'{path} cannot be read as UTF-8 text: {e}') from e


def read_json(path: str) -> Any:
    """The value in a JSON file, local or remote."""
    text = without_bom(read_text(path))
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as e:  # a number of thousands of digits is a ValueError
        raise StorageError(f'{path} is not JSON: {e}') from e


def read_json_lines(path: str) -> list[tuple[str, Any]]:
    """(where it is, value) of each line of a local or remote file with one JSON value a line.

    Empty lines are passed over. UserError, which says where, for what is not JSON.
    """
    return parse_json_lines(without_bom(read_text(path)), path)


def parse_json_lines(text: str, name: str) -> list[tuple[str, Any]]:
    """The same of a text; name: of where it is from."""
    found = []
    for number, line in enumerate(text.split('\n'), start=1):
        if line.strip():
            where = f'{name}, line {number}'
            found.append((where, parse_json(line, where)))
    return found


def readable_json_lines(path: str) -> list[Any]:
    """The value of each whole line of a local or remote file that is JSON; others are left out."""
    found = []
    for line in read_whole_lines(path).split('\n'):
        with contextlib.suppress(ValueError, RecursionError):
            found.append(json.loads(line))
    return found


def parse_json(text: str | bytes, where: str) -> Any:
    """The value of a JSON text; UserError, which says `where` it is, for what is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as e:
        raise UserError(f'{where} is not JSON: {e}') from e


def without_bom(text: str) -> str:
    """`text` without the mark that programs on Windows put before UTF-8, and JSON does not know."""
    return text.removeprefix('\ufeff')


def exists(path: str) -> bool:
    """Whether there is a file, local or remote; offline, whether the cache has it.

    StorageError if the server cannot be reached.
    """
    if not is_remote(path):
        return os.path.exists(path)
    if is_hub(path):
        return hub.exists(path)
    blob = Blob(path)
    if not blob.may_change and os.path.exists(blob.cached):
        return True
    if is_offline():
        return False
    try:
        blobs.stat_blob(blob)
    except NotFound:
        return False
    return True


def is_here(path: str) -> bool:
    """Whether a file, local or remote, can be read without the network."""
    if is_hub(path):
        return hub.is_here(path)
    return os.path.exists(Blob(path).cached if is_remote(path) else path)


def check_here(paths: Iterable[str]) -> None:
    """StorageError that names all remote files among `paths` that are not in the cache.

    For LMHP_OFFLINE=1: so the user can put all of them there at once.
    """
    missing = [path for path in paths if is_remote(path) and not is_here(path)]
    if missing:
        places = ', '.join(map(_place_of, missing))
        raise StorageError(
            f'LMHP_OFFLINE=1, and the cache lacks {len(missing)} files; put {places}'
        )


def _place_of(path: str) -> str:
    """Where to put a remote file that is to be read without the network."""
    if is_hub(path):
        return f'{path} into HF_HOME by `hf download`'
    blob = Blob(path)
    return f'{blob.url} at {blob.cached}'


def cached_path(path: str) -> str:
    """`path` itself if it is local, else the path of its copy in the cache, fetched if need be.

    Raises NotFound if there is no such file, StorageError if it cannot be read for another reason.
    """
    local = path
    if is_hub(path):
        return hub.cached_path(path)
    if is_remote(path):
        blob = Blob(path)
        local = blob.cached
        if blob.may_change or not _is_intact(local):
            _fetch(blob)
    if not os.path.exists(local):
        raise NotFound(f'{path}: no such file or directory')
    if not os.path.isfile(local):  # a pipe would block for ever, and a device has no end
        raise StorageError(f'{local} is not a file')
    return local


def cached_paths(paths: Collection[str]) -> list[str]:
    """[cached_path(path) for path in paths], over several connections and with one progress bar."""
    from tqdm.contrib.concurrent import thread_map

    remote = [Blob(path) for path in paths if is_remote(path) and not is_hub(path)]
    missing = [blob for blob in remote if not os.path.exists(blob.cached)]
    if missing:
        thread_map(
            functools.partial(_fetch, show_progress=False),
            missing,
            max_workers=blobs.MAX_CONNECTIONS,
            unit='file',
            leave=False,
            desc=f'fetching {missing[0].url} ...',
        )
    return [cached_path(path) for path in paths]


def make_cache_folder(path: str) -> None:
    """Make a folder in the cache; StorageError, which names the fix, if it cannot be written."""
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


def _fetch(blob: Blob, show_progress: bool = True) -> None:
    """Download a blob into the cache, unless the copy there is intact and up to date."""
    import filelock

    # Asked before locking: without a network, all processes find out at the same time.
    stat = blobs.stat_blob(blob)
    if _is_current(blob, stat):
        return
    make_cache_folder(os.path.dirname(blob.cached))
    # The kernel frees the lock when its holder dies.
    with blobs.translate_errors(blob), filelock.FileLock(blob.cached + '.lock') as lock:
        try:
            if not _is_current(blob, stat):
                _download(blob, stat, show_progress)
        finally:
            os.remove(lock.lock_file)


def _download(blob: Blob, stat: Stat, show_progress: bool) -> None:
    """Download a blob that the server describes as `stat`; verify it before it becomes visible."""
    from tqdm import tqdm

    if shutil.disk_usage(os.path.dirname(blob.cached)).free < stat.size:
        raise blob.error(
            f'no room for its {stat.size / 2**20:.0f} MiB in the cache, which LMHP_CACHE moves'
        )
    digest = hashlib.md5(usedforsecurity=False)
    with (
        blobs.open_for_reading(blob, stat) as source,
        # The lock may not reach other machines that share the disk; they write parts of other
        # names.
        atomic_write(blob.cached, by=os.uname().nodename) as (file,),
        tqdm(
            total=stat.size,
            desc=f'fetching {blob.url}',
            unit='B',
            unit_scale=True,
            disable=not show_progress or stat.size < NO_PROGRESS_BELOW,
        ) as bar,
    ):
        while block := source.read(blobs.BLOCK_SIZE):
            digest.update(block)
            bar.update(file.write(block))
        computed = digest.hexdigest()
        expected = stat.md5 or computed  # a server need not tell
        if file.tell() != stat.size or computed != expected:
            raise blob.error(
                f'damaged on the way, {file.tell()} of {stat.size} bytes and MD5 {computed}'
            )
        with contextlib.suppress(OSError):
            os.setxattr(file.fileno(), MD5_ATTRIBUTE, computed.encode())


def _md5_when_fetched(path: str) -> str:
    """The MD5 that was recorded with a copy; if it was put there by hand, what it is now."""
    try:
        return os.getxattr(path, MD5_ATTRIBUTE).decode()
    except OSError:
        return md5(path)


def _is_intact(path: str) -> bool:
    """Whether there is a copy, and it is still what was fetched (or put there by hand)."""
    try:
        if not os.path.exists(path):
            return False
        return os.path.getsize(path) > MAX_HASHED_AGAIN or md5(path) == _md5_when_fetched(path)
    except OSError:  # it cannot be read, and whoever opens it gets that error
        return True


def _is_current(blob: Blob, stat: Stat) -> bool:
    """Whether the copy in the cache is intact, and is the version that `stat` describes."""
    if not _is_intact(blob.cached):
        return False
    return not blob.may_change or _md5_when_fetched(blob.cached) == stat.md5
