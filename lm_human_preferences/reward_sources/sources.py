"""Classes for the sources of the reward that a policy learns from.

Other packages only use the methods of RewardSource. To add a source, add a class here, and a branch
in `source_of`.
"""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

from lm_human_preferences import lm_tasks, rewards, storage
from lm_human_preferences.datasets import registry
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.errors import OptionError
from lm_human_preferences.language.networks import model_kinds, weights
from lm_human_preferences.language.networks.model_kinds import is_classifier, is_model
from lm_human_preferences.language.networks.scopes import POLICY_NETWORKS, Networks
from lm_human_preferences.machine.hardware import default_device
from lm_human_preferences.reward_sources import loading
from lm_human_preferences.reward_sources.frozen_head import head
from lm_human_preferences.reward_sources.frozen_head import reward as frozen
from lm_human_preferences.reward_sources.function import FunctionScorer
from lm_human_preferences.reward_sources.texts import TextReward, TextScorer
from lm_human_preferences.runs import reward_function, run_files, run_settings
from lm_human_preferences.synthetic import known_reward

if TYPE_CHECKING:
    from lm_human_preferences.hparams.policy_options import HParams
    from lm_human_preferences.language.encodings import Encoding
    from lm_human_preferences.language.trained_models import TrainedModel
    from lm_human_preferences.policy import Policy

KNOWN = 'mock'  # value of --rewards.trained_model for the reward of film reviews in known_reward.py
RANDOM = 'test'  # value of --rewards.trained_model for a random network; the run saves the network


@dataclasses.dataclass(frozen=True)
class RewardSource:
    """Source of a policy's reward, for the policy's `task`.

    members: number of models to average. labels: source of labels that the models are trained on.
    pessimism: deviations by which a head lowers scores.
    """

    role: ClassVar[str] = ''  # the reward's field in Networks; '' if the reward has no networks

    name: str  # name of a directory, function or model, as the user gave it
    task: lm_tasks.TaskHParams
    members: int
    labels: str | None = None
    pessimism: float = 0.0

    @property
    def networks(self) -> Networks:
        """All networks of a policy's training, including the reward's networks."""
        if not self.role:
            return POLICY_NETWORKS
        scopes = (*getattr(POLICY_NETWORKS, self.role), *rewards.scopes_of(self.members))
        return dataclasses.replace(POLICY_NETWORKS, **{self.role: scopes})

    def pinned(self, comm: Comm) -> Self:
        """Let rank 0 read the source's files for all ranks; return the source with the content."""
        return self

    def for_training(self, comm: Comm, reference: Policy) -> rewards.ScoringModel:
        """Return the reward model of a policy's training; rank 0 will broadcast the weights.

        reference: the policy that never learns; the reward may be a head on its hidden states.
        """
        base = reference.trained_model
        return self._loaded(self.name, base.encoding, base)

    def for_evaluation(
        self, save_dir: str, encoding: Encoding, reference: Policy | None = None
    ) -> loading.FrozenRewardModel:
        """Return the reward that a run learned from. reference: the initial policy, if loaded."""
        return self._loaded(self.place_in(save_dir), encoding)

    def _loaded(
        self, name: str, encoding: Encoding, base: TrainedModel | None = None
    ) -> loading.FrozenRewardModel:
        chat, members = self.task.chat, self.members
        return loading.load_reward_model(name, encoding, chat=chat, members=members, base=base)

    def place_in(self, save_dir: str) -> str:
        """Return the name or path from which to load the reward of the run in `save_dir`."""
        return self.name

    def recorded_members(self) -> int:
        """Return the number of saved models, which is the default of --rewards.ensemble."""
        return 1

    def elsewhere(self) -> list[str]:
        """Return the options that name files which are missing on this machine."""
        return []

    def check(self, encoding: Encoding | None) -> TextScorer | None:
        """Return the function or classifier that scores texts; None for other rewards.

        UserError if the reward, whose files are here, does not suit the initial model's `encoding`,
        which is None if the model is not here.
        """
        return None  # a model that is yet to be trained has no files to check

    def label_source(self) -> str | None:
        """Return the label file whose queries can replace the texts of a lost data set, or None."""
        return self.labels


class KnownSource(RewardSource):
    """Source of the known reward: log odds, computed exactly, that a film review is positive."""

    def check(self, encoding: Encoding | None) -> None:
        if encoding is not None:
            known_reward.check_encoding(encoding)


