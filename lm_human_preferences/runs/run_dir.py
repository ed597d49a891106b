"""Directory of a run: checks before a run begins or resumes, the lock, and resume hints."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import time
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING

from lm_human_preferences import storage
from lm_human_preferences.checkpointing import names
from lm_human_preferences.distributed import launch_methods
from lm_human_preferences.errors import UserError, os_errors_as
from lm_human_preferences.runs import run_files, run_record, run_settings, uploads
from lm_human_preferences.runs.run_files import LOCK, POLICY, REWARD
from lm_human_preferences.utils import stop_signals

if TYPE_CHECKING:
    from lm_human_preferences.distributed.comm import Comm
    from lm_human_preferences.hparams.policy_options import Training

_HOST = socket.gethostname()


def check_directory(directory: str) -> None:
    """Raise UserError if `directory` cannot safely hold a run."""
    existing = storage.existing_part(directory)
    if not (os.path.isdir(existing) and os.access(existing, os.W_OK | os.X_OK)):
        raise UserError(f'--save_dir: {existing} is not a directory that you may write to')
    for folder, names_there, _ in os.walk(directory):
        for path in (os.path.join(folder, name) for name in names_there):
            if os.path.islink(path) and not storage.is_within(path, directory):
                raise UserError(
                    f'--save_dir: {path} is a link to a folder outside of the run, where training'
                    ' would write and delete files: replace the link by the folder itself'
                )
    if danger := storage.open_to_others(directory):
        raise UserError(f'--save_dir: {danger}: give a folder inside a directory of your own')


def own_files(hparams: Training) -> list[str]:
    """Return paths and URLs of a run's existing files, including partially written ones."""
    pattern = run_files.written_by(hparams.commands, r'(\.\d+\.part)?')
    directory, save_dir = hparams.run.directory, hparams.run.save_dir
    assert directory is not None and save_dir is not None
    files = [os.path.join(directory, name) for name in storage.local_files(directory, pattern)]
    if storage.is_remote(save_dir):
        remote = filter(pattern.fullmatch, storage.listing(save_dir))
        # Lists of checkpoints come first, since they must be deleted before the checkpoints.
        for name in sorted(remote, key=lambda name: not name.endswith(f'/{names.LIST}')):
            files.append(storage.join(save_dir, name))
    return files


def has_begun(hparams: Training) -> bool:
    """Return whether the directory holds a run to resume, with complete settings."""
    return any(not path.endswith(('.part', run_files.RECORD)) for path in own_files(hparams))


def refuse_existing(hparams: Training, *, overwrite: bool = False) -> None:
    """Raise UserError if an earlier run is in the directory, unless it may be overwritten."""
    if not has_begun(hparams):
        return
    directory = str(hparams.run.save_dir)
    if launch_methods.current().was_restarted:
        raise UserError(
            f'{directory} holds what this run had saved before torchrun or Slurm restarted it:'
            ' to go on from there, give --run.resume on instead of --overwrite'
        )
    if not overwrite:
        command = run_settings.resume_command(hparams)
        raise UserError(
            f'{directory} holds a run already: resume it by `{command}`,'
            ' use another NAME, or give --overwrite to delete it and start anew'
        )
    for path in filter(run_files.is_of_answers, own_files(hparams)):
        lines = storage.read_text(path).splitlines()
        if not all('"simulated": true' in line for line in lines):
            raise UserError(
                f'--overwrite would delete the answers of people in {path}: move the folder away,'
                ' or delete it'
            )


def prepare_run_dir(
    hparams: Training, *, overwrite: bool, explicitly_set: Collection[str], dry_run: bool = False
) -> list[str]:
    """Check that a run can begin or resume in its directory; delete a run to be overwritten.

    dry_run: delete nothing and ask no server; return the options that are not checked.
    """
    directory, save_dir = hparams.run.directory, hparams.run.save_dir
    if directory is None or save_dir is None or launch_methods.current().rank:
        return []
    check_directory(directory)
    check_free(directory)
    if overwrite and hparams.run.resume:
        raise UserError('--overwrite and --run.resume contradict each other: give one of them')
    if storage.is_remote(save_dir) and dry_run:
        return [f'--save_dir {save_dir}']
    if hparams.run.resume:
        fetch_run_dir(save_dir)
        run_settings.check_settings(hparams, explicitly_set)
        return []
    refuse_existing(hparams, overwrite=overwrite)
    for path in own_files(hparams) if overwrite and not dry_run else ():
        if not path.endswith(run_files.RECORD):  # keep run.json: it may record other commands
            storage.remove(path)
    return []


def fetch_run_dir(save_dir: str) -> str:
    """Return a run's local directory, with all files downloaded; UserError if the run is in use."""
    directory = storage.staging_dir(save_dir)
    if directory == save_dir or launch_methods.current().rank:
        return save_dir
    if not uploads.is_up_to_date(save_dir, directory):
        with held(directory, ranks=1):
            uploads.fetch(save_dir, directory, run_files.written_by(run_files.COMMANDS))
    return directory


