"""Loading of rewards by name, and of the columns that a reward function asks for."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from lm_human_preferences import lm_tasks, storage
from lm_human_preferences.datasets.jsonl import Query
from lm_human_preferences.errors import OptionError, UserError, about_option
from lm_human_preferences.language.encodings import Encoding
from lm_human_preferences.language.networks.model_kinds import is_classifier, is_head
from lm_human_preferences.language.trained_models import TrainedModel
from lm_human_preferences.machine import precision
from lm_human_preferences.reward_sources.classifier import Classifier
from lm_human_preferences.reward_sources.frozen_head.head import load
from lm_human_preferences.reward_sources.frozen_head.reward import FrozenReward, checked
from lm_human_preferences.reward_sources.function import FunctionScorer
from lm_human_preferences.reward_sources.texts import TextReward, TextScorer
from lm_human_preferences.rewards import (
    EnsembleReward,
    Location,
    ScoringModel,
    TrainedRewardModel,
    check_encoding,
    locations_of,
    mean_of,
    reward_model_dir,
)
from lm_human_preferences.runs import reward_function, run_files
from lm_human_preferences.synthetic.known_reward import KnownReward

LearnedReward = TrainedRewardModel | EnsembleReward | FrozenReward
FrozenRewardModel = KnownReward | TextReward | LearnedReward


def text_scorer(name: str, *, chat: bool, may_be_code: bool = False) -> TextScorer | None:
    """Return the function or classifier called `name`; None if it is another kind of reward.

    may_be_code: True if `name` was typed in this command, for an option that takes a function. An
    existing directory called FILE.py:FUNCTION is not taken for a function.
    """
    if (
        may_be_code
        and not os.path.isdir(name)
        and (name.endswith('.py') or reward_function.is_one(name))
    ):
        return FunctionScorer(reward_function.read(name))
    directory, class_name = split_class(name)
    if storage.model_path(directory) is not None:
        directory = storage.pinned(directory)
    if is_classifier(directory):
        return Classifier(directory, class_name or None, chat=chat)
    if class_name:
        raise OptionError(
            f'--rewards.class_name {class_name}: {directory} is not a classifier saved'
            ' by transformers, and has no classes'
        )
    copy = os.path.join(name, run_files.FUNCTION)
    if not storage.is_remote(name) and os.path.exists(copy):
        raise UserError(
            f'{name} learned from a reward function, and code runs only if you name the function:'
            f' give FILE.py:FUNCTION instead of the run (a copy of the code is in {copy})'
        )
    return None


def split_class(name: str) -> tuple[str, str]:
    """Return (DIRECTORY, CLASS) of DIRECTORY#CLASS; CLASS is '' if there is none."""
    if os.path.exists(name):
        return name, ''
    directory, _, class_name = name.partition('#')
    return directory, class_name


def load_reward_model(
    name: str,
    encoding: Encoding,
    *,
    chat: bool = False,
    members: int | None = None,
    base: TrainedModel | None = None,
    may_be_code: bool = False,
) -> FrozenRewardModel:
    """Return the reward called `name`: 'mock', FILE.py:FUNCTION, a model's directory or ORG/NAME.

    `name` may be DIRECTORY#CLASS of a classifier. members: None for as many as the run has trained.
    may_be_code: see text_scorer.
    """
    if name == 'mock':
        return KnownReward(encoding)
    scorer = text_scorer(name, chat=chat, may_be_code=may_be_code)
    if scorer is None:
        return load_learned(name, encoding, members, base)
    return TextReward(scorer, encoding, chat=chat)


def load_learned(
    name: str, encoding: Encoding, members: int | None = None, base: TrainedModel | None = None
) -> LearnedReward:
    """Return the reward model, ensemble or head in directory `name`; for 'test', a random model."""
    if name != 'test' and is_head(directory := reward_model_dir(name)):
        reward = checked(directory, *load(directory))
        check_encoding(directory, reward.reference.trained_model.encoding.name, encoding)
        return reward
    places = [Location(name)] if name == 'test' else locations_of(name, members)
    models = []
    for place in places:
        models.append(TrainedRewardModel(place.directory, encoding, scope=place.scope, base=base))
    return mean_of(models)


def saved_model(run: str) -> TrainedModel:
    """Return a run's reward model, without the weights; UserError if there is no reward model."""
    try:
        saved = TrainedModel(run, reward_model_dir(run))
        saved.encoding.get_encoder()
        return saved
    except OptionError as e:
        raise UserError(f'no reward model can be loaded: {e.text}') from e


def load_saved(saved: TrainedModel) -> LearnedReward:
    """Load a reward model or an ensemble, and let this process compute in float32."""
    precision.configure_for(saved.sizes().n_embd, 'fp32')
    return load_learned(saved.name, saved.encoding)


def give_columns(reward: TextReward, task: lm_tasks.TaskHParams) -> None:
    """If a reward function takes columns of the data set, give it those of the task's queries."""
    if reward.scorer.asks_for_columns:
        reward.columns = lm_tasks.query_columns(task, reward.encoder)


def give_more_columns(
    reward: ScoringModel | None, queries: Iterable[tuple[Sequence[int], Query]]
) -> None:
    """Give the columns of more `queries` to a reward function, if it takes columns."""
    if isinstance(reward, TextReward) and reward.scorer.asks_for_columns:
        pairs = [pair for pair in queries if pair[1].columns]
        reward.columns = {**reward.columns, **lm_tasks.columns_by_tokens(pairs)}


def load_judge(name: str, encoding: Encoding, task: lm_tasks.TaskHParams) -> FrozenRewardModel:
    """Return the reward called `name`, the value of --judge, for responses of `task`."""
    with about_option('--judge'):
        judge = load_reward_model(name, encoding, chat=task.chat, may_be_code=True)
        if isinstance(judge, TextReward):
            give_columns(judge, task)
        return judge
