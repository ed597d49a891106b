"""Sources of the reward that a policy learns from, a class each.

What the rest asks of a source are the methods of `base.RewardSource`. Another kind of reward is a
class in a module here and its place in a `source_of`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lm_human_preferences import storage
from lm_human_preferences.reward_sources.base import RewardSource

if TYPE_CHECKING:
    from lm_human_preferences.hparams.policy_options import HParams


def source_of(settings: HParams, *, ask: bool = True) -> RewardSource:
    """Return the source of the reward of a run of train_policy with these settings.

    ask: False for a dry run, in which a model of the hub that is not here counts as one of ours.
    """
    # What a kind of reward needs is loaded for it alone.
    options, new_model = settings.rewards, settings.new_reward_model
    if new_model is None:
        from lm_human_preferences.reward_sources import given

        return given.source_of(options, settings.task, ask=ask)
    is_online = options.online is not None
    place = storage.staging_dir(options.trained_model or '')  # in a run that is uploaded
    new = place, settings.task, options.members, new_model.labels.source
    if new_model.is_head:
        from lm_human_preferences.reward_sources import heads

        kind = heads.OnlineHeadSource if is_online else heads.NewHeadSource
        return kind(*new, options.pessimism)
    from lm_human_preferences.reward_sources import models

    return models.OnlineSource(*new) if is_online else models.NewSource(*new)
