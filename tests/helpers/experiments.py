"""The experiments of launch.py, resolved, and what was recorded of the original's."""

import json

from golden_data import json_if_there
from surroundings import SAVES

import launch
from lm_human_preferences.hparams import policy_options, reward_options

_RECORDED = json_if_there(
    'experiments.json', default={'experiments': {}, 'names': {}, 'dry_run': {}, 'cli': []}
)
RECORDED = json.loads(json.dumps(_RECORDED).replace('/tmp/save', SAVES))
EXPERIMENTS = {'train_reward': launch.reward_experiments, 'train_policy': launch.policy_experiments}
CLASSES = {'train_reward': reward_options.HParams, 'train_policy': policy_options.HParams}
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
    return (
        entry['ok'] if 'ok' in entry else entry[f'with_rewards.whiten_replaced_by_{WHITEN}']['ok']
    )
