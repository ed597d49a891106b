"""File with a reward function of the user's, and its copy in the runs that learned from it.

A run may come from anywhere, and so may all that its files say. Code is run only if this user names
it now, or has named the same code on this machine before: `read` alone makes the mark of that.
"""

import dataclasses
import hashlib
import json
import os
import shlex
import stat
import sys
from typing import Any

from lm_human_preferences import storage
from lm_human_preferences.checkpointing.schema import matches_schema
from lm_human_preferences.errors import UserError
from lm_human_preferences.runs import run_files

OPTION = '--rewards.function'
_NAMED_HERE = 'reward_functions'  # folder of the cache: a file for each function that was named


@dataclasses.dataclass(frozen=True)
class Source:
    """A function in a file. name: FILE.py:FUNCTION. text: the file's. place: where it was named."""

    name: str
    text: str
    place: str = ''

    @property
    def path(self) -> str:
        """Return the path of the file, where the user has named it."""
        return self.place or _parts(self.name)[0]

    @property
    def function(self) -> str:
        """Name of the function in the file."""
        return _parts(self.name)[1]

    @property
    def digest(self) -> str:
        """SHA-256 of the file's text."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def key(self) -> str:
        """SHA-256 of all that is run: the file's text, and which of its names is called."""
        return hashlib.sha256(json.dumps([self.function, self.text]).encode()).hexdigest()


def is_one(name: str) -> bool:
    """Return whether `name` is that of a function rather than of a directory: FILE.py:FUNCTION."""
    path, _, function = name.rpartition(':')
    return path.endswith('.py') and function.isidentifier()


def read(name: str) -> Source:
    """Return the function that the user names now, which may be run here from now on."""
    source = _source(name)
    place = os.path.abspath(source.path)
    if _place_of(source) != place:
        mark = _mark_of(source)
        storage.make_cache_folder(os.path.dirname(mark))
        storage.write_bytes(mark, f'{source.key} {place}'.encode(), storage.open_private)
    return source


def note_if_one(word: object) -> None:
    """Let a function run from now on if this `word`, which the user has typed, names one."""
    if isinstance(word, str) and is_one(word) and os.path.isfile(word.rpartition(':')[0]):
        read(word)


def records(source: Source) -> dict[str, Any]:
    """Return the files of a run that say which function it learns from, {name: text, or JSON}."""
    return {
        run_files.FUNCTION: source.text,
        run_files.FUNCTION_RECORD: {'function': source.name, 'digest': source.digest},
    }


def function_of_training(name: str, directory: str | None, *, is_resumed: bool) -> Source:
    """Return the function that a training learns from: where its file is gone, the copy of it."""
    if not is_resumed:
        return read(name)
    path, _ = _parts(name)
    if directory is None or os.path.exists(path) or not run_files.has_reward_function(directory):
        return _as_named(_source(name))
    return function_of_run(directory)


def function_of_run(directory: str) -> Source:
    """Return the function that a run learned from; UserError if this code was never named here."""
    name, digest = _recorded(directory)
    copy = storage.join(directory, run_files.FUNCTION)
    source = Source(name, storage.read_text(copy))
    if source.digest != digest:
        raise UserError(
            f'{copy} is not the reward function that this run learned from: restore the file'
        )
    return _as_named(source, copy)


def check_resumed(directory: str, name: str, *, is_given: bool) -> None:
    """Raise UserError if a resumed run would learn from another function, unless it `is_given`."""
    if not run_files.has_reward_function(directory):
        return
    recorded, digest = _recorded(directory)
    path, function = _parts(name)
    is_kept = not is_given and not os.path.exists(path)
    if is_kept or _source(name).digest == digest:
        if not is_given:
            function_of_run(directory)  # UserError where this code was never named
        return
    if not is_given:
        copy = f'{os.path.join(directory, run_files.FUNCTION)}:{function}'
        raise UserError(
            f'{path} has changed since this run began: give {OPTION} {shlex.quote(name)} to go on'
            f' with the file as it is now, or {OPTION} {shlex.quote(copy)} with the copy of the run'
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
    if not matches_schema(record, {'function': str, 'digest': str}) or not is_one(
        record['function']
    ):
        raise UserError(f'{path} is not a record of a reward function')
    return record['function'], record['digest']


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


def _source(name: str) -> Source:
    path, _ = _parts(name)
    try:
        return Source(name, storage.read_text(path))
    except storage.NotFound:
        raise UserError(f'reward function {name}: no such file: {path}') from None
    except storage.StorageError as e:
        raise UserError(f'reward function {name}: {e}') from e


def _as_named(source: Source, copy: str = '') -> Source:
    """Return `source` at the place where the user named the same; UserError if that never was."""
    place = _place_of(source)
    if place:
        return dataclasses.replace(source, place=place)
    path, function = _parts(source.name)
    file = copy or path
    fetched = f'a copy of {file}' if storage.is_remote(file) else file
    raise UserError(
        f'the reward of this run is the function {source.name}, which you have not named on this'
        f' machine as it is, and code that comes with a run is not run: read {file}, and if you'
        f' trust it, put {fetched} at a path of yours and name that, as {OPTION} PATH:{function} of'
        f' resume, or once as --judge PATH:{function} of evaluate'
    )


def _mark_of(source: Source) -> str:
    """Return the path of the file that says that the user has named this code."""
    return os.path.join(storage.cache_root(), f'{_NAMED_HERE}-{os.geteuid()}', source.key)


def _place_of(source: Source) -> str:
    """Return the file in which the user has named this code; '' if never."""
    try:
        with open(_mark_of(source), 'rb', opener=storage.open_nofollow) as file:
            state = os.fstat(file.fileno())
            key, _, place = file.read().decode().partition(' ')
    except (OSError, UnicodeDecodeError):
        return ''
    # In a cache that several users share, others may have put it there or renamed it.
    is_own = state.st_uid == os.geteuid() and not state.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return place if is_own and key == source.key else ''
