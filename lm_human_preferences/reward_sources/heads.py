"""Sources that are heads on the hidden states of the policy that never learns."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lm_human_preferences import storage
from lm_human_preferences.frozen_head import head
from lm_human_preferences.frozen_head import reward as frozen
from lm_human_preferences.frozen_head.features import blocks_of
from lm_human_preferences.reward_models import locations
from lm_human_preferences.reward_sources.base import RewardSource
from lm_human_preferences.reward_sources.models import NewSource, SavedSource
from lm_human_preferences.runs import run_files
from lm_human_preferences.training.networks import POLICY_NETWORKS, Networks

if TYPE_CHECKING:
    from lm_human_preferences.distributed.comm import Comm
    from lm_human_preferences.language.encodings import Encoding
    from lm_human_preferences.language.trained_models import TrainedModel
    from lm_human_preferences.policy import Policy
    from lm_human_preferences.reward_sources.loading import FrozenRewardModel
    from lm_human_preferences.rewards import ScoringModel


@dataclasses.dataclass(frozen=True)
class _OnReference(RewardSource):
    """A head on the hidden states of the reference, which is all the network that it needs."""

    pessimism: float = 0.0

    @property
    def networks(self) -> Networks:
        return POLICY_NETWORKS

    def blocks(self, reference: Policy) -> Sequence[int]:
        return blocks_of(reference.model.sizes.n_layer)

    def for_training(
        self, initial_model: TrainedModel, comm: Comm, reference: Policy | None = None
    ) -> ScoringModel:
        """Return the head that rank 0 reads, on the states of `reference`."""
        assert reference is not None
        own: Any = None
        if comm.rank == 0:
            directory = locations.reward_model_dir(self.name)
            own = directory, *head.load(directory)
        directory, fitted, about = comm.all_gather_object(own)[0]
        return frozen.checked(directory, fitted, about, reference, self.pessimism)

    def for_evaluation(
        self, save_dir: str, encoding: Encoding, reference: Policy | None = None
    ) -> FrozenRewardModel:
        """Return the head in the run."""
        directory = locations.reward_model_dir(self.place_in(save_dir))
        return frozen.load_frozen(directory, reference, self.pessimism)

    def place_in(self, save_dir: str) -> str:
        return self.name


@dataclasses.dataclass(frozen=True)
class SavedHeadSource(_OnReference, SavedSource):
    """A head on the reference's hidden states that is trained already."""


@dataclasses.dataclass(frozen=True)
class NewHeadSource(_OnReference, NewSource):
    """A head on the reference's hidden states that is trained before the policy."""

    def place_in(self, save_dir: str) -> str:
        return storage.join(save_dir, run_files.REWARD.network)


@dataclasses.dataclass(frozen=True)
class OnlineHeadSource(NewHeadSource):
    """A head on the reference's hidden states that is fitted again while the policy trains."""

    def for_training(
        self, initial_model: TrainedModel, comm: Comm, reference: Policy | None = None
    ) -> ScoringModel:
        """Return a head that has learned nothing yet."""
        assert reference is not None
        return frozen.without_labels(reference, self.pessimism)
