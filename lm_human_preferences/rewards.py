"""Reward models: language models with a head that scores responses (the original's rewards.py)."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from lm_human_preferences import lm_tasks, storage
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.errors import OptionError, UserError
from lm_human_preferences.external_rewards.by_name import text_scorer
from lm_human_preferences.external_rewards.classifier_files import is_classifier
from lm_human_preferences.external_rewards.function import FunctionScorer
from lm_human_preferences.external_rewards.texts import TextReward
from lm_human_preferences.hparams.policy_options import HParams
from lm_human_preferences.hparams.task_options import TaskHParams
from lm_human_preferences.language import trained_models
from lm_human_preferences.language.encodings import Encoding
from lm_human_preferences.language.network import HEADS, Network
from lm_human_preferences.language.weights import Weights, check_size, load_parameters
from lm_human_preferences.reward_models import places
from lm_human_preferences.reward_models.ensemble import EnsembleReward, spread
from lm_human_preferences.reward_models.places import SCOPE, reward_model_dir
from lm_human_preferences.runs import reward_function, run_files
from lm_human_preferences.synthetic.known_reward import KnownReward
from lm_human_preferences.utils.core import default_device
from lm_human_preferences.utils.logging import log_as_original

# (queries (batch, query_length), responses (batch, response_length)) ->
# (scores (batch,), the responses as they were scored, {'score': scores}), as in the original; an
# ensemble's scores also have 'score_std' (batch,), how far its members differ, penalty or not
ScoreFn = Callable[
    [torch.Tensor, torch.Tensor],
    tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]],
]


class _Scorer(nn.Module):
    """Scores a query with its response: gain * the reward head at the last token + bias.

    The model does not see the task's prefix and suffix.
    """

    def __init__(self, model: Network, encoding: Encoding) -> None:
        super().__init__()
        self.encoder = encoding.get_encoder()
        self.padding_token = self.encoder.padding_token
        self.model = model
        self.reward_gain = nn.Parameter(torch.ones(()))
        self.reward_bias = nn.Parameter(torch.zeros(()))

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """The parameters of the network and of the scale, by their own names."""
        return {
            **dict(self.model.named_parameters()),
            'reward_gain': self.reward_gain,
            'reward_bias': self.reward_bias,
        }

    def get_params(self) -> list[nn.Parameter]:
        """All parameters, of the network and of the scale."""
        return list(self.parameters_by_name().values())

    def get_rewards_op(self, queries: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
        """Differentiable rewards (batch,) of `responses` to `queries (batch, query_length)`.

        responses: (batch, response_length); or several to each query, (batch, n, response_length),
        whose rewards are (batch, n).
        """
        device = self.reward_gain.device
        several = responses.reshape(len(responses), -1, responses.shape[-1])
        h = self.model.last_hidden(queries.to(device), several.to(device), self.padding_token)
        rewards = self.reward_gain * self.model.heads['reward'](h) + self.reward_bias
        return rewards.reshape(responses.shape[:-1])

    @torch.no_grad()
    def get_rewards(self, queries: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
        """As get_rewards_op, without gradients."""
        return self.get_rewards_op(queries, responses)

    def score(self, queries: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
        """Rewards (batch,) of responses to queries.

        queries: (batch, query_length). responses: (batch, response_length).
        """
        return self.get_rewards(queries, responses)


class RewardModel(_Scorer):
    """A reward model that learns (the original's rewards.RewardModelTrainer).

    trained_model: the language model that it begins as; the reward head is new.
    """

    def __init__(self, trained_model: trained_models.TrainedModel) -> None:
        super().__init__(
            trained_model.build(scope=SCOPE, scalar_heads=['reward']),
            trained_model.encoding,
        )
        self.to(default_device())
        if not trained_model.is_random:
            for name in ('reward_gain', 'reward_bias'):
                variable = self.model.variable_names.name_of(f'{SCOPE}/{name}')
                log_as_original(
                    f'Param {variable} is missing from checkpoint {trained_model.source}'
                )

    @torch.no_grad()
    def _set_norm(self, gain: float, bias: float) -> None:
        self.reward_gain.fill_(gain)
        self.reward_bias.fill_(bias)

    @torch.no_grad()
    def restart(self, language_model: Network) -> None:
        """Begin again as `language_model`, of the same sizes; with a random head, gain 1, bias 0.

        All values are replaced in place, so that an optimizer goes on with the same parameters.
        """
        own = dict(self.model.named_parameters())
        for name, parameter in language_model.named_parameters():
            if not name.startswith(HEADS):
                own[name].copy_(parameter)
        self.model.initialize([name for name in own if name.startswith(HEADS)])
        self.reset_reward_scale()

    def reset_reward_scale(self) -> None:
        """Set gain 1 and bias 0."""
        self._set_norm(1, 0)

    def set_reward_norm(
        self,
        *,
        old_mean: float,
        old_std: float,
        new_mean: float,
        new_std: float,
    ) -> None:
        """Set gain and bias so that rewards of old_mean +- old_std become new_mean +- new_std.

        ValueError unless the scale was reset before, and for scales that are not finite or whose
        old_std is 0.
        """
        gain, bias = self.reward_gain.item(), self.reward_bias.item()
        if (gain, bias) != (1, 0):
            raise ValueError(f'set_reward_norm expects gain = 1 and bias = 0, not {gain}, {bias}')
        if not np.isfinite((old_mean, old_std, new_mean, new_std)).all() or old_std == 0:
            raise ValueError(
                f'cannot scale rewards of {old_mean} +- {old_std} to {new_mean} +- {new_std}'
            )
        gain = new_std / old_std
        self._set_norm(gain, new_mean - gain * old_mean)


class TrainedRewardModel(_Scorer):
    """A frozen reward model as `train_reward` saved it, here or in the original.

    train_dir: the directory with hparams.json and checkpoints/, a run directory that holds it as
    reward_model/, or 'test': a tiny random model. encoding: the policy's, whose tokens are scored.
    scope: of its variables in the checkpoint.
    """

    def __init__(
        self,
        train_dir: str,
        encoding: Encoding,
        *,
        device: torch.device | str | None = None,
        scope: str = SCOPE,
    ) -> None:
        directory = None if train_dir == 'test' else reward_model_dir(train_dir)
        if directory:
            _check_encoding(directory, encoding)
        saved = trained_models.TrainedModel(train_dir, savedir=directory)
        hparams = saved.hparams()
        if not encoding.fits(hparams.n_vocab):
            raise OptionError(
                '--rewards.trained_model',
                f'{train_dir} knows {hparams.n_vocab} tokens, '
                f'but encoding {encoding.name!r} of the policy has {encoding.n_vocab}',
            )
        if saved.is_random:
            super().__init__(saved.build(scope=SCOPE, scalar_heads=['reward']), encoding)
        else:
            weights = saved.open_weights()
            check_size(hparams, weights)
            super().__init__(saved.create(['reward']), encoding)
            self._load(weights, scope)
        self.requires_grad_(False).to(device or default_device())

    def _load(self, weights: Weights, scope: str) -> None:
        parameters = self.parameters_by_name()
        missing = load_parameters(weights, parameters, scope)
        variables = {name: weights.name_of(f'{scope}/{name}') for name in parameters}
        if missing:
            raise UserError(f'{weights.path} is no reward model: it lacks {variables[missing[0]]}')
        for variable in sorted(variables.values()):
            log_as_original(f'setting {variable}')


def _check_encoding(directory: str, encoding: Encoding) -> None:
    """OptionError if the reward model in `directory` says that it is of another encoding."""
    path = storage.join(directory, 'encoding')
    if not storage.exists(path):
        return
    name = storage.read_json(path)
    if name != encoding.name:
        raise OptionError(
            '--rewards.trained_model',
            f'{directory} is of encoding {name!r:.80}, but the policy of {encoding.name!r}',
        )


LearnedReward = TrainedRewardModel | EnsembleReward[TrainedRewardModel]
FrozenRewardModel = KnownReward | TextReward | LearnedReward
# What a policy learns from
ScoringModel = KnownReward | TextReward | _Scorer | EnsembleReward[_Scorer]


def load_reward_model(
    name: str, encoding: Encoding, *, chat: bool = False, members: int | None = None
) -> FrozenRewardModel:
    """The reward called `name`: 'mock', FILE.py:FUNCTION, or the directory of a reward model or of
    a classifier, which may be ORG/NAME of the hub; as DIRECTORY#CLASS if it has several classes.

    encoding: of the policy whose tokens it scores. chat: whether that one answers in a chat.
    members: how many reward models are there; None: as many as the run has trained.
    """
    if name == 'mock':
        return KnownReward(encoding)
    scorer = text_scorer(name, chat=chat)
    if scorer is None:
        return load_learned(name, encoding, members)
    if members is not None and members > 1:
        raise OptionError('--rewards.ensemble', f'{members}: {name} is one reward')
    return TextReward(scorer, encoding, chat=chat)


def load_learned(name: str, encoding: Encoding, members: int | None = None) -> LearnedReward:
    """The reward models at `name`, a directory or 'test'; see load_reward_model."""
    found = [] if name == 'test' or members == 1 else places.places_of(name, members)
    if len(found) < 2:
        return TrainedRewardModel(name, encoding)
    return EnsembleReward(
        [TrainedRewardModel(place.directory, encoding, scope=place.scope) for place in found]
    )


def networks_of(reward_model: ScoringModel | None) -> dict[str, Any]:
    """{scope: network} of what a policy learns from, as checkpoints have it."""
    if not isinstance(reward_model, EnsembleReward):
        return {SCOPE: reward_model}
    members = enumerate(reward_model.members)
    return {run_files.member_name(SCOPE, number): member for number, member in members}


def has_network(hparams: HParams) -> bool:
    """Whether the reward of a run is a network of ours, which its checkpoints have.

    The known reward is none, nor is a function or a classifier. hparams: train_policy's.
    """
    name = hparams.rewards.trained_model
    if hparams.rewards.train_new_model is not None:
        return True
    return name is not None and name != 'mock' and not _is_classifier(name)


@functools.lru_cache(maxsize=64)
def _is_classifier(directory: str) -> bool:
    """As is_classifier, which is asked often, while a run goes on."""
    return is_classifier(directory)


def load_reward_of_run(save_dir: str, hparams: HParams, encoding: Encoding) -> FrozenRewardModel:
    """The reward that the run in `save_dir` learned from. hparams: train_policy's."""
    chat = hparams.task.chat
    if hparams.rewards.function is not None:
        return TextReward(FunctionScorer(reward_function.of_run(save_dir)), encoding, chat=chat)
    directory = places.reward_model_of(save_dir, hparams)
    return load_reward_model(directory, encoding, chat=chat, members=hparams.rewards.members)


def load_judge(name: str, encoding: Encoding, task: TaskHParams) -> FrozenRewardModel:
    """The reward called `name`, by which --judge asks to judge responses of `task`."""
    try:
        return load_reward_model(name, encoding, chat=task.chat)
    except OptionError as e:
        raise OptionError('--judge', e.text) from e
    except UserError as e:
        raise OptionError('--judge', f'{name}: {e}') from e


def scoring_model(
    hparams: HParams,
    initial_model: trained_models.TrainedModel,
    comm: Comm,
    function: reward_function.Source | None = None,
) -> ScoringModel:
    """The reward model that a policy learns from, before rank 0 has broadcast its weights.

    It is a saved one, the known reward, or, with --rewards.online, one that is yet to learn. One
    that this run has trained is read by rank 0 alone: other hosts may not see its directory.
    hparams: train_policy's. function: what `function_of_training` has read.
    """
    members = hparams.rewards.members
    if hparams.rewards.online is not None:
        return _one_or_ensemble([RewardModel(initial_model) for _ in range(members)])
    encoding = initial_model.encoding
    if function is not None:
        return TextReward(FunctionScorer(function), encoding, chat=hparams.task.chat)
    if hparams.rewards.train_new_model is not None and comm.rank != 0:
        return _one_or_ensemble([_without_values(initial_model) for _ in range(members)])
    directory = places.local_reward_model(hparams)
    return load_reward_model(directory, encoding, chat=hparams.task.chat, members=members)


def _one_or_ensemble(scorers: Sequence[_Scorer]) -> ScoringModel:
    return scorers[0] if len(scorers) == 1 else EnsembleReward(scorers)


def _without_values(initial_model: trained_models.TrainedModel) -> _Scorer:
    """A reward model of these sizes that is yet to get its values from rank 0."""
    scorer = _Scorer(initial_model.create(['reward']), initial_model.encoding)
    return scorer.requires_grad_(False).to(default_device())


def function_of_training(hparams: HParams, comm: Comm) -> reward_function.Source | None:
    """The function that a policy learns from, as rank 0 reads it for all ranks; None if it has
    a reward model. hparams: train_policy's."""
    name = hparams.rewards.function
    if name is None:
        return None
    directory = hparams.run.directory
    own = reward_function.of_training(name, directory) if comm.rank == 0 else None
    return comm.all_gather_object(own)[0]


def make_score_fn(
    hparams: TaskHParams,
    reward_model: ScoringModel,
) -> ScoreFn:
    """The function that scores responses: see ScoreFn.

    A response without a truncate token scores `penalty_reward_value` if the task asks for one.
    """
    encoder, padding_token = reward_model.encoder, reward_model.padding_token
    postprocess = lm_tasks.postprocess_fn_from_hparams(hparams, padding_token, encoder)
    is_valid = lm_tasks.filter_fn_from_hparams(hparams, encoder)

    def score_fn(
        queries: torch.Tensor,
        responses: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Scores of `responses (batch, response_length)` to `queries (batch, query_length)`."""
        responses = postprocess(responses)
        stats = {}
        if isinstance(reward_model, EnsembleReward):
            of_members = reward_model.rewards_of_members(queries, responses)
            scores = of_members.mean(0)
            stats['score_std'] = spread(of_members)
        else:
            scores = reward_model.score(queries, responses)
        is_penalized = ~is_valid(responses).to(scores.device)
        scores = scores.masked_fill(is_penalized, hparams.penalty_reward_value)
        return scores, responses, {'score': scores, **stats}

    return score_fn
