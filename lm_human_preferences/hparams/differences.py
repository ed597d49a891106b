"""Settings that differ from those of an experiment, by option."""

from collections.abc import Mapping
from typing import Any

from lm_human_preferences.hparams.policy_options import NEW_MODEL
from lm_human_preferences.hparams.task_options import TaskHParams
from lm_human_preferences.utils import hyperparams
from lm_human_preferences.utils.hyperparams import HParams, group_class

Experiments = Mapping[str, Mapping[str, Any]]  # {COMMAND/EXPERIMENT: {option: value}}
OF_ONE_START = ('run.resume', 'run.console')  # options that a resumed run does not keep
# Options that the program sets, and the new reward model's task, a copy of the policy's
NOT_DECIDED = ('run.save_dir', f'{NEW_MODEL}.run.save_dir', f'{NEW_MODEL}.task')


def decided(hparams: HParams) -> dict[str, Any]:
    """Return {option: value} of all settings that a user decides; groups are 'on' or 'off'."""
    found = {}
    for name, field, value in hyperparams.settings(hparams):
        if name.startswith((*OF_ONE_START, *NOT_DECIDED)):
            continue
        if group_class(field.type):
            found[name] = 'off' if value is None else 'on'
        else:
            found[name] = value
    return found


def differences(hparams: HParams, usual: HParams) -> dict[str, Any]:
    """Return {option: value} of the settings that differ from `usual`.

    Options of a group that is off in `usual` are compared with their defaults.
    """
    before, fields = decided(usual), hyperparams.fields(type(hparams))
    found = {}
    for name, value in decided(hparams).items():
        default = before.get(name, fields[name].default)
        if value != default and (value, default) != ('off', None):
            found[name] = value
    return found


def task_options(task: TaskHParams, binds: Mapping[str, Any]) -> dict[str, Any]:
    """Return {option: value} of a task's settings that differ from an experiment's `binds`."""
    usual = TaskHParams()
    for key, value in binds.items():
        if key.startswith('task.'):
            usual.override_from_dict({key.removeprefix('task.'): value})
    return {f'task.{name}': value for name, value in differences(task, usual).items()}