@dataclasses.dataclass(frozen=True)
class FunctionSource(RewardSource):
    """A user's reward function. code: content of its file, or None until `pinned` reads it."""

    code: reward_function.Source | None = None

    def pinned(self, comm: Comm) -> Self:
        """Return this source with the reward function's code, which rank 0 reads for all ranks."""
        text = reward_function.read(self.name).text if comm.rank == 0 else ''
        text = comm.all_gather_object(text)[0]
        return dataclasses.replace(self, code=reward_function.Source(self.name, text))

    def _loaded(
        self, name: str, encoding: Encoding, base: TrainedModel | None = None
    ) -> loading.FrozenRewardModel:
        """Return the reward that the user's function computes."""
        assert self.code is not None, 'see pinned'
        reward = TextReward(FunctionScorer(self.code), encoding, chat=self.task.chat)
        loading.give_columns(reward, self.task)
        return reward

    def check(self, encoding: Encoding | None) -> FunctionScorer:
        assert self.code is not None, 'see pinned'
        return FunctionScorer(self.code)


class ClassifierSource(RewardSource):
    """A reward from a transformers classifier. name: DIRECTORY or DIRECTORY#CLASS_NAME."""

    def elsewhere(self) -> list[str]:
        """Return the option that names the classifier; [] if its files are on this machine."""
        directory, _ = loading.split_class(self.name)
        path = storage.model_path(directory) or directory
        is_there = storage.is_here(path) and (not storage.is_hub(path) or weights.are_here(path))
        return [] if is_there else [f'--rewards.trained_model {self.name}']

    def check(self, encoding: Encoding | None) -> TextScorer | None:
        return loading.text_scorer(self.name, chat=self.task.chat)


class SavedSource(RewardSource):
    """Reward models that were trained before this run, or one model with random weights."""

    role = 'frozen'

    def place_in(self, save_dir: str) -> str:
        """Return the reward model's own directory, or the run's copy if that directory is lost."""
        is_there = storage.is_remote(self.name) or os.path.exists(self.name)
        if is_there and self.name != RANDOM:
            return self.name
        return storage.join(save_dir, run_files.POLICY.network)

    def elsewhere(self) -> list[str]:
        is_there = self.name == RANDOM or (_is_here(self.name) and storage.exists(self.name))
        # A missing model may still be in training.
        return [] if is_there else [f'--rewards.trained_model {self.name}']

    def check(self, encoding: Encoding | None) -> None:
        if self.name != RANDOM:
            rewards.locations_of(self.name, self.members)

    def recorded_members(self) -> int:
        return 1 if self.name == RANDOM else rewards.recorded_members(self.name)

    def label_source(self) -> str | None:
        """Return the reward model's label file if queries in the file can replace the data set."""
        if not registry.info(self.task.query_dataset).labels_stand_in:
            return None
        settings = run_settings.reward_settings_of(self.name)
        return None if settings is None else settings.labels.source


class NewSource(RewardSource):
    """Reward models that are trained before the policy. name: directory where they will be."""

    role = 'frozen'

    def for_training(self, comm: Comm, reference: Policy) -> rewards.ScoringModel:
        """Return the reward models, loaded on rank 0; other ranks get rank 0's weights later."""
        if comm.rank == 0:
            return super().for_training(comm, reference)
        # Other hosts may not see the directory of rank 0.
        model = reference.trained_model
        return rewards.mean_of([_without_values(model) for _ in range(self.members)])

    def place_in(self, save_dir: str) -> str:
        own = storage.join(save_dir, run_files.REWARD.network)
        copy = storage.join(save_dir, run_files.POLICY.network)
        return own if is_model(own) else copy


class _OnReference(RewardSource):
    """A head on the hidden states of the reference; it needs no other network."""

    role = ''

    def for_training(self, comm: Comm, reference: Policy) -> rewards.ScoringModel:
        """Load a head on rank 0; return its reward, computed from hidden states of `reference`."""
        if reference.trained_model.is_random:  # each rank has drawn weights of its own
            comm.broadcast_(reference.get_params())

        def read() -> tuple[str, dict[str, torch.Tensor], dict[str, Any]]:
            directory = rewards.reward_model_dir(self.name)
            fitted, about = head.load(directory)
            return directory, vars(fitted), about

        directory, tensors, about = comm.on_rank_0(read)
        return frozen.checked(directory, head.Head(**tensors), about, reference, self.pessimism)

    def for_evaluation(
        self, save_dir: str, encoding: Encoding, reference: Policy | None = None
    ) -> loading.FrozenRewardModel:
        """Return the head that is saved in the run."""
        directory = rewards.reward_model_dir(self.place_in(save_dir))
        return frozen.checked(directory, *head.load(directory), reference, self.pessimism)


