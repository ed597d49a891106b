"""Messages between our launcher and its ranks, through files in a private directory.

job.json   the function to call, and its arguments
rank-r     named pipe: rank r reports its status, one JSON object a line, at least every second or
           so; when it closes, the launcher is gone
life-r     named pipe that stays empty, and closes when rank r ends. These close in the order in
           which ranks end; a pipe with an unread report would be ready before
crash-r    Python stacks of all threads of a rank that crashed
"""

import contextlib
import importlib
import json
import os
import re
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

_READING = os.O_RDONLY | os.O_NONBLOCK
_FATAL = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV)
_CRASHES = {signal.strsignal(number): number for number in _FATAL}  # by faulthandler's first words


@dataclass(frozen=True)
class RankStatus:
    """Status reported by a rank. error: the text to print, of a UserError its message."""

    process: int | None = None
    error: str | None = None
    is_user_error: bool = False
    is_interrupt: bool = False
    done: bool = False


def write_job(directory: str, **job: Any) -> None:
    """Write a job for the ranks; settings are written with the name of their class."""
    text = json.dumps(job, default=_written)
    Path(directory, 'job.json').write_text(text, encoding='utf-8')


def read_job(directory: str) -> dict[str, Any]:
    text = Path(directory, 'job.json').read_text(encoding='utf-8')
    return json.loads(text, object_hook=_settings_or_dict)


def _written(settings: Any) -> dict[str, Any]:
    kind = type(settings)
    values = settings.to_nested_dict(with_unknown=True)
    return {'class': [kind.__module__, kind.__name__], 'values': values}


def _settings_or_dict(found: dict[str, Any]) -> Any:
    """Return settings if `found` is what `_written` has made of them, else `found`."""
    if found.keys() != {'class', 'values'}:
        return found
    module, name = found['class']
    settings = getattr(importlib.import_module(module), name)()
    settings.override_from_nested_dict(found['values'], keep_unknown=True)
    return settings


def remove(directory: str) -> bool:
    """Delete the directory of a job; False if another rank does."""
    ended = f'{directory}.ended'  # so that no rank makes a file in it meanwhile
    try:
        os.rename(directory, ended)
    except OSError:
        return False
    shutil.rmtree(ended, ignore_errors=True)
    return True


def open_for_launcher(directory: str, rank: int) -> tuple[int, int]:
    """Make the pipes of `rank`; return the file descriptors to read from: (status, life)."""
    status, life = _pipe_paths(directory, rank)
    for path in (status, life):
        os.mkfifo(path, 0o600)
    return os.open(status, _READING), os.open(life, _READING)


def _pipe_paths(directory: str, rank: int) -> tuple[str, str]:
    return os.path.join(directory, f'rank-{rank}'), os.path.join(directory, f'life-{rank}')


def _crash_path(directory: str, rank: int) -> Path:
    return Path(directory, f'crash-{rank}')


def read_crash(directory: str, rank: int) -> tuple[signal.Signals | None, str]:
    """Return (signal, stacks of all threads) of a `rank` that crashed; else (None, '')."""
    try:
        text = _crash_path(directory, rank).read_text(encoding='utf-8', errors='replace')
    except FileNotFoundError:  # it ended before it could crash
        return None, ''
    reason = re.match('Fatal Python error: (.*)', text)
    return (_CRASHES.get(reason[1].replace('-', ' ')), text) if reason else (None, text)


class StatusPipe:
    """Rank's end of its pipes to the launcher that prepared `directory`."""

    def __init__(self, directory: str, rank: int) -> None:
        self.directory = directory
        self.rank = rank
        status, life = _pipe_paths(directory, rank)
        # Without blocking, as this must fail where no launcher listens any more.
        self.life = os.open(life, os.O_WRONLY | os.O_NONBLOCK)
        self.fd = os.open(status, os.O_WRONLY | os.O_NONBLOCK)
        os.set_blocking(self.fd, True)
        self.report(process=os.getpid())

    def report(self, **changes: object) -> None:
        """Set fields of this rank's `RankStatus`; none is a sign of life."""
        line = json.dumps(changes).encode() + b'\n'
        with contextlib.suppress(BrokenPipeError):
            os.write(self.fd, line)

    def open_crash_file(self) -> TextIO:
        """Open the file that faulthandler writes and the launcher reads."""
        return _crash_path(self.directory, self.rank).open('w', encoding='utf-8')
