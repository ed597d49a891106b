"""Record of a run, SAVE_DIR/run.json: what the original program's settings files do not hold.

Only this module reads and writes the record, {command: entry}. A run of train_policy that trains
its reward model has entries of both trainings; a run of the original has no record. An entry holds

    experiment  name of the experiment, or null
    ranks       number of ranks when the training last began or was resumed
    settings    {option: value} of all options that the original does not have
    digests     {option: SHA-256} of given queries, a given reward model and a reward function
    labels      labels that a reward model learned from; in an online run, the last ones
    commands    commands that worked on the training, in their order

Only the entry of the command that was typed has `labels` and `commands`. Each of `commands` holds
the ranks, the launcher, the machine, versions of packages, and

    command           as it was typed; null if the user's own program ran
    began, ended      in UTC, as 2026-11-02T08:00:00Z; a killed or running command has no `ended`
    how, seconds      finished, interrupted, or failed: EXCEPTION; wall-clock time
    seeds             {folder of a network: seed}
"""

import contextlib
import copy
import functools
import glob
import heapq
import importlib.metadata
import os
import platform
import shlex
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lm_human_preferences import __version__, storage
from lm_human_preferences.distributed import launch_methods
from lm_human_preferences.errors import UserError
from lm_human_preferences.runs.run_files import COMMANDS, RECORD

SCRIPTS = ('launch.py', 'sample.py')
PACKAGES = ('torch', 'transformers', 'numpy')
_THIS_PROCESS = uuid.uuid4().hex[:12]
_EMPTY = {'ranks': 0, 'settings': {}, 'digests': {}, 'labels': {}, 'commands': []}
Record = Mapping[str, Mapping[str, Any]]  # content of run.json: an entry for each training command


def read(directory: str) -> dict[str, dict[str, Any]]:
    """Return the record of a local or remote run; {} if it has none; UserError if damaged."""
    path = storage.join(directory, RECORD)
    if not storage.exists(path):  # offline, a record that is not cached seems absent
        return {}
    record = storage.read_json(path)
    if not isinstance(record, dict) or not all(map(_is_entry, record.values())):
        raise UserError(f'{path} is damaged: it is not the record of a run')
    return record


def check_present(directory: str) -> None:
    """Raise UserError if a local run of this program (not of the original) lacks its record."""
    path = os.path.join(directory, RECORD)
    # Only this program writes .resume.json files beside checkpoints.
    if glob.glob(f'{glob.escape(directory)}/*/*/*.resume.json') and not os.path.exists(path):
        raise UserError(f'{path}, which holds settings of this run, is missing: restore it')


def _is_entry(entry: object) -> bool:
    if not isinstance(entry, dict):
        return False
    has_types = all(isinstance(entry.get(name, each), type(each)) for name, each in _EMPTY.items())
    return has_types and all(isinstance(command, dict) for command in entry.get('commands', []))


def training(directory: str, command: str) -> dict[str, Any]:
    """Return the record's entry for a training command, or an empty entry if there is none."""
    return {'experiment': None, **copy.deepcopy(_EMPTY), **read(directory).get(command, {})}


def labels(record: Record) -> dict[str, Any]:
    """Return the facts about labels in a run's record; {} if it learned from no labels."""
    found = [record.get(command, {}).get('labels') for command in COMMANDS]
    return next(filter(None, found), {})


def commands(record: Record) -> list[dict[str, Any]]:
    """Return the commands that have worked on a run, in the order in which they began."""
    found = [entry.get('commands', []) for entry in record.values()]
    return list(heapq.merge(*found, key=lambda command: str(command.get('began'))))


def processes(directory: str) -> set[str]:
    """Return the identifiers of the processes that have worked on a run."""
    return {str(command.get('id')) for command in commands(read(directory))}


def write_trainings(
    directory: str, entries: Mapping[str, Mapping[str, Any]], *, resume: bool
) -> None:
    """Record `entries` {command: entry} of training commands that begin or are resumed."""
    with _changed(directory) as record:
        for command, entry in entries.items():
            before = record.get(command, {})
            # Keep the earlier entry if the command is resumed, or if it trains its next model.
            is_kept = resume or _under_way(before) is not None
            record[command] = {**before, **entry} if is_kept else dict(entry)


def fetch(url: str, directory: str) -> None:
    """Copy the record of a remote run into its local directory."""
    with _changed(directory) as record:
        record |= read(url)


def write_labels(directory: str, command: str, about: Mapping[str, Any]) -> None:
    """Record facts about the labels that `command` learns from."""
    with _changed(directory) as record:
        record[command] = {**record.get(command, {}), 'labels': dict(about)}


def begin(
    directory: str,
    command: str,
    machine: Mapping[str, Any],
    seeds: Mapping[str, int | None] | None = None,
) -> None:
    """Record that this process works on a training. seeds: {network's folder: seed}.

    May be called again to add seeds of other networks. machine: facts about it to record.
    """
    beginning = {
        'id': _THIS_PROCESS,
        'command': typed(sys.argv),
        'began': _now(),
        'launcher': launch_methods.current().launcher,
        **machine,
        **versions(),
        'seeds': {},
    }
    with _changed(directory) as record:
        entry = record.setdefault(command, {})
        own = _under_way(entry)
        if own is None:
            own = beginning
            entry['commands'] = [*entry.get('commands', []), own]
        own['seeds'] |= seeds or {}


@contextlib.contextmanager
def ended(directory: str, command: str) -> Iterator[None]:
    """When the block is left, record how and when this process's command ended. See `begin`."""
    began = time.monotonic()
    how = 'finished'
    try:
        yield
    except KeyboardInterrupt:
        how = 'interrupted'
        raise
    except BaseException as e:
        how = f'failed: {type(e).__name__}'
        raise
    finally:
        end = {'ended': _now(), 'how': how, 'seconds': round(time.monotonic() - began, 1)}
        with contextlib.suppress(UserError):  # a full disk must not hide the command's own error
            if _under_way(training(directory, command)) is not None:
                with _changed(directory) as record:
                    (_under_way(record[command]) or {}).update(end)


def _under_way(entry: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the facts about the command that this process is running; None if not recorded."""
    for command in entry.get('commands', []):
        if command.get('id') == _THIS_PROCESS and 'ended' not in command:
            return command
    return None


@contextlib.contextmanager
def _changed(directory: str) -> Iterator[dict[str, dict[str, Any]]]:
    """Yield a run's record for changes, then write it; the directory is locked meanwhile."""
    path = os.path.join(directory, RECORD)
    os.makedirs(directory, exist_ok=True)
    with storage.locked_folder(directory):
        record = read(directory)
        yield record
        storage.write_json(path, record)


def typed(words: Sequence[str]) -> str | None:
    """Return the command line of `words`; None if words[0] is no script of this program."""
    script = os.path.basename(words[0])
    return shlex.join([f'./{script}', *words[1:]]) if script in SCRIPTS else None


def _now() -> str:
    return time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())


@functools.cache  # reading the versions of packages takes 30 ms
def versions() -> dict[str, str]:
    """Return {name: version} of this program, of Python and of PACKAGES."""
    own = {'lm-human-preferences': __version__, 'python': platform.python_version()}
    return own | {name: importlib.metadata.version(name) for name in PACKAGES}
