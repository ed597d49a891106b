"""The user's settings, laid over those of an experiment."""

import os
import types
from collections.abc import Mapping
from typing import Any

from lm_human_preferences import storage
from lm_human_preferences.checkpointing import names
from lm_human_preferences.cli import option_help
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams import policy_options
from lm_human_preferences.hparams.task_options import TaskHParams
from lm_human_preferences.language.gpt2 import released
from lm_human_preferences.runs import run_files
from lm_human_preferences.utils import hyperparams
from lm_human_preferences.utils.combos import Trial
from lm_human_preferences.utils.hyperparams import group_class, members
from lm_human_preferences.utils.streams import note


def settable(hparam_class: type[hyperparams.HParams]) -> option_help.Fields:
    """The fields that are options on the command line: values, and groups that may be off."""
    return {
        key: field
        for key, field in hyperparams.fields(hparam_class).items()
        if not group_class(field.type) or types.NoneType in members(field.type)
        if not hyperparams.is_of_another_command(key, field)
    }


def read_trial(trial: Trial) -> tuple[dict[str, Any], str]:
    """What a trial binds, in its order, and the descriptors of its entries joined by dashes."""
    binds: dict[str, Any] = {}
    descriptors = []
    for var, value, extra in trial:
        if var in binds:
            note(f'WARNING: overriding key {var} from {binds[var]} to {value}')
        if var is not None:
            binds[var] = value
        if 'descriptor' in extra:
            descriptors.append(str(extra['descriptor']))
    return binds, '-'.join(descriptors)


def override(hparams: hyperparams.HParams, settings: Mapping[str, Any]) -> None:
    """Lay the user's `settings` {dotted name: value} over `hparams`.

    A leaf switches its group on; 'on' leaves a group that is on as it is.
    """
    settings = dict(settings)
    fields = settable(type(hparams))
    for group in [key for key, field in fields.items() if group_class(field.type)]:
        leaf = next((key for key in settings if key.startswith(f'{group}.')), None)
        if leaf and settings.get(group) == 'off':
            raise UserError(f'--{leaf} has no meaning with --{group} off: drop one of them')
        if leaf or settings.get(group) == 'on':
            settings[group] = 'on'
            if _is_on(hparams, group):
                del settings[group]
    hparams.override_from_dict(settings)


def with_end_of_response(settings: Mapping[str, Any], task: TaskHParams) -> dict[str, Any]:
    """The user's `settings` for an experiment with `task`, with the text that ends a response.

    An experiment names a token of GPT-2, and means its text: that is what ends a response of a
    model with another tokeniser. A token that users name is one of their model's.
    """
    settings = settings_with_own_token(settings, task)
    given = {key.rpartition('task.')[2]: value for key, value in settings.items()}
    model = given.get('policy.initial_model', task.policy.initial_model)
    token = task.truncate_token
    is_given = bool(given.keys() & {'truncate_token', 'truncate_text'})
    if is_given or token not in released.TEXTS_OF_TOKENS or not model:
        return settings
    from lm_human_preferences.language import tokenisers  # a library that --help does not need

    if tokenisers.may_have_own(model):
        settings['task.truncate_text'] = released.TEXTS_OF_TOKENS[token]
    return settings


def settings_with_own_token(settings: Mapping[str, Any], task: TaskHParams) -> dict[str, Any]:
    """The user's `settings`; a token that they name counts, and not the text that `task` has."""
    settings = dict(settings)
    given = {key.rpartition('task.')[2] for key in settings}
    if 'truncate_token' in given and task.truncate_text and 'truncate_text' not in given:
        settings['task.truncate_text'] = None
    return settings


def use_own_model(hparams: hyperparams.HParams) -> None:
    """Let a run that goes on do without its initial model, where that is not on this machine.

    A checkpoint of the policy holds all networks, and its directory what else there is to know of
    them. hparams: of the run, whose directory has been fetched.
    """
    from lm_human_preferences.language import tokenisers  # a library that --help does not need

    if not isinstance(hparams, policy_options.HParams):
        return
    model = hparams.task.policy.initial_model
    save_dir = hparams.run.save_dir
    directory = hparams.run.directory
    assert save_dir is not None and directory is not None
    if not tokenisers.may_have_own(model) or _is_at_hand(model):
        return
    if not names.resumable(os.path.join(directory, run_files.POLICY.unfinished)):
        return
    note(f'note: {model} is not on this machine; the run has what it needs of it')
    hparams.task.policy.initial_model = save_dir
    new_model = hparams.rewards.train_new_model
    if new_model is not None:
        new_model.task.policy.initial_model = save_dir


def _is_at_hand(model: str) -> bool:
    """Whether a model is a file of this machine, or in the cache of the hub."""
    path = storage.model_path(model)
    if path is not None:
        return storage.is_here(path)
    return storage.is_remote(model) or os.path.exists(model)


def _is_on(hparams: Any, group: str) -> bool:
    """Whether the group of that dotted name, and all that it is in, are there."""
    for part in group.split('.'):
        hparams = getattr(hparams, part, None)
    return hparams is not None
