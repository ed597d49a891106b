"""Reward models: language models with a head that scores responses (OpenAI's rewards.py)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from torch import nn

from lm_human_preferences import errors, lm_tasks, storage
from lm_human_preferences.errors import OptionError, UserError
from lm_human_preferences.language import trained_models
from lm_human_preferences.language.adapters import layers as adapters
from lm_human_preferences.language.encodings import Encoder, Encoding
from lm_human_preferences.language.networks import model_kinds
from lm_human_preferences.language.networks.model_kinds import is_model
from lm_human_preferences.language.networks.network import HEADS, Network
from lm_human_preferences.language.networks.weights import Weights, load_parameters
from lm_human_preferences.language.trained_models import TrainedModel
from lm_human_preferences.machine.hardware import default_device
from lm_human_preferences.ppo import ScoreFn
from lm_human_preferences.runs import run_files, run_settings
from lm_human_preferences.utils.core import TokenIds, token_ids
from lm_human_preferences.utils.logging import log_as_original

SCOPE = 'reward_model'  # prefix of a reward model's parameter names in a checkpoint


class ScoringModel(Protocol):
    """Interface of anything that scores responses to train a policy."""

    encoder: Encoder
    padding_token: int

    def score(self, queries: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
        """Return scores (batch,) of responses (batch, length) to queries (batch, query_length)."""
        ...


@runtime_checkable
class HasStats(Protocol):
    """Interface of a reward that also returns statistics, {name: (batch,)}.

    blocks: numbers of the reference policy's blocks whose inputs, `states`, the reward reads.
    """

    blocks: Sequence[int]

    def score_and_stats(
        self, queries: torch.Tensor, responses: torch.Tensor, states: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return scores (batch,) of responses to queries, and statistics about the scores."""
        ...


class Scorer(nn.Module):
    """Network that scores responses: gain * (reward head at the last token) + bias."""

    def __init__(self, model: Network, encoding: Encoding) -> None:
        super().__init__()
        self.encoder = encoding.get_encoder()
        self.padding_token = self.encoder.padding_token
        self.model = model
        self.reward_gain = nn.Parameter(torch.ones(()))
        self.reward_bias = nn.Parameter(torch.zeros(()))

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """Return {name: parameter} of the network, and of the reward's gain and bias."""
        return {
            **self.model.own_parameters(),
            'reward_gain': self.reward_gain,
            'reward_bias': self.reward_bias,
        }

    def get_params(self) -> list[nn.Parameter]:
        """Return the values of `parameters_by_name` as a list."""
        return list(self.parameters_by_name().values())

    def get_rewards_op(self, queries: TokenIds, responses: TokenIds) -> torch.Tensor:
        """Return differentiable rewards (batch[, n]) of `responses (batch[, n], length)`."""
        # Keep token ids in host memory, so that finding the padding does not wait for the GPU.
        queries, responses = token_ids(queries), token_ids(responses)
        several = responses.reshape(len(responses), -1, responses.shape[-1])
        h = self.model.last_hidden(queries, several, self.padding_token)
        rewards = self.reward_gain * self.model.heads['reward'](h) + self.reward_bias
        return rewards.reshape(responses.shape[:-1])

    @torch.no_grad()
    def get_rewards(self, queries: TokenIds, responses: TokenIds) -> torch.Tensor:
        """Return rewards without gradients; see get_rewards_op."""
        return self.get_rewards_op(queries, responses)

    def score(self, queries: TokenIds, responses: TokenIds) -> torch.Tensor:
        """Return rewards (batch,) of responses (batch, length) to queries (batch, query_length)."""
        return self.get_rewards(queries, responses)

    @torch.no_grad()
    def set_scale(self, gain: float, bias: float) -> None:
        """Set the gain and bias with which rewards are computed."""
        self.reward_gain.fill_(gain)
        self.reward_bias.fill_(bias)


