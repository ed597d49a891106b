"""Commands for the user to type in the shell that started this program; imports no library."""

import importlib.util
import os
import shlex
import shutil
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[1]  # folder of the project


def typed(command: str, *words: str) -> str:
    """Return `command` and quoted `words` as the user can type them in the project's folder."""
    command = ' '.join([command, *map(shlex.quote, words)])
    folder = os.path.dirname(sys.executable)
    if _is_active(folder):
        return command
    if command.startswith('./'):
        return f'{shlex.quote(sys.executable)} {command}'
    return os.path.join(shlex.quote(folder), command)


def option_words(name: str, value: object) -> list[str]:
    """Return the words that give the option `name` this value, not yet quoted."""
    text = str(value)
    return [f'--{name}={text}'] if text.startswith('-') else [f'--{name}', text]


def _is_active(folder: str) -> bool:
    """Return whether `#!/usr/bin/env python3` means the Python in `folder` in the user's shell."""
    python = shutil.which('python3')
    # pipenv put its folder first in PATH for this process only.
    if python is None or 'PIPENV_ACTIVE' in os.environ:
        return False
    return os.path.realpath(os.path.dirname(python)) == os.path.realpath(folder)


def require(module: str) -> None:
    """Exit with one line and status 2 unless this Python has the package `module`."""
    if module not in sys.modules and importlib.util.find_spec(module) is None:
        print(f'error: {missing(module)}', file=sys.stderr)
        sys.exit(2)


def missing(module: str) -> str:
    """Return a line for the user about a package that this Python lacks."""
    environment = shlex.quote(os.path.relpath(_ROOT / '.venv'))
    return (
        f'{sys.executable} has no module {module!r}: `sh tools/setup.sh` installs what this program'
        f' needs into .venv, and `. {environment}/bin/activate` makes this shell use it'
    )
