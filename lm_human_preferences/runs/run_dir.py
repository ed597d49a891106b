"""Directory of a run: checks before a run begins or resumes there, its lock, and resume hints."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from lm_human_preferences import storage
from lm_human_preferences.checkpointing import names
from lm_human_preferences.distributed import launch_methods
from lm_human_preferences.errors import UserError
from lm_human_preferences.runs import run_files, run_lock, run_record, run_settings
from lm_human_preferences.runs.run_files import POLICY, REWARD
from lm_human_preferences.utils import stop_signals

if TYPE_CHECKING:
    from lm_human_preferences.distributed.comm import Comm
    from lm_human_preferences.hparams.policy_options import Training


def check_directory(directory: str | None) -> None:
    """Raise UserError if a run cannot be kept in `directory` (None: it is not kept)."""
    if directory is None:
        return
    if storage.is_remote(directory):
        raise UserError(f'--save_dir: {directory} is remote; give a local directory')
    existing = os.path.abspath(directory)
    while not os.path.lexists(existing):  # a dangling link cannot become a directory
        existing = os.path.dirname(existing)
    if not (os.path.isdir(existing) and os.access(existing, os.W_OK | os.X_OK)):
        raise UserError(
            f'--save_dir: {directory} cannot be made: {existing} is not a directory that you may'
            ' write to'
        )
    _check_links(directory)
    danger = storage.open_to_others(directory)
    if danger:
        raise UserError(f'--save_dir: {danger}: give a directory below one of your own')


def _check_links(directory: str) -> None:
    """Raise UserError if a folder of a run is a link to a place outside of the run."""
    for folder, names_there, _ in os.walk(directory):
        for name in names_there:
            path = os.path.join(folder, name)
            if os.path.islink(path) and not storage.is_within(path, directory):
                raise UserError(
                    f'--save_dir: {path} is a link to a folder outside of the run, in which files'
                    ' would be written and deleted: put the folder itself in its place'
                )


def own_files(hparams: Training) -> list[str]:
    """Return paths and URLs of existing files of a run with `hparams`, partial files included."""
    pattern = run_files.written_by(hparams.commands, r'(\.\d+\.part)?')
    directory = hparams.run.directory
    save_dir = hparams.run.save_dir
    assert directory is not None and save_dir is not None
    files = [os.path.join(directory, name) for name in storage.local_files(directory, pattern)]
    if storage.is_remote(save_dir):
        remote = [name for name in storage.listing(save_dir) if pattern.fullmatch(name)]
        # Lists of checkpoints first, to be deleted before the checkpoints.
        remote.sort(key=lambda name: not name.endswith(f'/{names.LIST}'))
        files += [storage.join(save_dir, name) for name in remote]
    return files


def has_begun(hparams: Training) -> bool:
    """Return whether there is a run to resume, with complete settings."""
    return any(not path.endswith(('.part', run_files.RECORD)) for path in own_files(hparams))


def refuse_existing(hparams: Training) -> None:
    """Raise UserError if an earlier run has written files that a run with `hparams` would write."""
    directory = str(hparams.run.save_dir)
    if has_begun(hparams):
        if launch_methods.current().was_restarted:
            raise UserError(
                f'{directory} holds what this run had saved before torchrun or Slurm started it'
                ' again: give --run.resume on, so that it goes on from there'
            )
        command = run_settings.resume_command(hparams)
        raise UserError(
            f'{directory} holds a run already: go on with it by `{command}`,'
            ' use another NAME, or give --overwrite to delete it and start anew'
        )


def refuse_to_delete_answers(hparams: Training) -> None:
    """Raise UserError if --overwrite would delete what people have answered."""
    save_dir = hparams.run.save_dir
    assert save_dir is not None
    simulated = _simulated_labeller(save_dir)
    people: set[str] = set()
    folders: set[str] = set()  # two for a run that is uploaded
    for path in own_files(hparams):
        labeller = run_files.labeller_of(path)
        if labeller is None or labeller == simulated:
            continue
        if storage.read_text(path).strip():
            people.add(labeller)
            folders.add(os.path.dirname(os.path.dirname(path)))
    if people:
        raise UserError(
            f'--overwrite would delete what {", ".join(sorted(people))} answered in'
            f' {" and ".join(sorted(folders))}: move that folder away, or delete it'
        )


def _simulated_labeller(save_dir: str) -> str | None:
    """Return the name of the simulated labeller of the run in `save_dir`; None without one."""
    online = None
    with contextlib.suppress(UserError):
        online = run_settings.load_run_hparams(save_dir).rewards.online
    if online is None or online.asks_people:
        return None
    return online.source


def prepare_run_dir(hparams: Training, *, overwrite: bool, explicitly_set: Collection[str]) -> None:
    """Check, before anything is written, that a run can begin or resume; or delete an old run."""
    if hparams.run.directory is None or launch_methods.current().rank:
        return
    assert hparams.run.save_dir is not None
    check_start(hparams, overwrite=overwrite)
    if storage.is_remote(hparams.run.save_dir):
        fetch_run_dir(hparams.run.save_dir, fetch=hparams.run.resume)
    check_earlier_run(hparams, overwrite=overwrite, explicitly_set=explicitly_set)
    if overwrite:
        for path in own_files(hparams):
            if not path.endswith(run_files.RECORD):  # other trainings may have entries in it
                storage.remove(path)


def check_run(hparams: Training, *, overwrite: bool, explicitly_set: Collection[str]) -> list[str]:
    """Make the checks of `prepare_run_dir` that ask no server; return the options left out."""
    save_dir = hparams.run.save_dir
    if save_dir is None:
        return []
    check_start(hparams, overwrite=overwrite)
    if storage.is_remote(save_dir):
        return [f'--save_dir {save_dir}']
    check_earlier_run(hparams, overwrite=overwrite, explicitly_set=explicitly_set)
    return []


def check_start(hparams: Training, *, overwrite: bool) -> None:
    """Raise UserError if another process writes the run, or if --overwrite makes no sense."""
    assert hparams.run.directory is not None
    check_directory(hparams.run.directory)
    run_lock.check_free(hparams.run.directory)
    if overwrite and hparams.run.resume:
        raise UserError('--overwrite and --run.resume contradict each other: give one of them')
    if overwrite and launch_methods.current().was_restarted:
        raise UserError(
            '--overwrite would delete what this run had saved before torchrun or Slurm started it'
            ' again: use --run.resume on instead'
        )


def check_earlier_run(
    hparams: Training, *, overwrite: bool, explicitly_set: Collection[str]
) -> None:
    """Raise UserError if an earlier run in the directory does not let this one begin."""
    if hparams.run.resume:
        run_settings.check_settings(hparams, explicitly_set)
    elif overwrite:
        refuse_to_delete_answers(hparams)
    else:
        refuse_existing(hparams)


def fetch_run_dir(save_dir: str, fetch: bool = True) -> str:
    """Return the local directory of a run; fetch: download what it lacks; UserError if in use."""
    directory = storage.staging_dir(save_dir)
    if directory == save_dir or launch_methods.current().rank:
        return save_dir
    from lm_human_preferences.runs import uploads

    if not uploads.is_up_to_date(save_dir, directory) and fetch:
        lock_file, _ = run_lock.acquire(directory)
        with lock_file:
            uploads.fetch(save_dir, directory, run_files.written_by(run_files.COMMANDS))
            os.remove(lock_file.name)
    return directory


@contextlib.contextmanager
def lock_run_dir(hparams: Training, comm: Comm) -> Iterator[None]:
    """Let this job alone write the directory of its run; UserError if it cannot."""
    check_directory(hparams.run.directory)
    with contextlib.ExitStack() as stack:
        if hparams.run.directory is not None and comm.rank == 0:
            stack.enter_context(_locked(hparams, hparams.run.directory, comm.size))
        yield
        comm.on_rank_0(stack.close)  # what is left to upload may take long


@contextlib.contextmanager
def _locked(hparams: Training, directory: str, ranks: int) -> Iterator[None]:
    """Hold the lock of a run's directory; remove it at the end, and the directory if empty."""
    is_new = not os.path.isdir(directory)
    with stop_signals.handled(stop_signals.interrupt, *stop_signals.TO_STOP):
        try:
            lock_file, killed = run_lock.acquire(directory)
            with lock_file:
                if killed:
                    print(f'note: {killed}, was writing {directory} and is gone', file=sys.stderr)
                run_lock.name_holder(lock_file, run_lock.describe_process(ranks))
                if not hparams.run.resume:
                    refuse_existing(hparams)
                for path in own_files(hparams):
                    if path.endswith('.part'):
                        os.remove(path)
                with _uploaded(hparams), run_record.ended(directory, hparams.command):
                    yield
        finally:
            run_lock.release(directory, and_directory=is_new)


