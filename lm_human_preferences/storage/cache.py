"""Reading of local and remote files. Copies of blobs are in $LMHP_CACHE, of hub files in its own.

Blobs of openaipublic never change; for other blobs, the server is asked each time. A download
becomes visible once its size and MD5 are right.
"""

from __future__ import annotations

import codecs
import functools
import json
import os
from collections.abc import Sequence
from typing import Any

from lm_human_preferences.errors import os_errors_as
from lm_human_preferences.storage import blobs, hub
from lm_human_preferences.storage.paths import (
    Blob,
    NotFound,
    StorageError,
    is_hub,
    is_offline,
    is_remote,
    join,
)

LFS_BYTES = 1024  # a Git LFS pointer, which stands for a large file, is smaller


def read_text(path: str) -> str:
    """Return the text of a local or remote UTF-8 file, with every line end as \\n.

    A byte order mark, as programs on Windows write it, is left out: JSON does not allow it.
    """
    text = _decoded(_read(path), path)
    return text.replace('\r\n', '\n').replace('\r', '\n')


def read_whole_lines(path: str) -> str:
    """Return a UTF-8 text up to its last line end: a killed writer may have torn the rest."""
    data = _read(path)
    return _decoded(data[: data.rfind(b'\n') + 1], path)


def _read(path: str) -> bytes:
    error = os_errors_as(f'{path} cannot be read', kind=StorageError)
    with error, open(cached_path(path), 'rb') as file:
        return file.read()


def _decoded(data: bytes, path: str) -> str:
    try:
        return data.decode('utf-8-sig')
    except UnicodeDecodeError as e:
        is_utf_16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        encoding = 'UTF-16' if is_utf_16 else 'CP1252'
        raise StorageError(
            f'{path} cannot be read as UTF-8 text: {e}; if it is a file of Windows,'
            f' `iconv -f {encoding} -t UTF-8` converts it'
        ) from e


def read_json(path: str) -> Any:
    """Return the value in a JSON file, local or remote."""
    return parse_json(read_text(path), path)


def read_json_lines(path: str) -> list[tuple[str, Any]]:
    """Return (place for messages, value) of each line of a local or remote file of JSON lines."""
    return parse_json_lines(read_text(path), path)


def parse_json_lines(text: str, name: str) -> list[tuple[str, Any]]:
    """Return (place for messages, value) of each line that is not empty. name: the file's name."""
    found = []
    for number, line in enumerate(text.split('\n'), start=1):
        if line.strip():
            where = f'{name}, line {number}'
            found.append((where, parse_json(line, where, names_once=True)))
    return found


def parse_json(text: str | bytes, where: str, *, names_once: bool = False) -> Any:
    """Return the value of a JSON text; StorageError, which says `where`, if it is not JSON.

    names_once: True to refuse objects that have a field twice; otherwise the last value counts.
    """
    try:
        return json.loads(text, object_pairs_hook=_each_name_once if names_once else None)
    except (ValueError, RecursionError) as e:  # also for numbers with thousands of digits
        raise StorageError(f'{where} is not JSON: {e}') from e


def _each_name_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f'an object has the field {twice!r:.80} twice')
    return found


def exists(path: str) -> bool:
    """Return whether a local or remote file exists; offline, whether it is in the cache."""
    if not is_remote(path):
        return os.path.exists(path)
    try:
        if is_hub(path):
            return bool(hub.cached_path(path))
        blob = Blob(path)
        if not blob.may_change and os.path.exists(blob.cached):
            return True
        return not is_offline() and bool(blobs.stat(path))
    except NotFound:
        return False


def is_here(path: str) -> bool:
    """Return whether a local or remote file can be read without the network."""
    if is_hub(path):
        return hub.is_here(path)
    return os.path.exists(Blob(path).cached if is_remote(path) else path)


def is_model_here(directory: str) -> bool:
    """Return whether a model can be read without the network; StorageError for a bad URL."""
    if is_hub(directory):
        return hub.is_here(directory)
    if is_remote(directory):
        Blob(join(directory, 'file'))
    return not is_remote(directory)


def cached_path(path: str, *, show_progress: bool = True) -> str:
    """Return a local path itself, or that of a remote file's copy; NotFound if there is no file."""
    if is_hub(path):
        return hub.cached_path(path)
    local = blobs.fetched(path, show_progress) if is_remote(path) else path
    if not os.path.exists(local):
        raise NotFound(f'{path}: no such file or directory')
    if not os.path.isfile(local):  # a pipe would block for ever, and a device has no end
        raise StorageError(f'{local} is not a file')
    if os.path.getsize(local) < LFS_BYTES:
        with open(local, 'rb') as file:
            if file.read().startswith(b'version https://git-lfs'):
                raise StorageError(
                    f'{local} only names a file of Git LFS: run `git lfs pull` there'
                )
    return local


def cached_paths(paths: Sequence[str]) -> list[str]:
    """Return cached_path of each path; fetch over several connections with one progress bar."""
    from tqdm.contrib.concurrent import thread_map

    if all(is_here(path) for path in paths):
        return [cached_path(path) for path in paths]
    return thread_map(
        functools.partial(cached_path, show_progress=False),
        paths,
        max_workers=blobs.MAX_CONNECTIONS,
        unit='file',
        leave=False,
        **blobs.progress_bar(f'fetching {paths[0]} ...'),
    )
