"""Settings that cannot change when a run is resumed: their outcome is in its checkpoints."""

from __future__ import annotations

import re

from lm_human_preferences.hparams.policy_options import NEW_MODEL, Training
from lm_human_preferences.hparams.task_options import LoraHParams
from lm_human_preferences.utils import hyperparams

# Beside these, `run_settings` fixes the settings of a reward model that is finished, a function as
# the reward of a run that had none, and the commits that `pins` has recorded.
FIXED_ONCE_BEGUN = {
    'task.policy.initial_model',
    'task.policy.lora',
    *(f'task.policy.lora.{name}' for name in hyperparams.fields(LoraHParams)),
    'rewards.trained_model',
    'rewards.class_name',
    'rewards.relative_kl_coef',
    'rewards.ensemble',
    'ensemble',
    NEW_MODEL,
    'rewards.online',
}
_ADAPTERS = r'lora(\..*)?'
# Of a reward model that is not finished, in a run of its own or in that of its policy: its first
# normalisation is over, and what it has learned of its labels is counted.
_OF_REWARD = re.compile(
    rf'{_ADAPTERS}|keep|labels\.(type|error|held_out)|normalize_before'
    r'|task\.(query|response)_length'
)
_DECIDES_SAMPLED_LABELS = re.compile(r'run\.seed|task\..*')


def is_fixed(hparams: Training, key: str, *, has_reward_model: bool) -> bool:
    """Return whether a run that has begun keeps the setting `key`.

    has_reward_model: a reward model that is trained first is finished.
    """
    if key in FIXED_ONCE_BEGUN:
        return True
    policy, training = hparams.policy, hparams.reward_training
    name = key if policy is None else key.removeprefix(f'{NEW_MODEL}.')
    if policy is not None and policy.rewards.online is not None:
        # Labels and retrainings are planned by steps.
        is_of_adapters = name != key and re.fullmatch(_ADAPTERS, name) is not None
        return key == 'ppo.batch_size' or is_of_adapters
    is_of_policy = policy is not None and name == key
    if training is None or is_of_policy or has_reward_model:
        return False
    is_sampled = training.labels.are_sampled
    decides_labels = is_sampled and _DECIDES_SAMPLED_LABELS.fullmatch(name) is not None
    return decides_labels or _OF_REWARD.fullmatch(name) is not None