class SavedHeadSource(_OnReference, SavedSource):
    """A head, trained already, on hidden states of the reference policy."""


class NewHeadSource(_OnReference, NewSource):
    """A head, trained before the policy, on hidden states of the reference policy."""

    def place_in(self, save_dir: str) -> str:
        return storage.join(save_dir, run_files.REWARD.network)


class OnlineHeadSource(NewHeadSource):
    """A head, fitted again while the policy trains, on hidden states of the reference policy."""

    def for_training(self, comm: Comm, reference: Policy) -> rewards.ScoringModel:
        """Return a head that has learned nothing yet."""
        return frozen.without_labels(reference, self.pessimism)


class OnlineSource(NewSource):
    """Reward models that are trained again and again while the policy trains."""

    role = 'retrained'

    def for_training(self, comm: Comm, reference: Policy) -> rewards.ScoringModel:
        model = reference.trained_model
        return rewards.mean_of([rewards.RewardModel(model) for _ in range(self.members)])

    def place_in(self, save_dir: str) -> str:
        return storage.join(save_dir, run_files.POLICY.network)


def source_of(settings: HParams, *, ask: bool = True) -> RewardSource:
    """Return where the reward comes from in a run of train_policy with these settings.

    ask: False for a dry run, which assumes that a hub model it does not have is a reward model.
    UserError for options of an ensemble or a head if the reward is neither.
    """
    given = settings.rewards
    found, is_known = _source_of(settings, ask)
    if given.members > 1 and (not found.role or found.name == RANDOM):
        raise OptionError(
            f'--rewards.ensemble {given.members}: this option is only for networks that learn'
            ' from labels: leave the option out'
        )
    if given.pessimism is not None and is_known and not isinstance(found, _OnReference):
        raise OptionError(
            f'--rewards.pessimism {given.pessimism:g}: this option is only for heads on hidden'
            ' states: leave the option out'
        )
    return found


def _source_of(settings: HParams, ask: bool) -> tuple[RewardSource, bool]:
    """Return a reward's source, and whether the source's class is known, not only assumed."""
    given, task, members = settings.rewards, settings.task, settings.rewards.members
    new_model = settings.new_reward_model
    if new_model is not None:
        # A run that is uploaded trains its reward model in a staging directory.
        name, labels = storage.staging_dir(given.trained_model or ''), new_model.labels.source
        if new_model.is_head:
            kind = NewHeadSource if given.online is None else OnlineHeadSource
        else:
            kind = NewSource if given.online is None else OnlineSource
        return kind(name, task, members, labels, given.deviations), True
    if given.function is not None:
        return FunctionSource(given.function, task, members), True
    if given.trained_model in (None, KNOWN):  # None in settings that only describe a task
        return KnownSource(KNOWN, task, members), True
    name, directory = given.given_name, given.trained_model
    may_look = ask or _is_here(directory)
    if given.class_name is not None or (may_look and is_classifier(directory)):
        return ClassifierSource(name, task, members), True
    own = storage.join(name, run_files.REWARD.network)
    if may_look and name != RANDOM and (model_kinds.is_head(name) or model_kinds.is_head(own)):
        return SavedHeadSource(name, task, members, None, given.deviations), True
    return SavedSource(name, task, members), may_look


def source_of_run(settings: HParams, run: str, function: str | None) -> RewardSource:
    """Return the source of a run's reward. function: FILE.py:FUNCTION that the user names."""
    source = source_of(settings)
    if isinstance(source, FunctionSource):
        reward_function.check_named(run, source.name, function)
        return dataclasses.replace(source, name=function).pinned(Comm())
    if function is not None:
        raise OptionError(
            f'--{reward_function.NAME} {function}: {run} learned from {source.name}, not from a'
            ' function: leave the option out'
        )
    return source


def _is_here(name: str) -> bool:
    """Return whether a reward model can be looked for on this machine, without a download."""
    return storage.is_here(storage.model_path(name) or name)


def _without_values(initial_model: TrainedModel) -> rewards.Scorer:
    """Return an uninitialised reward model, whose weights rank 0 will broadcast."""
    scorer = rewards.Scorer(initial_model.create(['reward'], rewards.SCOPE), initial_model.encoding)
    return scorer.requires_grad_(False).to(default_device())
