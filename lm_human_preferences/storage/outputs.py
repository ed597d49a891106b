"""Where a command leaves its results: checked before hours of work, explained where writing
fails."""

import contextlib
import os
import tempfile
from collections.abc import Iterator

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError


def check_output_dir(directory: str, *names: str) -> None:
    """Raise UserError, which names --output_dir, unless files `names` can be written there.

    Makes the directory if need be. Only a file that is made on trial tells: root may write
    anywhere by its rights, and still cannot on a read-only disk or under /proc.
    """
    if storage.is_remote(directory):
        raise UserError(f'--output_dir: {directory} is remote; give a local directory')
    with explained(directory):
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


@contextlib.contextmanager
def explained(directory: str, fix: str = 'give another directory') -> Iterator[None]:
    """Within the block, where `directory` cannot be written, the error says so, and the `fix`."""
    try:
        yield
    except OSError as e:
        raise UserError(
            f'--output_dir: cannot write to {directory}: {e.strerror or e}; {fix}'
        ) from e


def write(directory: str, name: str, data: bytes) -> None:
    """Write `data` to file `name` in `directory`, which is made; all appears, or nothing."""
    os.makedirs(directory, exist_ok=True)
    with storage.atomic_write(os.path.join(directory, name)) as (file,):
        file.write(data)
