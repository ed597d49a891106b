"""Upload of a run to remote storage, in an order that keeps all listed checkpoints complete."""

import contextlib
import io
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from lm_human_preferences import errors, storage
from lm_human_preferences.checkpointing import names
from lm_human_preferences.errors import UserError, about_option
from lm_human_preferences.runs import run_record
from lm_human_preferences.runs.run_files import EVALUATION, RECORD


def is_up_to_date(url: str, directory: str) -> bool:
    """Return whether `directory` has a run's newest state: no other machine continued the run."""
    return os.path.isdir(directory) and run_record.processes(url) <= run_record.processes(directory)


def fetch(url: str, directory: str, pattern: re.Pattern[str]) -> None:
    """Download files that match `pattern`, but no data of checkpoints older than the last two."""
    for path in storage.local_files(directory, pattern):
        os.remove(os.path.join(directory, path))
    remote = [path for path in storage.listing(url) if pattern.fullmatch(path)]
    with_values = set()
    for path in filter(_is_list, remote):
        # If the last checkpoint is from the middle of a step, a run resumes from the one before.
        with_values.update(_listed(path, storage.read_text(storage.join(url, path)))[-2:])
    # Download the record last, because a directory with a record counts as up to date.
    for path in sorted(remote, key=lambda path: path == RECORD):
        if not path.endswith(names.DATA) or _stem(path) in with_values:
            target = os.path.join(directory, path)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.replace(storage.cached_path(storage.join(url, path)), target)


def upload(url: str, directory: str, pattern: re.Pattern[str]) -> None:
    """Upload changed files that match `pattern`, and delete remote files that no longer exist here.

    Settings are uploaded before checkpoints, and the lists of checkpoints last, so that an error at
    any point leaves the listed checkpoints whole. Remote evaluations and reports are kept.
    """
    found = storage.listing(url)
    remote = {path: found[path] for path in found if pattern.fullmatch(path)}
    local = storage.local_files(directory, pattern)
    lists = list(filter(_is_list, local))
    listed = set()
    for path in lists:
        listed.update(_listed(path, Path(directory, path).read_text(encoding='utf-8')))

    def differs(path: str) -> bool:
        file = os.path.join(directory, path)
        return (os.path.getsize(file), storage.md5(file)) != remote.get(path)

    changed = [path for path in local if path not in lists and differs(path)]
    # Delete the remote lists of checkpoints before replacing a checkpoint that a list may name.
    if any(_stem(path) and path in remote for path in changed):
        for path in filter(_is_list, list(remote)):
            storage.remove(storage.join(url, path))
            del remote[path]
    for path in [*sorted(changed, key=_order), *filter(differs, lists)]:
        with open(os.path.join(directory, path), 'rb') as file:
            storage.write(storage.join(url, path), file)
    for path in sorted(remote, key=_order, reverse=True):
        is_kept = _stem(path) in listed or re.fullmatch(EVALUATION, path)
        if path not in local and not is_kept:
            storage.remove(storage.join(url, path))


def _is_list(path: str) -> bool:
    """Return whether the file at `path` is a list of checkpoints."""
    return os.path.basename(path) == names.LIST


def _order(path: str) -> int:
    """Return a sort key that puts checkpoints after other files, and lists of checkpoints last."""
    return 2 if _is_list(path) else int(_stem(path) is not None)


def _stem(path: str) -> str | None:
    """Return the checkpoint that a file belongs to, as a path without suffix, or None."""
    match = names.FILE.fullmatch(os.path.basename(path))
    return match and os.path.join(os.path.dirname(path), match[1])


def _listed(path: str, text: str) -> list[str]:
    """Parse `text`, the list of checkpoints in the file `path`; return the checkpoints' paths."""
    directory = os.path.dirname(path)
    return [os.path.join(directory, name) for name in names.parse_checkpoint_file(text)]


@contextlib.contextmanager
def uploaded(url: str, directory: str, pattern: re.Pattern[str]) -> Iterator[Callable[[], None]]:
    """Yield a function that uploads `directory` to `url`, and prints a warning if that fails.

    After the block, upload the rest; UserError if that fails, otherwise the directory is deleted.
    """
    place = storage.join(url, 'access')  # this file only tests whether uploads are allowed
    with about_option('--save_dir', storage.StorageError):
        storage.write(place, io.BytesIO())
        storage.remove(place)

    def finish() -> None:
        """Upload changed files; if that fails, raise a UserError that shows the resume command."""
        try:
            upload(url, directory, pattern)
        except (UserError, OSError) as e:
            raise UserError(
                f'{url} is not complete: {e}; the whole run is in {directory}: to upload the'
                f' rest, type `{errors.typed("./launch.py resume", url)}` on this machine'
            ) from e

    def try_to_finish() -> None:
        """Upload what is missing; print a warning if that fails."""
        from lm_human_preferences.utils.logging import announce  # loading numpy would delay --help

        try:
            finish()
        except UserError as e:
            announce(f'WARNING: {e}')

    try:
        yield try_to_finish
    except BaseException:
        try_to_finish()
        raise
    finish()
    shutil.rmtree(directory)
