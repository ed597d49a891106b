"""Descriptions of options in help pages and docs/options.md: sections, types, defaults."""

import dataclasses
import types

from lm_human_preferences.hparams.policy_options import NEW_MODEL
from lm_human_preferences.utils.hyperparams import group_class, members

Fields = dict[str, dataclasses.Field]

LAUNCHING = ('mpi', 'dry_run', 'save_dir', 'overwrite')
HEADINGS = {  # {group of options: heading}, in the order of help pages; '': not in a group
    'run': 'Run',
    'task': 'Task',
    'task.policy': 'Policy',
    'task.policy.lora': 'Adapters',
    'labels': 'Labels',
    '': 'Reward training',
    'lora': 'Adapters of a reward model',
    'rewards': 'Rewards',
    'rewards.adaptive_kl': 'Adaptive KL',
    'rewards.online': 'Online labels',
    'run.serve': 'Page for labellers',
    'ppo': 'PPO',
}
FOLDED = 'New reward model'  # heading of train_policy for the options of `train_reward`
_TYPES = {int: 'INT', float: 'FLOAT', str: 'TEXT', tuple[str, ...]: 'TEXT', types.NoneType: 'None'}


def is_shown(field: dataclasses.Field) -> bool:
    return field.metadata.get('help', '') is not None


def shown(fields: Fields) -> Fields:
    """Return the `fields` {name: field} that help pages show."""
    return {name: field for name, field in fields.items() if is_shown(field)}


def sections(fields: Fields) -> dict[str, Fields]:
    """Return {heading: fields to show}, only 'Options' for a command that does not train."""
    fields = shown(fields)
    if not any(name.startswith('run.') for name in fields):
        return {'Options': fields} if fields else {}
    by_heading: dict[str, Fields] = {}
    for heading in ('Launching', *HEADINGS.values(), FOLDED):
        by_heading[heading] = {}
    for name, field in fields.items():
        group = name.rpartition('.')[0]
        if name in LAUNCHING:
            heading = 'Launching'
        elif name.startswith(f'{NEW_MODEL}.'):
            heading = FOLDED
        else:
            heading = HEADINGS[group]
        by_heading[heading][name] = field
    return {heading: inside for heading, inside in by_heading.items() if inside}


def choices(field: dataclasses.Field) -> tuple[str, ...]:
    """Return the words that a switch accepts; () for a number or text."""
    if group_class(field.type):
        return 'on', 'off'
    if bool in members(field.type):
        return 'true', 'false'
    return ()


def value_text(field: dataclasses.Field) -> str:
    """Return the accepted values as help pages show them, such as 'INT|None' or 'true|false'."""
    return '|'.join(choices(field) or [_TYPES[ty] for ty in members(field.type)])


def default_text(field: dataclasses.Field) -> str | None:
    """Return the default as text; None for a required option."""
    if field.default is None and types.NoneType not in members(field.type):
        return None
    if group_class(field.type):
        return 'off'
    if field.default == ():
        return 'none'
    return repr(field.default)
