"""Choice of the source of a reward that is there already."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from lm_human_preferences import storage
from lm_human_preferences.external_rewards.classifier import is_classifier
from lm_human_preferences.frozen_head import head
from lm_human_preferences.reward_models import locations
from lm_human_preferences.reward_sources import external, heads, models
from lm_human_preferences.reward_sources.base import RewardSource, is_here
from lm_human_preferences.runs import run_files

if TYPE_CHECKING:
    from lm_human_preferences.hparams.policy_options import RewardHParams
    from lm_human_preferences.lm_tasks import TaskHParams

KNOWN = 'mock'  # of --rewards.trained_model: the known reward of reviews
# Asked often while a run goes on
_is_classifier = functools.lru_cache(maxsize=64)(is_classifier)


@functools.lru_cache(maxsize=64)
def _has_head(path: str) -> bool:
    """Return whether a reward model, in a run or by itself, is a head on hidden states."""
    return any(map(head.is_head, (path, storage.join(path, run_files.REWARD.network))))


def source_of(given: RewardHParams, task: TaskHParams, *, ask: bool) -> RewardSource:
    """Return the source of a reward that is not trained by the run; ask: see reward_sources."""
    members = given.members
    if given.function is not None:
        return external.FunctionSource(given.function, task, members)
    if given.trained_model in (None, KNOWN):  # None: settings that are about a task alone
        return external.KnownSource(KNOWN, task, members)
    name = locations.given_name(given)
    directory = given.trained_model
    may_look = ask or is_here(directory)
    if given.class_name is not None or (may_look and _is_classifier(directory)):
        return external.ClassifierSource(name, task, members, directory, given.class_name)
    if may_look and name != models.RANDOM and _has_head(name):
        return heads.SavedHeadSource(name, task, members, given.pessimism)
    return models.SavedSource(name, task, members)