def _uploaded(hparams: Training) -> contextlib.AbstractContextManager[None]:
    """Within the block, upload what is written if SAVE_DIR is remote."""
    directory = hparams.run.directory
    save_dir = hparams.run.save_dir
    assert directory is not None and save_dir is not None
    if not storage.is_remote(save_dir):
        return contextlib.nullcontext()
    from lm_human_preferences.runs import uploads

    if not hparams.run.resume:
        run_record.fetch(save_dir, directory)  # other trainings may have entries in it
    pattern = run_files.uploaded_by(hparams.commands)
    return uploads.uploaded(save_dir, directory, pattern)


def resume_hint(hparams: Training) -> str:
    """Return lines on the saved part of an interrupted run, and the command that resumes it."""
    directory = hparams.run.directory
    if directory is None:
        return 'Nothing is saved, because --save_dir is None.'
    command = run_settings.resume_command(hparams)
    if hparams.command == POLICY.command:
        saved = names.resumable(os.path.join(directory, POLICY.unfinished))
        if saved:
            return (
                f'Step {names.step_of(saved[0])} of the policy is saved; to go on from there:'
                f' {command}'
            )
    members = hparams.members
    finished = 0
    while finished < members and run_files.has_reward_model(directory, finished):
        finished += 1
    if finished == members:
        return f'The reward model is finished and saved; to go on with the policy: {command}'
    name = 'the reward model' if members == 1 else f'reward model {finished + 1} of {members}'
    saved = names.resumable(os.path.join(directory, REWARD.member_files(finished).unfinished))
    if saved:
        return f'Step {names.step_of(saved[0])} of {name} is saved; to go on from there: {command}'
    if finished > 0:
        return f'{finished} of {members} reward models are saved; to go on: {command}'
    if has_begun(hparams):
        return f'No step is saved yet; to start again with the same settings: {command}'
    return 'Nothing is saved yet; the same command starts again.'


def ranks_of(directory: str | None) -> int | None:
    """Return the number of ranks of a run's last command; None if unknown, or set by a launcher."""
    if directory is None or launch_methods.current().decides_size:
        return None
    ranks = [entry.get('ranks', 0) for entry in run_record.read(directory).values()]
    return next((number for number in ranks if number > 0), None)
