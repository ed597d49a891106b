"""Files that a command leaves where the user says: checked before hours of work, not after them."""

import contextlib
import os
import tempfile
from collections.abc import Iterator

from lm_human_preferences.errors import UserError
from lm_human_preferences.storage.files import write_bytes
from lm_human_preferences.storage.paths import is_remote


def check_output_dir(directory: str, *names: str) -> None:
    """UserError, which names --output_dir, unless the files `names` can be written there.

    Makes the directory if need be. Permissions alone do not tell: root has all of them, and still
    cannot write to a read-only disk or below /proc. So a temporary file is made on trial.
    """
    if is_remote(directory):
        raise UserError(f'--output_dir: {directory} is remote; give a local directory')
    with translate_errors(directory):
        os.makedirs(directory, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    for name in names:
        path = os.path.join(directory, name)
        if os.path.isdir(path):
            raise UserError(
                f'--output_dir: {path} is a directory, so no file of that name can be '
                'written; give another directory'
            )


def check_new_file(path: str) -> None:
    """UserError unless a file can be made at `path`: none is overwritten."""
    directory = os.path.dirname(path) or '.'
    if is_remote(path):
        raise UserError(f'{path}: give a local path')
    if os.path.lexists(path):
        raise UserError(f'{path} exists: give another name')
    if not os.path.isdir(directory):
        raise UserError(f'{path}: there is no directory {directory}')
    if not path or not os.access(directory, os.W_OK | os.X_OK):
        raise UserError(f'{path!r}: you may not write there, give another name')


def write_file(path: str, data: bytes) -> None:
    """Write a file at once, replacing one that is there; UserError where that cannot be done."""
    try:
        write_bytes(path, data)
    except OSError as e:
        raise UserError(f'{path} cannot be written: {e.strerror or e}') from e


@contextlib.contextmanager
def translate_errors(directory: str, fix: str = 'give another directory') -> Iterator[None]:
    """Within the block, failing to write to `directory` is a UserError that tells the `fix`."""
    try:
        yield
    except OSError as e:
        raise UserError(
            f'--output_dir: cannot write to {directory}: {e.strerror or e}; {fix}'
        ) from e
