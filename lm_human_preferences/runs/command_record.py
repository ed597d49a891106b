"""SAVE_DIR/train_*_commands.jsonl: which commands have worked on a run, and how each has ended.

A command has a line when it begins to work, one for each random seed that it draws or is given,
and another one when it ends, all with the same `id`. One that was killed lacks the last.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import os
import platform
import re
import resource
import shlex
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lm_human_preferences
from lm_human_preferences import storage
from lm_human_preferences.distributed import launch_methods
from lm_human_preferences.runs.run_files import COMMANDS, CommandFiles

SCRIPTS = ('launch.py', 'sample.py')
PACKAGES = ('torch', 'transformers', 'numpy')
_ROOT = Path(__file__).parents[2]  # of the project
_GIT_SECONDS = 5  # a checkout on a slow network drive is not waited for longer
_THIS_PROCESS = uuid.uuid4().hex[:12]


@contextlib.contextmanager
def recorded(directory: str, files: CommandFiles, machine: Mapping[str, Any]) -> Iterator[None]:
    """Within the block, this process does a command for a run: see begin and ended."""
    begin(directory, files, machine)
    with ended(directory, files):
        yield


def begin(directory: str, files: CommandFiles, machine: Mapping[str, Any]) -> None:
    """Write the line of the command that this process does, unless it has one already.

    directory: of the run, local. files: of the training that it is about. machine: what the command
    computes with. A file that cannot be written is told and ends nothing.
    """
    if _is_under_way(directory, files):
        return
    commit, is_clean = _commit()
    _append(
        directory,
        files,
        {
            'id': _THIS_PROCESS,
            'began': _now(),
            'command': typed(sys.argv),
            'launcher': type(launch_methods.current()).__name__,
            **machine,
            'python': platform.python_version(),
            'lm-human-preferences': lm_human_preferences.__version__,
            **{name: _version(name) for name in PACKAGES},
            'commit': commit,
            'commit_is_clean': is_clean,
        },
    )


def note_seed(directory: str, files: CommandFiles, network: str, seed: int | None) -> None:
    """Write the seed that `network` (its folder in the run) is trained with by this command."""
    _append(directory, files, {'id': _THIS_PROCESS, 'seeds': {network: seed}})


def seeds(commands: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """{network: the first seed that it was trained with} in what `read` returns."""
    found: dict[str, int] = {}
    for command in commands:
        for network, seed in command['seeds'].items():
            if isinstance(seed, int):
                found.setdefault(network, seed)
    return found


@contextlib.contextmanager
def ended(directory: str, files: CommandFiles) -> Iterator[None]:
    """With the block, write how the command that `begin` recorded within it has ended."""
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
        if _is_under_way(directory, files):
            own, children = (
                resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
            )
            _append(
                directory,
                files,
                {
                    'id': _THIS_PROCESS,
                    'ended': _now(),
                    'how': how,
                    'seconds': round(time.monotonic() - began, 1),
                    'processor_seconds': round(
                        own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime, 1
                    ),
                    'peak_gigabytes': round(own.ru_maxrss / 2**20, 3),
                    'peak_gpu_gigabytes': _peak_of_gpu(),
                },
            )


def typed(words: Sequence[str]) -> str | None:
    """The command line `words` as it can be typed in the project's folder, without keys of URLs.

    None for a program that is not one of this project's scripts.
    """
    script = os.path.basename(words[0])
    if script not in SCRIPTS:
        return None
    return shlex.join([f'./{script}', *map(without_key, words[1:])])


def without_key(text: str) -> str:
    """`text` without the user and the query of URLs in it, which may hold a key."""
    text = re.sub(r'(?<=://)[^/\s@]*@', '', text)
    return re.sub(r'(https?://[^\s?#]*)[?#]\S*', r'\1', text)


def read(directory: str) -> list[dict[str, Any]]:
    """The commands of a run, local or remote, in their order: what begin and end say of each.

    `seeds` {network: seed} is in each. One that has not ended, or was killed, has no `ended`. What
    is damaged is left out.
    """
    found = [command for files in COMMANDS.values() for command in _read(directory, files)]
    return sorted(found, key=lambda command: str(command['began']))


def _read(directory: str, files: CommandFiles) -> list[dict[str, Any]]:
    try:
        records = storage.readable_json_lines(storage.join(directory, files.commands))
    except storage.StorageError:  # there is none, or it is no text
        return []
    commands: dict[Any, dict[str, Any]] = {}
    found: list[dict[str, Any]] = []
    for record in records:
        if not isinstance(record, dict) or not isinstance(record.get('id'), str):
            continue
        if 'began' in record:
            commands[record['id']] = {**record, 'seeds': {}}
            found.append(commands[record['id']])
        elif record['id'] in commands:
            command = commands[record['id']]
            drawn = record.pop('seeds', None)
            command.update(record)
            command['seeds'].update(drawn if isinstance(drawn, dict) else {})
    return found


def _is_under_way(directory: str, files: CommandFiles) -> bool:
    own = [command for command in _read(directory, files) if command['id'] == _THIS_PROCESS]
    return bool(own) and 'ended' not in own[-1]


def _append(directory: str, files: CommandFiles, record: Mapping[str, Any]) -> None:
    path = os.path.join(directory, files.commands)
    try:
        with open(path, 'ab', buffering=0, opener=storage.open_nofollow) as file:
            storage.append(file, (json.dumps(record) + '\n').encode(), sync=False)
    except OSError as e:
        print(f'note: {path} cannot be written: {e.strerror}', file=sys.stderr)


def _now() -> str:
    return time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def _commit() -> tuple[str | None, bool | None]:
    """(the commit of this checkout, whether its files are as in it); None, None where unknown."""
    if not (_ROOT / '.git').exists():
        return None, None
    command = ['git', 'status', '--porcelain=v2', '--branch', '--untracked-files=no']
    try:
        done = subprocess.run(
            command,
            cwd=_ROOT,
            env={**os.environ, 'GIT_OPTIONAL_LOCKS': '0'},
            capture_output=True,
            text=True,
            timeout=_GIT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None, None
    lines = done.stdout.splitlines()
    commits = [line.split()[-1] for line in lines if line.startswith('# branch.oid ')]
    is_clean = all(line.startswith('#') for line in lines)
    return (commits[0], is_clean) if commits else (None, None)


def _peak_of_gpu() -> float | None:
    torch = sys.modules.get('torch')
    if torch is None or not torch.cuda.is_initialized():
        return None
    return round(torch.cuda.max_memory_allocated() / 2**30, 3)
