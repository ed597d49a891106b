"""Settings of train_policy that follow from what the user has given."""

import copy
from collections.abc import Mapping
from typing import Any

from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.policy_options import NEW_MODEL as NEW
from lm_human_preferences.hparams.policy_options import HParams
from lm_human_preferences.hparams.reward_options import COLLECTED
from lm_human_preferences.utils.streams import note

_RUNS = 'az://openaipublic/lm-human-preferences/runs'
# Options of the policy that apply to a new reward model, unless it has its own.
OF_BOTH = {'run.precision', 'run.gradient_checkpointing'}
# Options of a new reward model that have no effect where its labels are collected while the policy
# trains
_OFFLINE = (
    *('labels.num_train', 'labels.error', 'labels.without', 'labels.too_long'),
    *('run.seed', 'run.save_dir', 'run.log_interval', 'run.save_interval', 'run.precision'),
)
_PUBLISHED = ('sentiment', 'descriptiveness', 'cnndm', 'tldr')


def trains_new_model(settings: Mapping[str, Any], hparams: HParams) -> bool:
    """Return whether a new reward model is trained with the user's `settings` over `hparams`."""
    return _is_on(settings, NEW, hparams.new_reward_model)


def switch_on_new_model(hparams: HParams, of_reward: Mapping[str, Any]) -> None:
    """Have a policy train a new reward model for its task, with the settings of train_reward."""
    settings = {f'{NEW}.{key}': value for key, value in of_reward.items()}
    hparams.override_from_dict({NEW: 'on', **settings})
    assert hparams.new_reward_model is not None
    hparams.new_reward_model.task = copy.deepcopy(hparams.task)


def complete(
    settings: Mapping[str, Any], hparams: HParams, experiment: str | None
) -> dict[str, Any]:
    """Return user settings with what they imply; UserError if they are contradictory."""
    settings = dict(settings)
    if trains_new_model(settings, hparams):
        collects_labels = _is_on(settings, 'rewards.online', hparams.rewards.online)
        if collects_labels:
            _refuse_what_has_no_effect(settings)
        _share_task(settings)
        for key in OF_BOTH & settings.keys():
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
    """Return whether an optional group is on after `settings`."""
    named = any(key.startswith(f'{group}.') for key in settings)
    default = 'on' if named or before else 'off'
    return settings.get(group, default) == 'on'


def _refuse_what_has_no_effect(settings: Mapping[str, Any]) -> None:
    """Raise UserError for an option without effect while labels are collected."""
    for name in _OFFLINE:
        if settings.get(f'{NEW}.{name}') is not None:  # None asks for nothing
            raise UserError(f'--{NEW}.{name} has no effect with --rewards.online: leave it out')


def _share_task(settings: dict[str, Any]) -> None:
    """Set each option of the task for policy and reward model alike; UserError if two differ."""
    for key, value in list(settings.items()):
        if 'task.' not in key:
            continue
        twin = f'{NEW}.{key}' if key.startswith('task.') else key.removeprefix(f'{NEW}.')
        if settings.setdefault(twin, value) != value:
            raise UserError(
                f'--{key} {value} and --{twin} {settings[twin]} differ, but a policy and its reward'
                ' model share one task: give only one of them'
            )
