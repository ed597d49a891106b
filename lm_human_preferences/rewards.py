"""Reward models: a language model whose 'reward' head is read at the last token (the original's
rewards.py)."""

import os
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from lm_human_preferences import lm_tasks, storage
from lm_human_preferences.checkpointing.tf_bundle import Bundle
from lm_human_preferences.datasets import registry
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.task import TaskHParams
from lm_human_preferences.hparams.train_policy import HParams
from lm_human_preferences.language import trained_models
from lm_human_preferences.language.encodings import Encoding
from lm_human_preferences.language.model import Model
from lm_human_preferences.synthetic.known_reward import MockRewardModel
from lm_human_preferences.utils.core import default_device
from lm_human_preferences.utils.logging import say_as_recorded

# Of (queries, responses): (scores, postprocessed responses, statistics), see make_score_fn.
ScoreFn = Callable[
    [torch.Tensor, torch.Tensor],
    tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]],
]


class _Scorer(nn.Module):
    """Scores query and response without the task's prefix and suffix: gain * reward + bias."""

    def __init__(self, model: Model, encoding: Encoding) -> None:
        super().__init__()
        self.encoder = encoding.get_encoder()
        self.padding_token = self.encoder.padding_token
        self.model = model
        self.reward_gain = nn.Parameter(torch.ones(()))
        self.reward_bias = nn.Parameter(torch.zeros(()))

    def tf_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters under the variable names of the original's checkpoints."""
        return {
            **self.model.tf_parameters('reward_model'),
            'reward_model/reward_norm/gain': self.reward_gain,
            'reward_model/reward_norm/bias': self.reward_bias,
        }

    def get_params(self) -> list[nn.Parameter]:
        return list(self.tf_parameters().values())

    def get_rewards_op(self, queries: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
        """Differentiable rewards (batch,) of `queries (batch, query_length)`, `responses (batch,
        response_length)`.

        Of several responses to each query, (batch, n, response_length), the rewards are (batch, n).
        """
        device = self.reward_gain.device
        several = responses.reshape(len(responses), -1, responses.shape[-1])
        h = self.model.last_hidden(queries.to(device), several.to(device), self.padding_token)
        rewards = self.reward_gain * self.model.heads['reward'](h) + self.reward_bias
        return rewards.reshape(responses.shape[:-1])

    @torch.no_grad()
    def get_rewards(self, queries: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
        return self.get_rewards_op(queries, responses)


class RewardModel(_Scorer):
    """The reward model that is trained (the original's rewards.RewardModelTrainer); starts from a
    language model."""

    def __init__(self, trained_model: trained_models.TrainedModel) -> None:
        super().__init__(
            trained_model.build(scope='reward_model', scalar_heads=['reward']),
            trained_model.encoding,
        )
        self.to(default_device())
        if not trained_model.is_random:
            for name in ('gain', 'bias'):
                say_as_recorded(
                    f'Param reward_model/reward_norm/{name} is missing from checkpoint'
                    f' {trained_model.source}'
                )

    @torch.no_grad()
    def _set_norm(self, gain: float, bias: float) -> None:
        self.reward_gain.fill_(gain)
        self.reward_bias.fill_(bias)

    def reset_reward_scale(self) -> None:
        self._set_norm(1, 0)

    def set_reward_norm(
        self,
        *,
        old_mean: float,
        old_std: float,
        new_mean: float,
        new_std: float,
    ) -> None:
        """Set gain and bias so that rewards of old_mean +- old_std come out as new_mean +- new_std.

        Raises ValueError unless the scale was reset before, and for what is not finite or does not
        vary.
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
    """A reward model as `train_reward` saved it, here or in the original; 'test' is the tiny random
    one.

    train_dir: the directory with hparams.json and checkpoints/, or a run directory that holds it as
    reward_model/. encoding: that of the policy, whose tokens are scored.
    """

    def __init__(
        self,
        train_dir: str,
        encoding: Encoding,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        directory = None if train_dir == 'test' else reward_model_dir(train_dir)
        hparams = (
            trained_models.load_hparams(storage.join(directory, 'hparams.json'))
            if directory
            else trained_models.test_hparams()
        )
        if hparams.n_vocab != encoding.n_vocab:
            raise UserError(
                f'--rewards.trained_model {train_dir} knows {hparams.n_vocab} tokens, '
                f'but encoding {encoding.name!r} of the policy has {encoding.n_vocab}'
            )
        if directory:
            bundle = trained_models.open_bundle(directory)
            trained_models.check_size(hparams, bundle)
        super().__init__(Model(hparams, ['reward']), encoding)
        if directory:
            self._load(bundle)
        else:
            self.model.initialize()
        self.requires_grad_(False).to(device or default_device())

    def _load(self, bundle: Bundle) -> None:
        parameters = self.tf_parameters()
        missing = trained_models.load_parameters(
            bundle, {name: (name, p) for name, p in parameters.items()}
        )
        if missing:
            raise UserError(f'{bundle.prefix} is no reward model: it lacks {missing[0]}')
        for name in sorted(parameters):
            say_as_recorded(f'setting {name}')

    def score(self, queries: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
        """Rewards (batch,) of `queries (batch, query_length)` and `responses (batch,
        response_length)`."""
        return self.get_rewards(queries, responses)


def get_reward_model(name: str, encoding: Encoding) -> MockRewardModel | TrainedRewardModel:
    """What scores responses: the known reward for 'mock', else the model in the directory
    `name`."""
    return MockRewardModel(encoding) if name == 'mock' else TrainedRewardModel(name, encoding)


def reward_model_of(save_dir: str, hparams: HParams) -> str:
    """The directory of the reward model that a run was trained on, or 'mock'.

    Where it is gone, that of the policy, whose checkpoint has a copy of the weights. save_dir: the
    run's directory; hparams: train_policy's.
    """
    if hparams.rewards.train_new_model is not None:
        return storage.join(save_dir, 'reward_model')
    name = hparams.rewards.trained_model
    assert name is not None
    gone = name == 'test' or (
        name != 'mock' and not storage.is_remote(name) and not os.path.exists(name)
    )
    return storage.join(save_dir, 'policy') if gone else name


def make_score_fn(
    hparams: TaskHParams,
    score_model: MockRewardModel | TrainedRewardModel,
) -> ScoreFn:
    """Function of (queries, responses) -> (scores (batch,), postprocessed responses, {'score':
    scores}).

    A response without a truncate token where one is asked for scores `penalty_reward_value`.
    hparams: TaskHParams.
    """
    postprocess = lm_tasks.postprocess_fn_from_hparams(hparams, score_model.padding_token)
    is_valid = lm_tasks.filter_fn_from_hparams(hparams)

    def score_fn(
        queries: torch.Tensor,
        responses: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Of `queries (batch, query_length)` and `responses (batch, response_length)`."""
        responses = postprocess(responses)
        scores = score_model.score(queries, responses)
        scores = scores.masked_fill(
            ~is_valid(responses).to(scores.device), hparams.penalty_reward_value
        )
        return scores, responses, {'score': scores}

    return score_fn


def label_source(hparams: HParams) -> str | None:
    """Source of the labels whose queries may stand in for the data set; None if they are not needed
    or not known.

    hparams: train_policy's. Those of a trained reward model are told by what its training left
    beside it.
    """
    if not registry.info(hparams.task.query_dataset).labels_stand_in:
        return None
    if hparams.rewards.train_new_model is not None:
        return hparams.rewards.train_new_model.labels.source
    assert hparams.rewards.trained_model is not None
    run = hparams.rewards.trained_model.rstrip('/')
    for directory in (run, os.path.dirname(run)):
        try:
            return str(
                storage.read_json(storage.join(directory, 'train_reward_hparams.json'))['labels'][
                    'source'
                ]
            )
        except (storage.StorageError, KeyError, TypeError):
            continue
    return None


def reward_model_dir(path: str) -> str:
    """`path`, or the reward_model/ in it where `path` is a run directory."""
    if storage.exists(storage.join(path, 'hparams.json')):
        return path
    if storage.exists(storage.join(path, 'reward_model', 'hparams.json')):
        return storage.join(path, 'reward_model')
    raise UserError(
        f'--rewards.trained_model {path}: neither it nor its reward_model/ has an hparams.json; '
        'train one with ./launch.py train_reward'
    )
