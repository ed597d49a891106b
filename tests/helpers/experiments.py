"""The experiments of launch.py, resolved, and what was recorded of the original's."""

import json

from golden_data import json_if_there
from surroundings import SAVES

import launch
from lm_human_preferences.hparams import policy_options, reward_options
from lm_human_preferences.utils import hyperparams

_RECORDED = json_if_there(
    'experiments.json', default={'experiments': {}, 'names': {}, 'dry_run': {}, 'cli': []}
)
RECORDED = json.loads(json.dumps(_RECORDED).replace('/tmp/save', SAVES))
EXPERIMENTS = {'train_reward': launch.reward_experiments, 'train_policy': launch.policy_experiments}
CLASSES = {'train_reward': reward_options.CommandHParams, 'train_policy': policy_options.HParams}
# What the original's experiments meant by the field rewards.whiten, which it has not.
WHITEN = 'ppo.whiten_rewards'


def binds(command, name):
    (trial,) = EXPERIMENTS[command][name]
    return {var: value for var, value, _ in trial}


def resolved(command, name, changes=None):
    """Return the settings of an experiment; changes: {option: value}, which are not validated."""
    hparams = CLASSES[command]()
    hparams.override_from_dict(binds(command, name))
    hparams.validate()
    hparams.override_from_dict(changes or {})
    return hparams


def recorded_hparams(entry):
    """Return the nested hyperparameters of a recorded experiment (original-defects 1)."""
    corrected = f'with_rewards.whiten_replaced_by_{WHITEN}'
    return entry['ok'] if 'ok' in entry else entry[corrected]['ok']


def another(field, value):
    if field.metadata.get('one_of'):
        return next(choice for choice in field.metadata['one_of'] if choice != value)
    types = hyperparams.members(field.type)
    if bool in types:
        return not value
    if int in types:
        return (value or 0) + 1
    return 0.5 if float in types and value != 0.5 else f'{value}1' if str in types else 0.25
