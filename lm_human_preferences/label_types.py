"""What people were asked and what they answered: the label types of a reward model (the original's
label_types.py)."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.nn.functional as F

from lm_human_preferences.errors import UserError
from lm_human_preferences.utils.core import Schema, pearson_r

MAX_RESPONSES = 1000  # of one label
NUMBER = Schema(torch.float32, ())


def _tokens(length: int) -> Schema:
    return Schema(torch.int64, (length,))


class LabelType(ABC):
    """A question about responses and the loss that its answers give; `labels` is a dict of batched
    tensors."""

    samples: tuple[str, ...]  # names of the fields that hold the responses

    def question_schemas(self, *, query_length: int, response_length: int) -> dict[str, Schema]:
        """Schemas of the query and of the responses that were shown."""
        return {
            'query': _tokens(query_length),
            **{sample: _tokens(response_length) for sample in self.samples},
        }

    @abstractmethod
    def label_schemas(self) -> dict[str, Schema]:
        """Schemas of the answer."""

    @abstractmethod
    def loss_of(
        self,
        rewards: torch.Tensor,
        labels: dict[str, torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """Statistics of a batch, scalars, of which 'loss' is to be minimised; `rewards (batch, n)`
        of its n samples."""

    def loss(
        self,
        reward_model: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        labels: dict[str, torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """The same with the rewards that `reward_model`, a function of (queries, responses), gives:
        (batch,) each."""
        return self.loss_of(
            torch.stack([reward_model(labels['query'], labels[s]) for s in self.samples], 1), labels
        )

    @abstractmethod
    def agreement(self, rewards: torch.Tensor, labels: dict[str, torch.Tensor]) -> torch.Tensor:
        """How far `rewards (batch, samples)` order as the labels do: 1 always, 0 as chance would,
        -1 never."""

    def target_scales(self, labels: dict[str, torch.Tensor]) -> torch.Tensor | None:
        """Numbers (batch,) on the scale that rewards should have, or None where labels tell nothing
        of it."""
        return None

    @abstractmethod
    def guessing_loss(self, labels: dict[str, torch.Tensor]) -> float:
        """The mean loss over `labels` of the best constant answer, which looks at no response."""


class PickBest(LabelType):
    """The best of N responses: cross entropy of a softmax over their rewards (paper, equation
    1)."""

    def __init__(self, num_responses: int) -> None:
        self.samples = tuple(f'sample{i}' for i in range(num_responses))

    def label_schemas(self) -> dict[str, Schema]:
        return {'best': Schema(torch.int64, ())}

    def loss_of(
        self,
        rewards: torch.Tensor,
        labels: dict[str, torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """The cross entropy, in nats."""
        error = F.cross_entropy(rewards, labels['best'].to(rewards.device))
        return {'loss': error, 'error': error}

    def agreement(self, rewards: torch.Tensor, labels: dict[str, torch.Tensor]) -> torch.Tensor:
        ahead = (rewards.gather(1, labels['best'][:, None]) - rewards).sign()
        return ahead.sum() / (ahead.numel() - len(ahead)) if ahead.shape[1] > 1 else torch.zeros(())

    def guessing_loss(self, labels: dict[str, torch.Tensor]) -> float:
        """ln N: every response is equally likely to be the best."""
        return math.log(len(self.samples))


class ScalarRating(LabelType):
    """One response with a score: squared error."""

    samples = ('sample',)

    def label_schemas(self) -> dict[str, Schema]:
        return {'score': NUMBER}

    def target_scales(self, labels: dict[str, torch.Tensor]) -> torch.Tensor | None:
        return labels['score']

    def loss_of(
        self,
        rewards: torch.Tensor,
        labels: dict[str, torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """Also mean and variance of the labels, and their correlation with the rewards."""
        predicted = rewards[:, 0]
        score = labels['score'].to(predicted.device)
        error = F.mse_loss(predicted, score)
        var, mean = torch.var_mean(score, correction=0)
        corr = pearson_r(score, predicted.detach())
        return {'loss': error, 'error': error, 'label_mean': mean, 'label_var': var, 'corr': corr}

    def agreement(self, rewards: torch.Tensor, labels: dict[str, torch.Tensor]) -> torch.Tensor:
        return pearson_r(labels['score'], rewards[:, 0]).nan_to_num(0.0)

    def guessing_loss(self, labels: dict[str, torch.Tensor]) -> float:
        """The variance of the scores: every response gets their mean."""
        return labels['score'].var(correction=0).item()


class ScalarComparison(LabelType):
    """How much better the second of two responses is: squared error of the difference of
    rewards."""

    samples = ('sample0', 'sample1')

    def label_schemas(self) -> dict[str, Schema]:
        return {'difference': NUMBER}

    def target_scales(self, labels: dict[str, torch.Tensor]) -> torch.Tensor | None:
        return labels['difference'] / 2  # a difference of two rewards varies twice as much as one

    def loss_of(
        self,
        rewards: torch.Tensor,
        labels: dict[str, torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """The mean squared error of the difference."""
        predicted = rewards[:, 1] - rewards[:, 0]
        error = F.mse_loss(predicted, labels['difference'].to(predicted.device))
        return {'loss': error, 'error': error}

    def agreement(self, rewards: torch.Tensor, labels: dict[str, torch.Tensor]) -> torch.Tensor:
        return ((rewards[:, 1] - rewards[:, 0]).sign() * labels['difference'].sign()).mean()

    def guessing_loss(self, labels: dict[str, torch.Tensor]) -> float:
        """The mean square of the differences: both responses get the same reward."""
        return labels['difference'].square().mean().item()


def get(name: str) -> LabelType:
    """The label type called `name`: scalar_rating, scalar_compare, or best_of_N."""
    if name == 'scalar_rating':
        return ScalarRating()
    if name == 'scalar_compare':
        return ScalarComparison()
    if name.startswith('best_of_'):
        try:
            if (count := int(name.removeprefix('best_of_'))) <= MAX_RESPONSES:
                return PickBest(count)
        except ValueError:
            pass
    raise UserError(
        f'--labels.type {name!r:.80} is none of best_of_N (as in best_of_4, up to {MAX_RESPONSES}),'
        ' scalar_rating, scalar_compare'
    )
