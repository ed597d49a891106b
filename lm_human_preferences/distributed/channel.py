"""What our launcher and the ranks that it starts tell each other, through a private directory.

`job.json` in it says what to do. Rank r keeps the named pipe `rank-r` open for as long as it lives
and reports its status through it, one JSON object a line, at least every second or so. So the
launcher learns which rank failed first, and how, and which has been stopped; and a rank learns when
the launcher is gone.
"""

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Job:
    """What the ranks are to do.

    name: 'module:function'. arguments: the function's, by keyword; options as nested dicts.
    columns: width of the terminal that shows the output, None where it is no terminal.
    """

    name: str
    arguments: dict[str, Any]
    columns: int | None


@dataclass(frozen=True)
class RankStatus:
    """What a rank has reported of itself.

    error: what ended it, to be printed; is_user_error: a `UserError`, whose message is enough.
    """

    process: int | None = None
    error: str | None = None
    is_user_error: bool = False
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


def open_for_launcher(directory: str, rank: int) -> int:
    """Make the pipe of `rank`; returns the file descriptor from which the launcher reads."""
    path = _pipe_path(directory, rank)
    os.mkfifo(path, 0o600)
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK)


def _pipe_path(directory: str, rank: int) -> str:
    return os.path.join(directory, f'rank-{rank}')


class StatusPipe:
    """A rank's end of its pipe to the launcher that prepared `directory`."""

    def __init__(self, directory: str, rank: int) -> None:
        self.directory = directory
        # Without blocking, as this must fail where no launcher listens any more.
        self.fd = os.open(_pipe_path(directory, rank), os.O_WRONLY | os.O_NONBLOCK)
        os.set_blocking(self.fd, True)
        self.report(process=os.getpid())

    def report(self, **changes: object) -> None:
        """Set fields of this rank's `RankStatus`; none at all is a sign of life."""
        line = json.dumps(changes).encode() + b'\n'
        with contextlib.suppress(BrokenPipeError):
            os.write(self.fd, line)
