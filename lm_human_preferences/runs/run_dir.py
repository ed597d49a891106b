"""The directory of a run: who writes it, what is there already, with which settings it goes on.

SAVE_DIR/lock says who writes, as long as that lasts; a killed process leaves it behind. Of a remote
SAVE_DIR, all this is about its staging directory, and runs/uploads.py about the remote one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import os
import re
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

from lm_human_preferences import storage
from lm_human_preferences.distributed import env
from lm_human_preferences.errors import UserError

if TYPE_CHECKING:
    from lm_human_preferences.distributed.comm import Comm
    from lm_human_preferences.hparams import train_policy, train_reward

    Training = train_policy.HParams | train_reward.HParams

LOCK = 'lock'
_HERE = socket.gethostname()
UNFINISHED = 'unfinished'  # in reward_model/: checkpoints of one that is being trained
_CHECKPOINT = r'(checkpoint|model\.ckpt(-\d+)?\.(index|meta|resume\.json|data-\d{5}-of-\d{5}))'
_EVENTS = r'events\.out\.tfevents\..*'
FILES = {  # of each command
    'train_reward': (
        rf'train_reward_hparams\.json|tb/reward_model/{_EVENTS}|'
        rf'reward_model/(hparams\.json|encoding|(checkpoints|{UNFINISHED})/{_CHECKPOINT})'
    ),
    'train_policy': (
        rf'train_policy_hparams\.json|tb/ppo/{_EVENTS}|'
        rf'policy/(hparams\.json|encoding|checkpoints/{_CHECKPOINT})'
    ),
}
# What a checkpoint holds the outcome of, so that another value would have no effect on a run that
# goes on.
FIXED_ONCE_BEGUN = {'task.policy.initial_model', 'rewards.trained_model', 'rewards.train_new_model'}
_EVALUATION = r'evaluation\.(json|png)'


def check_directory(directory: str | None, option: str = '--save_dir') -> None:
    """Raise UserError where a run could not be kept in `directory` (None: it is not kept), before
    time is spent."""
    if directory and storage.is_remote(directory):
        raise UserError(f'{option}: {directory} is remote; give a local directory')
    existing = os.path.abspath(directory or '.')
    while not os.path.exists(existing):
        existing = os.path.dirname(existing)
    if directory and not (os.path.isdir(existing) and os.access(existing, os.W_OK | os.X_OK)):
        raise UserError(
            f'{option}: {directory} cannot be made: {existing} is no directory that you may'
            ' write to'
        )


def _written_by(commands: Iterable[str], more: str = '') -> re.Pattern[str]:
    return re.compile(rf'({"|".join(FILES[command] for command in commands)}){more}')


def own_files(hparams: Training) -> list[str]:
    """The files, paths or URLs, that runs with `hparams` write; halves that a kill has left end in
    .part."""
    own = _written_by(hparams.writes(), r'(\.\d+\.part)?')
    directory = hparams.run.directory
    assert directory is not None and hparams.run.save_dir is not None
    found = [os.path.join(directory, name) for name in storage.local_files(directory, own)]
    if storage.is_remote(hparams.run.save_dir):
        names = sorted(
            storage.listing(hparams.run.save_dir), key=lambda name: not name.endswith('/checkpoint')
        )
        found += [storage.join(hparams.run.save_dir, name) for name in names if own.fullmatch(name)]
    return found


def refuse_existing(hparams: Training) -> None:
    """UserError where a run has written the files that one with `hparams` would write."""
    directory = hparams.run.save_dir
    if own_files(hparams):
        raise UserError(
            f'{directory} holds a run already: go on with it by `./launch.py resume {directory}`,'
            ' take another NAME, or give --overwrite to delete it and start anew'
        )


def prepare_run_dir(hparams: Training, *, overwrite: bool, explicitly_set: Collection[str]) -> None:
    """See to it that a run may begin in its directory, or go on; UserError if not. Nothing is made
    there yet.

    overwrite: delete the run that is there, and nothing else. explicitly_set: what the user has
    set, see `check_settings`.
    """
    directory = hparams.run.directory
    if directory is None or env.launched_rank():
        return
    assert hparams.run.save_dir is not None
    if os.path.exists(os.path.join(directory, LOCK)):
        _locked(directory)[0].close()
    if overwrite and hparams.run.resume:
        raise UserError('--overwrite and --run.resume contradict each other: give one of them')
    if storage.is_remote(hparams.run.save_dir):
        fetch_run_dir(hparams.run.save_dir, fetch=hparams.run.resume)
    if hparams.run.resume:
        check_settings(hparams, explicitly_set)
    elif not overwrite:
        refuse_existing(hparams)
    for path in own_files(hparams) if overwrite else ():
        storage.remove(path)


def fetch_run_dir(save_dir: str, fetch: bool = True) -> str:
    """Where to read what a run has left in `save_dir`: there, or if that is remote, in its staging
    directory.

    fetch: whether to bring what the store has there, unless the staging directory has that.
    UserError where somebody else writes it.
    """
    directory = storage.staging_dir(save_dir)
    if directory == save_dir or env.launched_rank():
        return save_dir
    from lm_human_preferences.runs import uploads

    if not uploads.is_newest(save_dir, directory) and fetch:
        lock, _ = _locked(directory)
        with lock:
            uploads.fetch(save_dir, directory, _written_by(FILES))
            os.remove(lock.name)
    return directory


@contextlib.contextmanager
def lock_run_dir(hparams: Training, comm: Comm) -> Iterator[None]:
    """Have the directory of a run for this job alone; UserError where it cannot be had, or, unless
    resumed, is used."""
    directory = hparams.run.directory
    check_directory(directory)
    if directory is None or comm.rank:
        yield
        return
    is_new = not os.path.isdir(directory)
    lock, before = _locked(directory)
    with lock, _sigterm_interrupts():
        try:
            if before:
                print(f'note: {before}, was writing {directory} and is gone', file=sys.stderr)
            process = (
                f'process {os.getpid()} on {_HERE}, since {time.strftime("%F %T")}, {comm.size}'
                ' rank(s)'
            )
            lock.truncate(0)
            lock.write(process)
            lock.flush()
            if not hparams.run.resume:
                refuse_existing(hparams)
            for path in own_files(hparams):
                if path.endswith('.part'):
                    os.remove(path)
            with _mirrored(hparams, process):
                yield
        finally:
            os.remove(lock.name)
            if is_new:
                with contextlib.suppress(OSError):
                    os.rmdir(directory)


@contextlib.contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Within the block, SIGTERM is a KeyboardInterrupt, so that the lock goes before the process
    does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def release(directory: str | None) -> None:
    """Remove the lock of a run whose ranks were ended before they could, and the directory if
    nothing else is there."""
    path = os.path.join(directory or '', LOCK)
    if directory is None or not os.path.exists(path):
        return
    with contextlib.suppress(
        UserError, OSError
    ):  # another job has the run, on this host or another one
        lock, _ = _locked(directory)
        with lock:
            os.remove(path)
        os.rmdir(directory)  # fails where there is something


def resume_hint(hparams: Training) -> str:
    """What is saved of a run that was interrupted, and the command that goes on with it. hparams:
    the run's."""
    directory, save_dir = hparams.run.directory, hparams.run.save_dir
    if directory is None:
        return 'Nothing is saved, because --save_dir is None.'
    assert save_dir is not None
    from lm_human_preferences.checkpointing import (
        checkpoints,  # loads numpy, which --help is not to wait for
    )

    command = f'./launch.py resume {shlex.quote(save_dir)}'
    if hparams.writes()[-1] == 'train_policy':
        names = checkpoints.resumable(os.path.join(directory, 'policy', 'checkpoints'))
        if names:
            return (
                f'Step {checkpoints.step_of(names[0])} of the policy is saved; to go on from there:'
                f' {command}'
            )
    if os.path.exists(os.path.join(directory, 'reward_model', 'checkpoints', 'checkpoint')):
        return f'The reward model is finished and saved; to go on with the policy: {command}'
    names = checkpoints.resumable(os.path.join(directory, 'reward_model', UNFINISHED))
    if names:
        return (
            f'Step {checkpoints.step_of(names[0])} of the reward model is saved; to go on from'
            f' there: {command}'
        )
    if own_files(hparams):
        return f'No step is saved yet; to start again with the same settings: {command}'
    return 'Nothing is saved yet; the same command starts again.'


