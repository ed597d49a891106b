"""RewardSource: what the rest asks of a source of reward."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self

from lm_human_preferences import storage
from lm_human_preferences.datasets import registry
from lm_human_preferences.training.networks import POLICY_NETWORKS, Networks

if TYPE_CHECKING:
    from lm_human_preferences.distributed.comm import Comm
    from lm_human_preferences.external_rewards.texts import TextScorer
    from lm_human_preferences.language.encodings import Encoding
    from lm_human_preferences.language.trained_models import TrainedModel
    from lm_human_preferences.lm_tasks import TaskHParams
    from lm_human_preferences.policy import Policy
    from lm_human_preferences.rewards import ScoringModel


class Trial(Protocol):
    """Texts to try a reward on. encoding: None where it is not here; has_queries: they are."""

    encoding: Encoding | None

    @property
    def has_queries(self) -> bool: ...

    def ask(self, scorer: TextScorer) -> None:
        """Ask a reward about a few texts; UserError where it fails."""
        ...


@dataclasses.dataclass(frozen=True)
class RewardSource(ABC):
    """Source of a policy's reward. members: models of which it is the mean. task: the policy's."""

    name: str  # of a directory, a function or a model, as the user gave it
    task: TaskHParams
    members: int

    @property
    def networks(self) -> Networks:
        """Networks of a training of a policy, with those that are the reward."""
        return POLICY_NETWORKS

    def pinned(self, directory: str | None, comm: Comm, *, is_resumed: bool) -> Self:
        """Return the same source as rank 0 reads it for the training in a run's directory."""
        return self

    @abstractmethod
    def for_training(
        self, initial_model: TrainedModel, comm: Comm, reference: Policy | None = None
    ) -> ScoringModel:
        """Return the reward model of a training, before rank 0 broadcasts its weights.

        reference: the policy that never learns, on whose hidden states a reward may be a head.
        """

    @abstractmethod
    def for_evaluation(
        self, save_dir: str, encoding: Encoding, reference: Policy | None = None
    ) -> ScoringModel:
        """Return the reward that the run in `save_dir` learned from; reference: if it is loaded."""

    def blocks(self, reference: Policy) -> Sequence[int]:
        """Return the blocks of the reference by whose inputs the reward scores."""
        return ()

    @abstractmethod
    def place_in(self, save_dir: str) -> str:
        """Return the name by which the reward of a run is loaded; its own copy may be newer."""

    def recorded_members(self) -> int:
        """Return the number of models that there are, where the user has not said how many."""
        return 1

    def files(self) -> list[str]:
        """Return the paths that a training reads, as far as they are known before."""
        return []

    def elsewhere(self) -> list[str]:
        """Return the options whose files are not on this machine, or not yet."""
        return []

    def check_scoring(self, trial: Trial) -> None:
        """Raise UserError if the reward, whose files are here, could not judge responses."""
        return  # one that is yet to be trained is checked by its labels

    def records(self) -> dict[str, Any]:
        """Return the files of a run that say what it learned from: {name: text, or JSON}."""
        return {}

    def label_source(self) -> str | None:
        """Return the labels that may stand in for the data set's queries, if it has some."""
        is_needed = registry.info(self.task.query_dataset).labels_stand_in
        return self._labels() if is_needed else None

    def _labels(self) -> str | None:
        return None


def is_here(name: str) -> bool:
    """Return whether no server need be asked about a reward model; local ones may be missing."""
    path = storage.model_path(name) or name
    return not storage.is_remote(path) or (storage.is_hub(path) and storage.is_here(path))