class RewardModel(Scorer):
    """Trainable reward model: a language model with a new head."""

    def __init__(self, trained_model: trained_models.TrainedModel) -> None:
        super().__init__(
            trained_model.build(scope=SCOPE, scalar_heads=['reward']), trained_model.encoding
        )
        self.to(default_device())
        if not trained_model.is_random:
            for name in ('reward_gain', 'reward_bias'):
                variable = self.model.variable_names.name_of(f'{SCOPE}/{name}')
                log_as_original(
                    f'Param {variable} is missing from checkpoint {trained_model.source}'
                )

    @torch.no_grad()
    def restart(self, language_model: Network) -> None:
        """Become, in place, a copy of `language_model` with a random head, gain 1 and bias 0."""
        own = self.model.own_parameters()
        for name, parameter in language_model.own_parameters().items():
            if not name.startswith(HEADS):
                own[name].copy_(parameter)
        adapters.reset(self.model)
        self.model.initialize([name for name in own if name.startswith(HEADS)])
        self.reset_reward_scale()

    def reset_reward_scale(self) -> None:
        """Reset gain to 1 and bias to 0."""
        self.set_scale(1, 0)

    def set_reward_norm(
        self, *, old_mean: float, old_std: float, new_mean: float, new_std: float
    ) -> None:
        """Set gain and bias to map old mean and std to the new ones; ValueError if impossible."""
        gain, bias = self.reward_gain.item(), self.reward_bias.item()
        if (gain, bias) != (1, 0):
            raise ValueError(f'set_reward_norm expects gain = 1 and bias = 0, not {gain}, {bias}')
        if not np.isfinite((old_mean, old_std, new_mean, new_std)).all() or old_std == 0:
            raise ValueError(
                f'cannot map rewards of {old_mean} +- {old_std} to {new_mean} +- {new_std}'
            )
        gain = new_std / old_std
        self.set_scale(gain, new_mean - gain * old_mean)


RewardModelTrainer = RewardModel  # name of RewardModel in the original


def check_encoding(directory: str, name: str, encoding: Encoding) -> None:
    """Raise OptionError unless the reward model in `directory` has the policy's encoding."""
    if name != encoding.name:
        raise OptionError(
            f'--rewards.trained_model {directory} has the encoding {name!r:.80}, not'
            f' {encoding.name!r}'
        )


class TrainedRewardModel(Scorer):
    """Frozen reward model of the run in `train_dir`. base: model to share parameters with."""

    def __init__(
        self,
        train_dir: str,
        encoding: Encoding,
        *,
        device: torch.device | str | None = None,
        scope: str = SCOPE,
        base: trained_models.TrainedModel | None = None,
    ) -> None:
        directory = None if train_dir == 'test' else reward_model_dir(train_dir)
        if directory:
            path = storage.join(directory, 'encoding')
            name = storage.read_json(path) if storage.exists(path) else encoding.name
            check_encoding(directory, name, encoding)
        saved = trained_models.TrainedModel(train_dir, savedir=directory)
        sizes = saved.sizes()
        if not encoding.fits(sizes.n_vocab):
            raise OptionError(
                f'--rewards.trained_model {train_dir} knows {sizes.n_vocab} tokens, '
                f'but encoding {encoding.name!r} of the policy has {encoding.n_vocab}',
            )
        if saved.is_random:
            super().__init__(saved.build(scope=SCOPE, scalar_heads=['reward']), encoding)
        else:
            weights = saved.open_weights()
            super().__init__((base or saved).create_like(saved, ['reward'], scope), encoding)
            self._load(weights, scope)
        self.requires_grad_(False).to(device or default_device())

    def _load(self, weights: Weights, scope: str) -> None:
        parameters = self.parameters_by_name()
        missing = load_parameters(weights, parameters, scope)
        variables = {name: weights.name_of(f'{scope}/{name}') for name in parameters}
        if missing:
            raise UserError(
                f'{weights.path} is not a reward model: it lacks {variables[missing[0]]}'
            )
        for variable in sorted(variables.values()):
            log_as_original(f'setting {variable}')


AnyScorer = TypeVar('AnyScorer', bound=Scorer)