@contextlib.contextmanager
def lock_run_dir(hparams: Training, comm: Comm) -> Iterator[Callable[[], None] | None]:
    """Lock a run's directory, so that only this job writes there, and record how the run ends.

    Yield a function that uploads the directory (None if SAVE_DIR is local, or not on rank 0).
    UserError if another job writes there, or has left a run that would be overwritten.
    """
    directory, save_dir = hparams.run.directory, str(hparams.run.save_dir)
    upload = None
    with contextlib.ExitStack() as stack:
        if directory is not None:
            check_directory(directory)
        if directory is not None and comm.rank == 0:
            handled = stop_signals.handled(stop_signals.interrupt, *stop_signals.TO_STOP)
            stack.enter_context(handled)
            stack.enter_context(held(directory, comm.size))
            if not hparams.run.resume:
                refuse_existing(hparams)
            for path in own_files(hparams):
                if path.endswith('.part'):
                    storage.remove(path)
            if storage.is_remote(save_dir):
                if not hparams.run.resume:
                    run_record.fetch(save_dir, directory)  # keep earlier records in run.json
                files = run_files.uploaded_by(hparams.commands)
                upload = stack.enter_context(uploads.uploaded(save_dir, directory, files))
            stack.enter_context(run_record.ended(directory, hparams.command))
        yield upload
        comm.on_rank_0(stack.close)  # all ranks wait for the last uploads, which may take long


def resume_hint(hparams: Training) -> str:
    """Return a line that says what an interrupted run has saved, and the command to resume it."""
    directory = hparams.run.directory
    if directory is None:
        return 'Nothing is saved, because --save_dir is None.'
    if not has_begun(hparams):
        return 'Nothing is saved yet; the same command starts again.'
    command = run_settings.resume_command(hparams)
    networks = [REWARD.member_files(number) for number in range(hparams.members)]
    if hparams.command == POLICY.command:
        networks.append(POLICY)
    saved = 'No step is saved yet'
    for files in networks:
        steps = names.resumable(os.path.join(directory, files.unfinished))
        if steps:
            network = files.network.replace('_', ' ')
            saved = f'Step {names.step_of(steps[0])} of the {network} is saved'
    return f'{saved}; to go on from there: {command}'


def ranks_of(directory: str | None) -> int | None:
    """Return the number of ranks of a run's last command; None if unknown or set by a launcher."""
    if directory is None or launch_methods.current().decides_size:
        return None
    ranks = [entry.get('ranks', 0) for entry in run_record.read(directory).values()]
    return next((number for number in ranks if number > 0), None)


@contextlib.contextmanager
def held(directory: str, ranks: int) -> Iterator[None]:
    """Make and lock a run's directory; finally delete the lock, and the directory if new and empty.

    ranks: number of ranks that write the run. UserError if another process has locked it.
    """
    is_new = not os.path.isdir(directory)
    path = os.path.join(directory, LOCK)
    process = f'process {os.getpid()} on {_HOST}, since {time.strftime("%F %T")}, {ranks} rank(s)'
    with contextlib.ExitStack() as stack:
        with os_errors_as(f'--save_dir: {path} cannot be written'):
            os.makedirs(directory, exist_ok=True)
            lock = None
            with contextlib.suppress(BlockingIOError):
                lock = stack.enter_context(storage.open_locked(path))
            holder = _holder(path)
            # Another process may have deleted or replaced the file before it was locked here.
            if lock is None or not _is_at(path, lock):
                raise UserError(
                    f'{path}: {holder or "a process"} is writing this run: wait until that'
                    ' process ends, or use another NAME'
                )
            if holder and f' on {_HOST}, ' not in holder:
                # The file system may not show this host the locks of other hosts.
                raise UserError(
                    f'{path}: {holder} is writing this run; if it has ended, delete this file'
                )
        try:
            with os_errors_as(f'--save_dir: {path} cannot be written'):
                lock.truncate(0)
                os.write(lock.fileno(), process.encode())
            yield
        finally:
            # The lock file may be another process's, if a user has deleted the one made here.
            with contextlib.suppress(OSError):  # the directory may be gone, or not be empty
                if _is_at(path, lock):
                    os.remove(path)
                    if is_new:
                        os.rmdir(directory)


def _is_at(path: str, lock: io.FileIO) -> bool:
    return os.path.exists(path) and os.path.samestat(os.stat(path), os.fstat(lock.fileno()))


def _holder(path: str) -> str:
    """Return the lock file's text, which names the process that writes the run; '' if no file."""
    if not os.path.exists(path):
        return ''
    with open(path, 'rb', opener=storage.open_nofollow) as file:
        return file.read(300).decode(errors='replace')


def check_free(directory: str) -> None:
    """Raise UserError if another process has locked the run in `directory`."""
    if os.path.exists(os.path.join(directory, LOCK)):
        with held(directory, ranks=0):
            pass


def is_held(directory: str) -> bool:
    """Return whether a local or remote `directory` is known to be locked by another process."""
    try:
        check_free(storage.staging_dir(directory))
    except UserError:
        return True
    return False
