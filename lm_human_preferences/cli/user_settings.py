"""Settings that users give, and what follows from them; all override an experiment's settings."""

import copy
import dataclasses
import os
import re
import types
from collections.abc import Mapping, Sequence
from typing import Any

from lm_human_preferences import storage
from lm_human_preferences.datasets import registry
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams import policy_options
from lm_human_preferences.hparams.policy_options import NEW_MODEL as NEW
from lm_human_preferences.hparams.reward_options import COLLECTED
from lm_human_preferences.hparams.task_options import TaskHParams
from lm_human_preferences.language.networks import model_kinds
from lm_human_preferences.utils import hyperparams
from lm_human_preferences.utils.combos import Trial
from lm_human_preferences.utils.hyperparams import group_class, members, value_of
from lm_human_preferences.utils.streams import note

_NAMES = {*registry.DATASETS, 'mock', 'test'}  # values of path options that always are names
_RUNS = 'az://openaipublic/lm-human-preferences/runs'
_PUBLISHED = ('sentiment', 'descriptiveness', 'cnndm', 'tldr')
# Options of the policy that also apply to a new reward model unless set for it separately
_OF_BOTH = {'run.precision', 'run.gradient_checkpointing'}


def settable(hparam_class: type[hyperparams.HParams]) -> dict[str, dataclasses.Field]:
    """Return {name: field} of all options, including groups that can be switched on and off."""
    return {
        key: field
        for key, field in hyperparams.fields(hparam_class).items()
        if not group_class(field.type) or types.NoneType in members(field.type)
    }


def bindings(experiments: Mapping[str, Sequence[Trial]], name: str, command: str) -> dict[str, Any]:
    """Return the settings {option: value} of an experiment; UserError unless it has one trial."""
    if name not in experiments:
        raise UserError(
            f'no experiment {name!r} for {command}: choose from {", ".join(experiments)}'
        )
    trials = experiments[name]
    if len(trials) != 1:
        raise UserError(
            f'experiment {name!r} has {len(trials)} trials: list each of them in launch.py under a'
            ' name of its own'
        )
    binds: dict[str, Any] = {}
    for var, value, _ in trials[0]:
        if var in binds:
            note(f'WARNING: overriding key {var} from {binds[var]} to {value}')
        if var is not None:
            binds[var] = value
    return binds


def run_name(name: str, trial: Trial) -> str:
    """Return the run's name: `name` and the trial's descriptors, if any, such as NAME/lr1e-5."""
    descriptors = [str(extra['descriptor']) for _, _, extra in trial if 'descriptor' in extra]
    return f'{name}/{"-".join(descriptors)}' if descriptors else name


def override(hparams: hyperparams.HParams, settings: Mapping[str, Any]) -> None:
    """Override `hparams` with the user's `settings`; setting a group's option turns the group on.

    For a training, relative paths become absolute, since the run records them.
    """
    fields = settable(type(hparams))
    settings = dict(settings)
    if isinstance(hparams, policy_options.Training):
        for key, value in settings.items():
            if isinstance(value, str) and fields[key].metadata.get('path'):
                settings[key] = _absolute(value)
    for group in [key for key, field in fields.items() if group_class(field.type)]:
        leaf = next((key for key in settings if key.startswith(f'{group}.')), None)
        if leaf and settings.get(group) == 'off':
            raise UserError(f'--{leaf} has no meaning with --{group} off: drop one of them')
        if leaf or settings.get(group) == 'on':
            settings[group] = 'on'
            if value_of(hparams, group) is not None:
                del settings[group]
    hparams.override_from_dict(settings)


def _absolute(path: str) -> str:
    """Return the absolute path of an existing file or folder; return any other name unchanged."""
    if storage.is_remote(path) or path in _NAMES:
        return path
    absolute = os.path.abspath(path)
    file = re.sub(r'(?<=\.py):\w+$', '', absolute)  # strips :FUNCTION from FILE.py:FUNCTION
    return absolute if os.path.exists(file) else path


