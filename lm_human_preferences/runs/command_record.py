"""SAVE_DIR/train_*_commands.jsonl: commands that have worked on a run, and how each has ended."""

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
    """Write the line of this process's command, unless it has one; machine: extra entries."""
    if _is_under_way(directory, files):
        return
    commit, is_clean = _commit()
    beginning = {
        'id': _THIS_PROCESS,
        'began': _now(),
        'command': typed(sys.argv),
        'launcher': launch_methods.current().launcher,
        **machine,
        'python': platform.python_version(),
        'lm-human-preferences': lm_human_preferences.__version__,
        **{name: _version(name) for name in PACKAGES},
        'commit': commit,
        'commit_is_clean': is_clean,
    }
    _append(directory, files, beginning)


def note_seed(directory: str, files: CommandFiles, network: str, seed: int | None) -> None:
    """Write the seed that `network` (its folder in the run) is trained with by this command."""
    _append(directory, files, {'id': _THIS_PROCESS, 'seeds': {network: seed}})


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
            own = resource.getrusage(resource.RUSAGE_SELF)
            children = resource.getrusage(resource.RUSAGE_CHILDREN)
            processor_seconds = own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
            end = {
                'id': _THIS_PROCESS,
                'ended': _now(),
                'how': how,
                'seconds': round(time.monotonic() - began, 1),
                'processor_seconds': round(processor_seconds, 1),
                'peak_gigabytes': round(own.ru_maxrss / 2**20, 3),
                'peak_gpu_gigabytes': _peak_of_gpu(),
            }
            _append(directory, files, end)


def typed(words: Sequence[str]) -> str | None:
    """Return the command line `words` without keys of URLs; None unless it is one of ours."""
    script = os.path.basename(words[0])
    if script not in SCRIPTS:
        return None
    return shlex.join([f'./{script}', *map(without_key, words[1:])])


def without_key(text: str) -> str:
    """Remove user and query of URLs in `text`, which may hold a key."""
    text = re.sub(r'(?<=://)[^/\s@]*@', '', text)
    return re.sub(r'(https?://[^\s?#]*)[?#]\S*', r'\1', text)


def read(directory: str) -> list[dict[str, Any]]:
    """Return a run's commands, with `seeds` {network: seed} and, if it has ended, `ended`."""
    found = [command for files in COMMANDS.values() for command in _read(directory, files)]
    return sorted(found, key=lambda command: str(command['began']))


def _read(directory: str, files: CommandFiles) -> list[dict[str, Any]]:
    try:
        records = storage.readable_json_lines(storage.join(directory, files.commands))
    except storage.StorageError:  # there is none, or it is not text
        return []
    latest: dict[Any, dict[str, Any]] = {}
    found = []
    for record in records:
        if not isinstance(record, dict) or not isinstance(record.get('id'), str):
            continue
        command = latest.get(record['id'])
        if 'began' in record:
            latest[record['id']] = {**record, 'seeds': {}}
            found.append(latest[record['id']])
        elif command is not None:
            drawn = record.pop('seeds', None)
            command['seeds'] |= drawn if isinstance(drawn, dict) else {}
            command.update(record)
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
    """Return (commit of this checkout, whether its files are as in it); None where unknown."""
    if not (_ROOT / '.git').exists():
        return None, None
    try:
        described = subprocess.check_output(
            ['git', 'describe', '--always', '--abbrev=40', '--exclude=*', '--dirty'],
            cwd=_ROOT,
            env={**os.environ, 'GIT_OPTIONAL_LOCKS': '0'},
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=_GIT_SECONDS,
        )
    except (OSError, subprocess.SubprocessError):
        return None, None
    commit = described.strip()
    return commit.removesuffix('-dirty'), not commit.endswith('-dirty')


def _peak_of_gpu() -> float | None:
    torch = sys.modules.get('torch')
    if torch is None or not torch.cuda.is_initialized():
        return None
    return round(torch.cuda.max_memory_allocated() / 2**30, 3)
