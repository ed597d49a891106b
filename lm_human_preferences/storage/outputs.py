"""Output files and directories of commands, checked before the work begins."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator

from lm_human_preferences.errors import UserError, os_errors_as
from lm_human_preferences.storage.files import write_bytes
from lm_human_preferences.storage.paths import is_remote


def check_output_dir(directory: str) -> None:
    """Make the directory of --output_dir; UserError unless files can be written there."""
    if is_remote(directory):
        raise UserError(f'--output_dir: {directory} is remote; give a local directory')
    with translate_errors(directory):
        os.makedirs(directory, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass


def check_new_file(path: str) -> None:
    """Raise UserError unless a new file can be made at `path`."""
    directory = os.path.dirname(path) or '.'
    if path in ('', '-') or is_remote(path):
        raise UserError(f'{path!r}: give the name of a local file')
    if os.path.lexists(path):
        raise UserError(f'{path} exists: give another name')
    if not os.access(directory, os.W_OK | os.X_OK):
        raise UserError(f'{path!r}: there is no such directory, or you may not write there')


def write_file(path: str, data: bytes) -> None:
    """Write or replace a file atomically; UserError if that fails."""
    with os_errors_as(f'{path} cannot be written'):
        write_bytes(path, data)


@contextlib.contextmanager
def new_directory(path: str, *errors: type[Exception]) -> Iterator[None]:
    """Within the block, fill a new or empty directory; if that fails, leave nothing there.

    errors: exceptions that become UserErrors, as OSErrors do.
    """
    if is_remote(path):
        raise UserError(f'{path} is remote; give a local directory')
    is_new = not os.path.isdir(path)
    if os.path.lexists(path) and (is_new or os.listdir(path)):
        raise UserError(f'{path} is not empty: give a new directory')
    try:
        os.makedirs(path, exist_ok=True)
        yield
    except BaseException as e:
        with contextlib.suppress(OSError):
            for entry in os.scandir(path):
                shutil.rmtree(entry) if entry.is_dir() else os.remove(entry)
            if is_new:
                os.rmdir(path)
        if isinstance(e, (OSError, *errors)):
            reason = getattr(e, 'strerror', None) or e
            raise UserError(f'{path!r} cannot be written: {reason}') from e
        raise


def translate_errors(
    directory: str, fix: str = 'give another directory'
) -> contextlib.AbstractContextManager[None]:
    """Turn an OSError in the block into a UserError that names `directory` and the `fix`."""
    return os_errors_as(f'--output_dir: cannot write to {directory}', f'; {fix}')