def complete(
    reward_experiments: Mapping[str, Sequence[Trial]],
    settings: Mapping[str, Any],
    hparams: policy_options.HParams,
    experiment: str | None,
) -> dict[str, Any]:
    """Return the settings of train_policy and all that they imply; UserError if they conflict.

    If the user asks for a new reward model that `hparams` lacks, `hparams` gets the settings of the
    train_reward experiment with the same name. experiment: None for a run that is resumed.
    """
    settings = dict(settings)
    if _is_on(settings, NEW, hparams.new_reward_model):
        if hparams.new_reward_model is None and experiment is not None:
            binds = bindings(reward_experiments, experiment, 'train_reward')
            new = {f'{NEW}.{key}': value for key, value in binds.items()}
            hparams.override_from_dict({NEW: 'on', **new})
            assert hparams.new_reward_model is not None
            hparams.new_reward_model.task = copy.deepcopy(hparams.task)
        collects_labels = _is_on(settings, 'rewards.online', hparams.rewards.online)
        _share_task(settings)
        for key in _OF_BOTH & settings.keys():
            settings.setdefault(f'{NEW}.{key}', settings[key])
        new_model = hparams.new_reward_model
        has_source = new_model is not None and new_model.labels.source is not None
        if not has_source and collects_labels:
            settings.setdefault(f'{NEW}.labels.source', COLLECTED)
    elif (
        not any(key.startswith(f'{NEW}.') for key in settings)
        and not settings.get('rewards.trained_model', hparams.rewards.trained_model)
        and not settings.get('rewards.function')
        and experiment in _PUBLISHED
    ):
        settings['rewards.trained_model'] = f'{_RUNS}/{experiment}/reward_model'
        note(
            'note: no --rewards.trained_model given: using the published one,'
            f' {settings["rewards.trained_model"]}'
        )
    return settings


def _is_on(settings: Mapping[str, Any], group: str, before: object) -> bool:
    """Return whether a group of options is on under `settings`. before: the group's old value."""
    named = any(key.startswith(f'{group}.') for key in settings)
    default = 'on' if named or before else 'off'
    return settings.get(group, default) == 'on'


def _share_task(settings: dict[str, Any]) -> None:
    """Copy each task option from policy to reward model or back; UserError if the two differ."""
    for key, value in list(settings.items()):
        if 'task.' not in key:
            continue
        twin = f'{NEW}.{key}' if key.startswith('task.') else key.removeprefix(f'{NEW}.')
        if settings.setdefault(twin, value) != value:
            raise UserError(
                f'--{key} {value} and --{twin} {settings[twin]} differ, but a policy and its reward'
                ' model share one task: give only one of them'
            )


def with_end_of_response(settings: Mapping[str, Any], task: TaskHParams) -> dict[str, Any]:
    """Return `settings`, plus any options that a chat or tokeniser needs to end responses."""
    settings = settings_with_own_token(settings, task)
    given = {key.rpartition('task.')[2]: value for key, value in settings.items()}
    model = given.get('policy.initial_model', task.policy.initial_model)
    token = task.truncate_token
    is_given = bool(given.keys() & {'truncate_token', 'truncate_text'})
    if not is_given and given.get('chat', task.chat) and given.get('stop') is not False:
        return {'task.truncate_token': None, 'task.truncate_after': 0, **settings}
    if is_given or token not in model_kinds.TEXTS_OF_TOKENS or not model:
        return settings
    from lm_human_preferences.language.texts import (
        tokenisers,  # loads a library that --help does not need
    )

    if tokenisers.may_have_own(model):
        settings['task.truncate_text'] = model_kinds.TEXTS_OF_TOKENS[token]
    return settings


def settings_with_own_token(settings: Mapping[str, Any], task: TaskHParams) -> dict[str, Any]:
    """Return the user's `settings`; a truncate_token switches off the task's truncate_text."""
    settings = dict(settings)
    given = {key.rpartition('task.')[2] for key in settings}
    if 'truncate_token' in given and task.truncate_text and 'truncate_text' not in given:
        settings['task.truncate_text'] = None
    return settings
