"""The settings of a run: what is recorded of them, and which may change when it is resumed."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.online import PEOPLE
from lm_human_preferences.runs import run_files

if TYPE_CHECKING:
    from lm_human_preferences.hparams import train_policy, train_reward

    Training = train_policy.HParams | train_reward.HParams

# The outcome of these is in the checkpoint: another value would have no effect on a resumed run.
FIXED_ONCE_BEGUN = {
    'task.policy.initial_model',
    'rewards.trained_model',
    'rewards.train_new_model',
    'rewards.online',
}


def to_record(hparams: Training) -> dict[str, Any]:
    """What a run's JSON file holds of its settings; that it was resumed leaves no trace."""
    not_resumed = dataclasses.replace(hparams, run=dataclasses.replace(hparams.run, resume=False))
    return not_resumed.to_nested_dict(recorded_only=True)


def check_settings(hparams: Training, explicitly_set: Collection[str]) -> None:
    """Compare `hparams` with those of the run that is resumed in their directory, if there is one.

    explicitly_set: the settings, or groups of them, that the user has given. A difference in one of
    them is printed; any other one is a UserError.
    """
    directory = hparams.run.directory
    assert directory is not None
    path = os.path.join(directory, run_files.COMMANDS[hparams.writes()[-1]].settings)
    if not os.path.exists(path):
        return
    recorded = type(hparams)()
    recorded.override_from_json_file(path)
    changes = _changes(to_record(recorded), to_record(hparams))
    _refuse_what_has_no_effect(hparams, changes, explicitly_set)
    implicit = [text for key, text in changes.items() if not _covers(explicitly_set, key)]
    if implicit:
        save_dir = hparams.run.save_dir
        raise UserError(
            f'{save_dir} was started with other settings than {", ".join(implicit)}: pass the'
            ' options that are to change, or keep all settings with'
            f' `./launch.py resume {save_dir}`'
        )
    for text in changes.values():
        print(f'note: going on with {text}', file=sys.stderr)


def simulated_labellers(save_dir: str) -> re.Pattern[str]:
    """The names of the labellers that are part of the run in `save_dir`, local or remote."""
    try:
        record = storage.read_json(storage.join(save_dir, run_files.POLICY.settings))
        source = record['rewards']['online']['source']
    except (storage.StorageError, KeyError, TypeError):
        source = PEOPLE
    if source == PEOPLE:
        return re.compile('(?!)')  # no name matches
    return re.compile(rf'{re.escape(source)}\d+')


def _changes(recorded: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, str]:
    """{dotted name: how it has changed, for the user}."""
    before = _switches(dict(_leaves(recorded)))
    now = _switches(dict(_leaves(current)))
    changes = {}
    for key in {**before, **now}:
        if before.get(key) == now.get(key) or key.endswith('run.save_dir'):
            continue
        if key == 'rewards.trained_model' and now[key] is None:
            continue  # recorded is the reward model that the run has trained itself
        changes[key] = f'--{key} {now.get(key, "off")} (before: {before.get(key, "off")})'
    return changes


def _switches(leaves: dict[str, Any]) -> dict[str, Any]:
    """`leaves` with an entry for the group that is left out of records while it is off."""
    is_on = any(key.startswith('rewards.online.') for key in leaves)
    return {**leaves, 'rewards.online': 'on' if is_on else 'off'}


def _covers(explicitly_set: Collection[str], key: str) -> bool:
    """Whether the user has given the setting `key`, or a group that it is in."""
    return any(f'{key}.'.startswith(f'{name}.') for name in explicitly_set)


def _refuse_what_has_no_effect(
    hparams: Training, changes: Mapping[str, str], explicitly_set: Collection[str]
) -> None:
    """UserError for a change that a resumed run would ignore.

    changes: those of `_changes`. explicitly_set: what the user has given.
    """
    directory = hparams.run.directory
    assert directory is not None
    for key in FIXED_ONCE_BEGUN & changes.keys():
        raise UserError(
            f'--{key} cannot change: a run that has begun goes on with its own: start another one'
            f' by ./launch.py {hparams.writes()[-1]}'
        )
    if not run_files.has_reward_model(directory):
        return
    prefix = 'rewards.train_new_model.'
    for key in changes:
        if not key.startswith(prefix):
            continue
        is_copy = key.removeprefix(prefix) in changes  # of the policy's setting
        if not is_copy and _covers(explicitly_set, key):
            raise UserError(
                f'--{key} cannot change: the reward model of this run is finished; to train another'
                ' one: ./launch.py train_policy'
            )


def _leaves(nested: Mapping[str, Any], prefix: str = '') -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of every setting in nested dicts."""
    for key, value in nested.items():
        if isinstance(value, dict):
            yield from _leaves(value, f'{prefix}{key}.')
        else:
            yield prefix + key, value