def _mirrored(hparams: Training, process: str) -> contextlib.AbstractContextManager[None]:
    """Within the block, what is written is uploaded, if that is what the user wants."""
    directory = hparams.run.directory
    assert directory is not None and hparams.run.save_dir is not None
    if not storage.is_remote(hparams.run.save_dir):
        return contextlib.nullcontext()
    from lm_human_preferences.runs import uploads

    own = re.compile(f'{_written_by(hparams.writes()).pattern}|{_EVALUATION}')
    return uploads.mirrored(hparams.run.save_dir, directory, own, process)


def _locked(directory: str) -> tuple[TextIO, str]:
    """(the lock file of a directory, locked until it is closed, what a holder that was killed has
    left in it)."""
    path = os.path.join(directory, LOCK)
    try:
        os.makedirs(directory, exist_ok=True)
        lock = open(path, 'a+', encoding='utf-8', errors='replace', opener=storage.open_nofollow)
        lock.seek(0)
        holder = lock.read(300)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            if e.errno not in (
                errno.ENOSYS,
                errno.ENOLCK,
                errno.EOPNOTSUPP,
            ):  # a file system that knows no locks
                raise
        if not os.path.exists(path) or not os.path.samestat(os.stat(path), os.fstat(lock.fileno())):
            raise BlockingIOError  # it was deleted and made anew
    except BlockingIOError:
        who = holder or 'a process'
        raise UserError(
            f'{path}: {who} is writing this run: wait for its end, or take another NAME'
        ) from None
    except OSError as e:
        raise UserError(f'--save_dir: {path} cannot be written: {e.strerror}') from e
    if holder and f' on {_HERE}, ' not in holder:
        raise UserError(
            f'{path}: {holder} is writing this run; if it has ended there, delete this file'
        )
    return lock, holder


