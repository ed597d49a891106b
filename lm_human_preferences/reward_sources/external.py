"""Sources that are not networks of ours: the known reward, a function, a classifier."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Self

from lm_human_preferences import lm_tasks
from lm_human_preferences.external_rewards.classifier import Classifier
from lm_human_preferences.external_rewards.function import FunctionScorer
from lm_human_preferences.reward_sources.base import RewardSource, Trial, is_here
from lm_human_preferences.reward_sources.loading import LoadedSource, reward_of_function
from lm_human_preferences.runs import reward_function
from lm_human_preferences.synthetic import known_reward

if TYPE_CHECKING:
    from lm_human_preferences.distributed.comm import Comm
    from lm_human_preferences.language.encodings import Encoding
    from lm_human_preferences.language.trained_models import TrainedModel
    from lm_human_preferences.policy import Policy
    from lm_human_preferences.reward_sources.loading import FrozenRewardModel
    from lm_human_preferences.rewards import ScoringModel


class KnownSource(LoadedSource):
    """The known reward of reviews."""

    def place_in(self, save_dir: str) -> str:
        return self.name

    def check_scoring(self, trial: Trial) -> None:
        if trial.encoding is not None:
            known_reward.check_encoding(trial.encoding)


@dataclasses.dataclass(frozen=True)
class FunctionSource(RewardSource):
    """A function of the user's; code: what is in its file, once a training has read it."""

    code: reward_function.Source | None = None

    def pinned(self, directory: str | None, comm: Comm, *, is_resumed: bool) -> Self:
        """Return it with the code that rank 0 reads."""
        parts: tuple[str, ...] = ()
        if comm.rank == 0:
            own = reward_function.function_of_training(self.name, directory, is_resumed=is_resumed)
            parts = own.name, own.text, own.place
        code = reward_function.Source(*comm.all_gather_object(parts)[0])
        return dataclasses.replace(self, code=code)

    def for_training(
        self, initial_model: TrainedModel, comm: Comm, reference: Policy | None = None
    ) -> ScoringModel:
        """Return the reward by the code."""
        assert self.code is not None, 'see pinned'
        return reward_of_function(self.code, initial_model.encoding, self.task)

    def for_evaluation(
        self, save_dir: str, encoding: Encoding, reference: Policy | None = None
    ) -> FrozenRewardModel:
        """Return the reward by the run's copy of the code."""
        return reward_of_function(reward_function.function_of_run(save_dir), encoding, self.task)

    def place_in(self, save_dir: str) -> str:
        return save_dir

    def check_scoring(self, trial: Trial) -> None:
        """Call the function."""
        assert self.code is not None, 'see pinned'
        scorer = FunctionScorer(self.code)
        trial.ask(scorer)
        if scorer.asks_for_columns and trial.has_queries and trial.encoding is not None:
            lm_tasks.query_columns(self.task, trial.encoding.get_encoder())

    def records(self) -> dict[str, Any]:
        assert self.code is not None, 'see pinned'
        return reward_function.records(self.code)


@dataclasses.dataclass(frozen=True)
class ClassifierSource(LoadedSource):
    """A sequence classifier of transformers. name: DIRECTORY, or DIRECTORY#CLASS_NAME."""

    directory: str = ''
    class_name: str | None = None

    def place_in(self, save_dir: str) -> str:
        return self.name

    def elsewhere(self) -> list[str]:
        return [] if is_here(self.directory) else [f'--rewards.trained_model {self.name}']

    def check_scoring(self, trial: Trial) -> None:
        trial.ask(Classifier(self.directory, self.class_name, chat=self.task.chat))