class EnsembleReward:
    """Reward that is the mean of models trained on the same labels with different seeds."""

    def __init__(self, members: Sequence[Scorer]) -> None:
        self.members = tuple(members)
        self.encoder = self.members[0].encoder
        self.padding_token = self.members[0].padding_token

    def get_rewards(self, queries: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
        """Return the members' mean reward, (batch,) or (batch, n); see Scorer.get_rewards_op."""
        rewards = [member.get_rewards(queries, responses) for member in self.members]
        return torch.stack(rewards).mean(0)

    score = get_rewards


def mean_of(members: Sequence[AnyScorer]) -> AnyScorer | EnsembleReward:
    """Return the reward that averages `members`, or the only member itself."""
    return members[0] if len(members) == 1 else EnsembleReward(members)


def networks_of(reward_model: ScoringModel | None) -> dict[str, Any]:
    """Return {scope in checkpoints: reward model} for each model of a policy's reward."""
    if not isinstance(reward_model, EnsembleReward):
        return {SCOPE: reward_model}
    return dict(zip(scopes_of(len(reward_model.members)), reward_model.members, strict=True))


def make_score_fn(task: lm_tasks.TaskHParams, reward_model: ScoringModel) -> ScoreFn:
    """Return a ScoreFn that truncates and scores responses; invalid ones get a fixed penalty."""
    encoder, padding_token = reward_model.encoder, reward_model.padding_token
    postprocess = lm_tasks.postprocess_fn_from_hparams(task, padding_token, encoder)
    is_valid = lm_tasks.filter_fn_from_hparams(task, encoder)

    def score_fn(
        queries: torch.Tensor, responses: torch.Tensor, states: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Score `responses (batch, response_length)` to `queries (batch, query_length)`."""
        responses = postprocess(responses)
        if isinstance(reward_model, HasStats):
            scores, stats = reward_model.score_and_stats(queries, responses, states)
        else:
            scores, stats = reward_model.score(queries, responses), {}
        is_penalized = ~is_valid(responses).to(scores.device, non_blocking=True)
        scores = scores.masked_fill(is_penalized, task.penalty_reward_value)
        return scores, responses, {'score': scores, **stats}

    return score_fn


class Location(NamedTuple):
    """Directory of a reward model, and the prefix of its parameter names in the checkpoint."""

    directory: str
    scope: str = SCOPE


def scopes_of(members: int) -> tuple[str, ...]:
    """Return the checkpoint scopes of an ensemble of `members` reward models."""
    return tuple(run_files.member_name(SCOPE, number) for number in range(members))


def locations_of(path: str, members: int | None = None) -> list[Location]:
    """Return the locations of `members` reward models at `path`; UserError if one is missing."""
    first = reward_model_dir(path).rstrip('/')
    if members is None:
        members = recorded_members(path)
    if members == 1:
        return [Location(first)]
    directories = [run_files.member_name(first, number) for number in range(members)]
    missing = [each for each in directories if not is_model(each)]
    if not missing:
        return [Location(directory) for directory in directories]
    scopes = scopes_of(members)
    if os.path.basename(first) == run_files.POLICY.network:
        there = TrainedModel(first).open_weights().scopes()
        missing = [f'{scope} in {first}' for scope in scopes if scope not in there]
    if missing:
        raise OptionError(f'--rewards.ensemble {members}: {missing[0]} is missing')
    return [Location(first, scope) for scope in scopes]


def recorded_members(path: str) -> int:
    """Return the number of reward models at `path`, a run or a model's directory; 1 if unknown."""
    run, name = os.path.split(path.rstrip('/'))
    if name == run_files.POLICY.network and is_model(path):
        return run_settings.members_of(run or '.', run_files.POLICY)
    return run_settings.members_of(path, run_files.REWARD)


def reward_model_dir(path: str) -> str:
    """Return `path` or its reward_model/, whichever is a reward model; UserError if neither is."""
    if is_model(path) or storage.exists(storage.join(path, run_files.FROZEN_HEAD)):
        return path
    network = storage.join(path, run_files.REWARD.network)
    if is_model(network):
        return network
    if model_kinds.is_peft(storage.model_path(path) or path):
        raise OptionError(
            f'--rewards.trained_model {path} is an adapter, not a reward model: merge it into'
            " its classifier (by PEFT's merge_and_unload, or `export` without --form adapter) and"
            ' give the result'
        )
    train = errors.typed('./launch.py train_reward')
    raise OptionError(
        f'--rewards.trained_model {path} is not a reward model: it holds no sequence classifier of'
        f' transformers, and no {run_files.SIZES}, nor does its reward_model/. Train a reward model'
        f' with {train}, or give the policy/ folder of a train_policy run, or the reward model that'
        ' the settings of that run name'
    )
