"""Look-up by name of the rewards that read texts, as users name them in options."""

import os

from lm_human_preferences import storage
from lm_human_preferences.errors import OptionError, UserError
from lm_human_preferences.external_rewards.classifier import Classifier, is_classifier
from lm_human_preferences.external_rewards.function import FunctionScorer
from lm_human_preferences.external_rewards.texts import TextScorer
from lm_human_preferences.runs import reward_function, run_files


def text_scorer(name: str, *, chat: bool, may_be_code: bool = False) -> TextScorer | None:
    """Return the function or classifier that `name` means; None if it means another reward.

    may_be_code: True if `name` was typed in this command, for an option that takes a function. An
    existing directory called FILE.py:FUNCTION is not taken for a function.
    """
    is_code = reward_function.is_one(name) or name.endswith('.py')
    if may_be_code and is_code and not os.path.isdir(name):
        return FunctionScorer(reward_function.read(name))
    directory, class_name = _split_class(name)
    if storage.model_path(directory) is not None:
        directory = storage.pinned(directory)
    if is_classifier(directory):
        return Classifier(directory, class_name or None, chat=chat)
    if class_name:
        raise OptionError(
            '--rewards.class_name',
            f'{class_name}: {directory} is not a classifier of transformers, which has classes',
        )
    copy = os.path.join(name, run_files.FUNCTION)
    if not storage.is_remote(name) and os.path.exists(copy):
        raise UserError(
            f'{name} learned from a function, and code runs only where a command names it: give'
            f' FILE.py:FUNCTION in place of the run (it keeps a copy to read, {copy})'
        )
    return None


def _split_class(name: str) -> tuple[str, str]:
    """Return (DIRECTORY, CLASS) of DIRECTORY#CLASS; CLASS is '' if there is none."""
    if os.path.exists(name):
        return name, ''
    directory, _, class_name = name.partition('#')
    return directory, class_name
