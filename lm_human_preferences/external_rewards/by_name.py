"""Rewards that read texts, by the names that options and commands give them."""

from __future__ import annotations

import os

from lm_human_preferences import storage
from lm_human_preferences.errors import OptionError
from lm_human_preferences.external_rewards.classifier import Classifier
from lm_human_preferences.external_rewards.classifier_files import is_classifier
from lm_human_preferences.external_rewards.function import FunctionScorer
from lm_human_preferences.external_rewards.texts import TextScorer
from lm_human_preferences.runs import reward_function, run_files


def text_scorer(name: str, *, chat: bool) -> TextScorer | None:
    """The reward called `name` if it is one that reads texts, else None; see
    rewards.load_reward_model.

    It may also be that of a run that learns from a function. chat: whether the policy answers in a
    chat. OptionError for a class where there are none; UserError for a file without a function.
    """
    if reward_function.is_one(name) or (name.endswith('.py') and os.path.isfile(name)):
        return FunctionScorer(reward_function.read(name))
    directory, class_name = _split_class(name)
    if storage.model_path(directory) is not None:
        directory = storage.pinned(directory)
    if is_classifier(directory):
        return Classifier(directory, class_name or None, chat=chat)
    if class_name:
        if not storage.is_remote(directory) and not os.path.exists(directory):
            raise OptionError('--rewards.trained_model', f'{directory}: there is no such directory')
        raise OptionError(
            '--rewards.class_name',
            f'{class_name}: {directory} is no classifier of transformers, which has classes',
        )
    if not storage.is_remote(name) and run_files.has_reward_function(name):
        return FunctionScorer(reward_function.of_run(name))
    return None


def _split_class(name: str) -> tuple[str, str]:
    """(DIRECTORY, CLASS) of a reward called DIRECTORY#CLASS; '' where no class is named.

    A local directory may have a # in its name, and so may a class.
    """
    parts = name.split('#')
    for count in range(len(parts), 0, -1):
        directory = '#'.join(parts[:count])
        if os.path.exists(directory):
            return directory, '#'.join(parts[count:])
    directory, _, class_name = name.partition('#')
    return directory, class_name
