"""The user's reward function, FILE.py:FUNCTION, and the copy of its file in a run.

A run may come from anywhere, so code that its files name or contain is never executed: a function
runs only if an option of the current command names it. The copy is for people to read.
"""

import dataclasses
import functools
import hashlib
import shlex

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError
from lm_human_preferences.runs import run_files, run_record
from lm_human_preferences.utils.streams import note

NAME = 'rewards.function'  # name of the option that gives a reward function


@dataclasses.dataclass(frozen=True)
class Source:
    """Source of a reward function. name: FILE.py:FUNCTION. text: content of the file."""

    name: str
    text: str

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the file's text."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def is_one(name: str) -> bool:
    """Return whether `name` has the form FILE.py:FUNCTION of a reward function."""
    path, _, function = name.rpartition(':')
    return path.endswith('.py') and function.isidentifier()


@functools.cache
def read(name: str) -> Source:
    """Return the source of the reward function `name`; its file is read only once per process.

    So editing the file during a training does not change the evaluation at the training's end.
    """
    path, _, _ = name.rpartition(':')
    if not is_one(name):
        raise UserError(
            f'reward function {name}: give FILE.py:FUNCTION, for example my_reward.py:score'
        )
    if storage.is_remote(path):
        raise UserError(f'reward function {name}: code is only run from a file on this machine')
    return Source(name, storage.read_text(path))


def check_named(run: str, recorded: str, named: str | None) -> None:
    """Raise UserError if no option names a reward function for a run that needs one.

    recorded: the run's function. named: the option's value. Print a note if the file has changed.
    """
    copy = storage.join(run, run_files.FUNCTION)
    if named is None:
        raise UserError(
            f'{run} learns from a reward function, which runs only if the command names the'
            f' function: repeat --{NAME} {shlex.quote(recorded)} (to read the code, see the'
            f' copy {copy})'
        )
    digest = run_record.training(run, run_files.POLICY.command)['digests'].get(NAME)
    if digest not in (None, read(named).digest):
        note(f'note: {named} has changed since this run began; see {copy}')