def ranks_of(directory: str | None) -> int | None:
    """The number of ranks of the run that was interrupted in `directory`, None where nothing tells
    or it is settled."""
    if directory is None or env.launched_size() > 1:
        return None
    from lm_human_preferences.checkpointing import (
        checkpoints,  # loads numpy, which --help is not to wait for
    )

    for place in ('policy/checkpoints', f'reward_model/{UNFINISHED}'):
        for name in checkpoints.resumable(os.path.join(directory, place)):
            with contextlib.suppress(UserError, KeyError, TypeError):
                # Any: where there is none, the TypeError of None['random'] is meant
                state: Any = checkpoints.restore_state(os.path.join(directory, place, name))
                return len(state['random'])
    with (
        contextlib.suppress(OSError),
        open(
            os.path.join(directory, LOCK),
            encoding='utf-8',
            errors='replace',
            opener=storage.open_nofollow,
        ) as lock,
    ):
        found = re.search(r'(\d+) rank', lock.read(300))
        return int(found[1]) if found else None


def to_record(hparams: Training) -> dict[str, Any]:
    """What a run's JSON file holds of its hyperparameters: that it was interrupted leaves no
    trace."""
    not_resumed = dataclasses.replace(hparams, run=dataclasses.replace(hparams.run, resume=False))
    return not_resumed.to_nested_dict(recorded_only=True)


def check_settings(hparams: Training, explicitly_set: Collection[str]) -> None:
    """Compare `hparams` with those of the run that is to go on in their directory, if there is one.

    Differences are printed if the user has `explicitly_set` them (keys, or groups of them); else
    they are a UserError.
    """
    directory = hparams.run.save_dir
    written_to = hparams.run.directory
    assert written_to is not None
    path = os.path.join(written_to, f'{hparams.writes()[-1]}_hparams.json')
    if not os.path.exists(path):
        return
    recorded = type(hparams)()
    recorded.override_from_json_file(path)
    before, now = (dict(_leaves(to_record(group))) for group in (recorded, hparams))
    changes = {
        key: f'--{key} {now.get(key, "off")} (before: {before.get(key, "off")})'
        for key in {**before, **now}
        if before.get(key) != now.get(key)
        and not key.endswith('run.save_dir')
        and not (key == 'rewards.trained_model' and now[key] is None)
    }  # that is what it has trained itself
    _refuse_what_has_no_effect(hparams, changes, explicitly_set)
    unnamed = [
        text
        for key, text in changes.items()
        if not any(f'{key}.'.startswith(f'{name}.') for name in explicitly_set)
    ]
    if unnamed:
        raise UserError(
            f'{directory} was begun with other settings than {", ".join(unnamed)}: name what is to'
            f' change, or keep them all by `./launch.py resume {directory}`'
        )
    for text in changes.values():
        print(f'note: going on with {text}', file=sys.stderr)


def _refuse_what_has_no_effect(
    hparams: Training, changes: Mapping[str, str], explicitly_set: Collection[str]
) -> None:
    """UserError for a change that a run which goes on would not heed: its checkpoint decides, or
    its reward model.

    changes: {dotted name: what has changed}. explicitly_set: what the user has set.
    """
    directory = hparams.run.directory
    assert directory is not None
    begun = (
        'a run that has begun goes on with its own: start another one by ./launch.py'
        f' {hparams.writes()[-1]}'
    )
    for key in FIXED_ONCE_BEGUN & changes.keys():
        raise UserError(f'--{key} cannot change: {begun}')
    if not os.path.exists(os.path.join(directory, 'reward_model', 'checkpoints', 'checkpoint')):
        return
    prefix = 'rewards.train_new_model.'
    for key in changes:
        is_own = (
            key.startswith(prefix) and key.removeprefix(prefix) not in changes
        )  # not a copy of the policy's
        if is_own and any(f'{key}.'.startswith(f'{name}.') for name in explicitly_set):
            raise UserError(
                f'--{key} cannot change: the reward model of this run is finished; to train another'
                ' one: ./launch.py train_policy'
            )


def _leaves(nested: Mapping[str, Any], prefix: str = '') -> Iterator[tuple[str, Any]]:
    for key, value in nested.items():
        yield from (
            _leaves(value, f'{prefix}{key}.')
            if isinstance(value, dict)
            else [(prefix + key, value)]
        )
