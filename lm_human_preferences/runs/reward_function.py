"""File with a reward function of the user's, and its copy in the runs that learned from it.

A run may come from anywhere: its copy is only run where this user has named the same code before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import shlex
import sys
from typing import Any

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError
from lm_human_preferences.runs import run_files

OPTION = '--rewards.function'
_NAMED_HERE = 'reward_functions'  # folder of the cache: an empty file for each digest


@dataclasses.dataclass(frozen=True)
class Source:
    """A function in a file. name: FILE.py:FUNCTION. text: the file's."""

    name: str
    text: str

    @property
    def path(self) -> str:
        """Return the path of the file."""
        return _parts(self.name)[0]

    @property
    def function(self) -> str:
        """Name of the function in the file."""
        return _parts(self.name)[1]

    @property
    def digest(self) -> str:
        """SHA-256 of the file's text."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def is_one(name: str) -> bool:
    """Return whether `name` is that of a function rather than of a directory: FILE.py:FUNCTION."""
    path, _, function = name.rpartition(':')
    return path.endswith('.py') and function.isidentifier()


def read(name: str) -> Source:
    """Return the function that the user names, whose file may be run here from now on."""
    path, _ = _parts(name)
    source = Source(name, _text(path, name))
    mark = _mark_of(source)
    with contextlib.suppress(OSError, UserError):  # it is only for runs whose file has moved
        if not os.path.exists(mark):
            storage.make_cache_folder(os.path.dirname(mark))
            storage.write_bytes(mark, b'')
    return source


def records(source: Source) -> dict[str, Any]:
    """Return the files of a run that say which function it learns from, {name: text, or JSON}."""
    return {
        run_files.FUNCTION: source.text,
        run_files.FUNCTION_RECORD: {'function': source.name, 'digest': source.digest},
    }


def of_training(name: str, directory: str | None) -> Source:
    """Return the function that a training learns from: where its file is gone, the copy of it."""
    path, _ = _parts(name)
    if directory is None or os.path.exists(path) or not run_files.has_reward_function(directory):
        return read(name)
    return of_run(directory)


def of_run(directory: str) -> Source:
    """Return the function that a run learned from; UserError if its code was never named here."""
    name, digest = _recorded(directory)
    path, function = _parts(name)
    if os.path.isfile(path):
        own = Source(name, _text(path, name))
        if own.digest == digest:
            return own
    copy = storage.join(directory, run_files.FUNCTION)
    source = Source(f'{copy}:{function}', storage.without_bom(storage.read_text(copy)))
    if source.digest != digest:
        raise UserError(
            f'{copy} is not the reward function that this run learned from: put back what it was'
        )
    if not os.path.exists(_mark_of(source)):
        fetched = f'a copy of {copy}' if storage.is_remote(copy) else copy
        raise UserError(
            f'the reward of this run is the function {name}, whose file is not there as it was, and'
            f' code that comes with a run is not run: read {copy}, and if you trust it, put'
            f' {fetched} at {path}'
        )
    return source


def check_resumed(directory: str, name: str, *, is_given: bool) -> None:
    """Raise UserError if a resumed run would learn from another function, unless it `is_given`."""
    if not run_files.has_reward_function(directory):
        return
    recorded, digest = _recorded(directory)
    path, function = _parts(name)
    if not is_given and not os.path.exists(path):
        of_run(directory)
        return
    if read(name).digest == digest:
        return
    if not is_given:
        copy = f'{os.path.join(directory, run_files.FUNCTION)}:{function}'
        raise UserError(
            f'{path} is not what it was when this run began: give {OPTION} {shlex.quote(name)} to'
            f' go on with what it is now, or {OPTION} {shlex.quote(copy)} with what it was'
        )
    print(
        f'note: going on with {OPTION} {name}, another reward function than {recorded} was when the'
        ' run began',
        file=sys.stderr,
    )


def _recorded(directory: str) -> tuple[str, str]:
    """Return (name, digest) of the function of the run in `directory`."""
    path = storage.join(directory, run_files.FUNCTION_RECORD)
    record = storage.read_json(path)
    found = record if isinstance(record, dict) else {}
    name, digest = found.get('function'), found.get('digest')
    if not isinstance(name, str) or not is_one(name) or not isinstance(digest, str):
        raise UserError(f'{path} is no record of a reward function')
    return name, digest


def _parts(name: str) -> tuple[str, str]:
    """Return path and function of FILE.py:FUNCTION; UserError for another name."""
    path, _, function = name.rpartition(':')
    if not is_one(name):
        raise UserError(
            f'reward function {name}: give the file and the function in it, as my_reward.py:score'
        )
    if storage.is_remote(path):
        raise UserError(f'reward function {name}: code is only run from a file on this machine')
    return path, function


def _text(path: str, name: str) -> str:
    try:
        return storage.without_bom(storage.read_text(path))
    except storage.NotFound:
        raise UserError(f'reward function {name}: there is no file {path}') from None
    except storage.StorageError as e:
        raise UserError(f'reward function {name}: {e}') from e


def _mark_of(source: Source) -> str:
    """Return the path of the file that says that the user has named this code."""
    return os.path.join(storage.cache_root(), _NAMED_HERE, source.digest)
