"""What our launcher and the ranks that it starts tell each other, through a private directory.

`job.json` in it says what to do. Rank r reports its status through the named pipe `rank-r`, one
JSON object a line, at least every second or so. So the launcher learns which rank failed first, and
how, and which has been stopped; and a rank learns when the launcher is gone.

The pipe `life-r` stays empty: rank r keeps it open for as long as it lives. The launcher learns of
these pipes' closing in the order in which the ranks ended. The other pipes would not tell: one with
a report that is still unread is ready already when its rank ends.

A rank that crashes leaves the Python stacks of its threads in the file `crash-r`.
"""

import contextlib
import json
import os
import re
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

# By the words with which faulthandler begins.
_CRASHES = {
    'Aborted': signal.SIGABRT,
    'Bus error': signal.SIGBUS,
    'Floating point exception': signal.SIGFPE,
    'Floating-point exception': signal.SIGFPE,
    'Illegal instruction': signal.SIGILL,
    'Segmentation fault': signal.SIGSEGV,
}


@dataclass(frozen=True)
class Job:
    """What the ranks are to do.

    name: 'module:function'. arguments: the function's, by keyword; options as nested dicts.
    columns: width of the terminal that shows the output, None where it is no terminal. typed: the
    words of the command, whose first is the script.
    """

    name: str
    arguments: dict[str, Any]
    columns: int | None
    typed: list[str]


@dataclass(frozen=True)
class RankStatus:
    """What a rank has reported of itself.

    error: what ended it, to be printed; is_user_error: a `UserError`, whose message is enough.
    is_interrupt: a KeyboardInterrupt, of which the user knows.
    """

    process: int | None = None
    error: str | None = None
    is_user_error: bool = False
    is_interrupt: bool = False
    done: bool = False


def write_job(directory: str, job: Job) -> None:
    """Write `job` for the ranks to read."""
    text = json.dumps(vars(job), default=lambda hparams: hparams.to_nested_dict())
    _job_path(directory).write_text(text, encoding='utf-8')


def read_job(directory: str) -> Job:
    """The job that the launcher has written."""
    return Job(**json.loads(_job_path(directory).read_text(encoding='utf-8')))


def _job_path(directory: str) -> Path:
    return Path(directory, 'job.json')


def remove(directory: str) -> bool:
    """Delete the directory of a job, for its ranks; False if another one of them does.

    It gets another name first, so that no rank makes a file in it meanwhile.
    """
    ended = f'{directory}.ended'
    try:
        os.rename(directory, ended)
    except OSError:
        return False
    shutil.rmtree(ended, ignore_errors=True)
    return True


def open_for_launcher(directory: str, rank: int) -> tuple[int, int]:
    """Make the pipes of `rank`; returns the file descriptors to read from: (status, life)."""
    status, life = _pipe_paths(directory, rank)
    return _make_pipe(status), _make_pipe(life)


def _make_pipe(path: str) -> int:
    os.mkfifo(path, 0o600)
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK)


def _pipe_paths(directory: str, rank: int) -> tuple[str, str]:
    return os.path.join(directory, f'rank-{rank}'), os.path.join(directory, f'life-{rank}')


def _crash_path(directory: str, rank: int) -> Path:
    return Path(directory, f'crash-{rank}')


def read_crash(directory: str, rank: int) -> tuple[signal.Signals | None, str]:
    """What ended `rank` if it crashed: (the signal, the stacks of its threads); else (None, '')."""
    try:
        text = _crash_path(directory, rank).read_text(encoding='utf-8', errors='replace')
    except FileNotFoundError:  # it ended before it could crash
        return None, ''
    reason = re.match('Fatal Python error: (.*)', text)
    return (_CRASHES.get(reason[1]), text) if reason else (None, text)


class StatusPipe:
    """A rank's end of its pipes to the launcher that prepared `directory`."""

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
        """Set fields of this rank's `RankStatus`; none at all is a sign of life."""
        line = json.dumps(changes).encode() + b'\n'
        with contextlib.suppress(BrokenPipeError):
            os.write(self.fd, line)

    def open_crash_file(self) -> TextIO:
        """Where faulthandler is to write, for the launcher to read."""
        return _crash_path(self.directory, self.rank).open('w', encoding='utf-8')
