"""Sources that are reward models of ours: saved, trained first, or trained again and again."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from lm_human_preferences import rewards, storage
from lm_human_preferences.language import weights
from lm_human_preferences.reward_models import locations
from lm_human_preferences.reward_sources.base import Trial, is_here
from lm_human_preferences.reward_sources.loading import LoadedSource
from lm_human_preferences.rewards import EnsembleReward, RewardModel, Scorer
from lm_human_preferences.runs import run_files
from lm_human_preferences.training.model_sizes import is_model
from lm_human_preferences.training.networks import POLICY_NETWORKS, Networks
from lm_human_preferences.utils.core import default_device

if TYPE_CHECKING:
    from lm_human_preferences.distributed.comm import Comm
    from lm_human_preferences.language.trained_models import TrainedModel
    from lm_human_preferences.policy import Policy
    from lm_human_preferences.rewards import ScoringModel

RANDOM = 'test'  # a random network, of which a run keeps a copy


class SavedSource(LoadedSource):
    """Reward models that are trained already, or a random one."""

    @property
    def networks(self) -> Networks:
        return _with_reward_models(self.members, is_retrained=False)

    def place_in(self, save_dir: str) -> str:
        return locations.original_or(storage.join(save_dir, run_files.POLICY.network), self.name)

    def elsewhere(self) -> list[str]:
        is_there = self.name == RANDOM or (is_here(self.name) and storage.exists(self.name))
        # One that is missing may still be in training.
        return [] if is_there else [f'--rewards.trained_model {self.name}']

    def check_scoring(self, trial: Trial) -> None:
        if self.name != RANDOM:
            locations.locations_of(self.name, self.members)

    def recorded_members(self) -> int:
        return 1 if self.name == RANDOM else locations.recorded_members(self.name)

    def files(self) -> list[str]:
        directory = self.name.rstrip('/')
        is_network = directory.endswith(f'/{run_files.REWARD.network}')
        return weights.files_in(directory) if is_network else []

    def _labels(self) -> str | None:
        return locations.recorded_labels(self.name)


@dataclasses.dataclass(frozen=True)
class NewSource(LoadedSource):
    """Reward models that are trained before the policy. name: where they are once they are."""

    labels: str = ''

    @property
    def networks(self) -> Networks:
        return _with_reward_models(self.members, is_retrained=False)

    def for_training(
        self, initial_model: TrainedModel, comm: Comm, reference: Policy | None = None
    ) -> ScoringModel:
        """Return the models that rank 0 reads; empty ones on other ranks."""
        if comm.rank == 0:
            return super().for_training(initial_model, comm, reference)
        # Other hosts may not see its directory.
        return _ensemble([_without_values(initial_model) for _ in range(self.members)])

    def place_in(self, save_dir: str) -> str:
        own = storage.join(save_dir, run_files.REWARD.network)
        copy = storage.join(save_dir, run_files.POLICY.network)
        return own if is_model(own) else copy

    def _labels(self) -> str | None:
        return self.labels


class OnlineSource(NewSource):
    """Reward models that are trained again and again while the policy trains."""

    @property
    def networks(self) -> Networks:
        return _with_reward_models(self.members, is_retrained=True)

    def for_training(
        self, initial_model: TrainedModel, comm: Comm, reference: Policy | None = None
    ) -> ScoringModel:
        """Return new models."""
        return _ensemble([RewardModel(initial_model) for _ in range(self.members)])

    def place_in(self, save_dir: str) -> str:
        return storage.join(save_dir, run_files.POLICY.network)


def _with_reward_models(members: int, *, is_retrained: bool) -> Networks:
    scopes = rewards.scopes_of(members)
    if is_retrained:
        return dataclasses.replace(POLICY_NETWORKS, retrained=scopes)
    return dataclasses.replace(POLICY_NETWORKS, frozen=(*POLICY_NETWORKS.frozen, *scopes))


def _ensemble(scorers: list[Any]) -> ScoringModel:
    return scorers[0] if len(scorers) == 1 else EnsembleReward(scorers)


def _without_values(initial_model: TrainedModel) -> Scorer:
    """Return an uninitialised reward model, whose weights rank 0 will broadcast."""
    scorer = Scorer(initial_model.create(['reward'], rewards.SCOPE), initial_model.encoding)
    return scorer.requires_grad_(False).to(default_device())
