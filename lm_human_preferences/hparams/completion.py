"""Settings of train_policy that follow from what the user has given."""

import copy
from collections.abc import Mapping
from typing import Any

from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.policy_options import NEW_MODEL as NEW
from lm_human_preferences.hparams.policy_options import HParams
from lm_human_preferences.hparams.reward_options import COLLECTED

_RUNS = 'az://openaipublic/lm-human-preferences/runs'
# Options of the policy that apply to a new reward model, unless it has its own.
OF_BOTH = {'run.precision', 'run.gradient_checkpointing'}
# Options of a new reward model that have no effect where its labels are collected while the policy
# trains, and what says instead.
_OFFLINE = {
    'labels.num_train': '--rewards.online.labels',
    'labels.error': '--rewards.online.error',
    'labels.without': '--rewards.online: every answer to its questions counts',
    'labels.too_long': 'its questions, which are cut to the task already',
    'run.seed': '--run.seed',
    'run.save_dir': '--save_dir',
    'run.log_interval': '--rewards.online.retrainings: each of them is logged',
    'run.save_interval': '--run.save_interval',
    'run.precision': '--run.precision',
}
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
    settings: dict[str, Any], hparams: HParams, experiment: str | None
) -> tuple[dict[str, Any], list[str]]:
    """Return user settings with what they imply, and notes; UserError if contradictory."""
    settings = dict(settings)
    notes = []
    if trains_new_model(settings, hparams):
        notes += _refuse_what_has_no_effect(settings, hparams)
        _share_task(settings)
        for key in OF_BOTH & settings.keys():
            settings.setdefault(f'{NEW}.{key}', settings[key])
        new_model = hparams.new_reward_model
        has_source = new_model is not None and new_model.labels.source is not None
        if not has_source and _collects_labels(settings, hparams):
            settings.setdefault(f'{NEW}.labels.source', COLLECTED)
        if (
            experiment
            and new_model
            and 'run.seed' in settings
            and f'{NEW}.run.seed' not in settings
        ):
            notes.append(
                'note: --run.seed is the seed of the policy only; that of the reward model stays '
                f'{new_model.run.seed} unless --{NEW}.run.seed is given'
            )
    elif (
        not any(key.startswith(f'{NEW}.') for key in settings)
        and not settings.get('rewards.trained_model', hparams.rewards.trained_model)
        and not settings.get('rewards.function')
        and experiment in _PUBLISHED
    ):
        settings['rewards.trained_model'] = f'{_RUNS}/{experiment}/reward_model'
        notes.append(
            'note: no --rewards.trained_model given: using the published one,'
            f' {settings["rewards.trained_model"]}'
        )
    return settings, notes


def _collects_labels(settings: Mapping[str, Any], hparams: HParams) -> bool:
    return _is_on(settings, 'rewards.online', hparams.rewards.online)


def _is_on(settings: Mapping[str, Any], group: str, before: object) -> bool:
    """Return whether an optional group is on after `settings`."""
    named = any(key.startswith(f'{group}.') for key in settings)
    default = 'on' if named or before else 'off'
    return settings.get(group, default) == 'on'


def _refuse_what_has_no_effect(settings: Mapping[str, Any], hparams: HParams) -> list[str]:
    """Raise UserError for an option without effect; return notes for options of the original."""
    if _collects_labels(settings, hparams):
        for name, instead in _OFFLINE.items():
            if settings.get(f'{NEW}.{name}') is not None:  # None asks for nothing
                raise UserError(
                    f'--{NEW}.{name} has no effect with --rewards.online; what counts is {instead}'
                )
    elif f'{NEW}.run.save_dir' in settings:
        return [
            f'note: --{NEW}.run.save_dir has no effect: the reward model is kept with its policy'
        ]
    return []


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
