"""Label types: what people were asked, what they answered, and how a reward model learns from it.

To train on a label type, one class is all: its fields and their checks, its loss, and the answers
that simulated labels give (the original's label_types.py; paper, section 2.1). To add one, derive
it from LabelType and decorate it with `register`. To ask people for it (`ask`, `label`), more files
have to know it: see the map in CONTRIBUTING.md.
"""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.train_reward import HParams
from lm_human_preferences.utils.core import Schema, pearson_r

MAX_RESPONSES = 1000  # in one label
NUMBER = Schema(torch.float32, ())
INDEX = Schema(torch.int64, ())


class LabelType(ABC):
    """A question about one or more responses to a query, and the loss that its answers give.

    `labels` is always a dict of batched tensors, {field: (batch, *schema.shape)}, with the fields
    of `question_schemas` and `label_schemas`. `rewards` is (batch, n): the rewards of the n
    samples, in the order of `samples`. `loss_of` gets them from a reward model and has to be
    differentiable.
    """

    name: str  # as --labels.type; an N in it is a number, which the constructor takes
    samples: tuple[str, ...]  # fields that hold the responses
    chance: float | None = None  # share of labels that guessing gets right, see is_right

    def question_schemas(self, *, query_length: int, response_length: int) -> dict[str, Schema]:
        """Schemas of what was shown: the query and the responses, all as token ids."""
        schemas = {'query': Schema(torch.int64, (query_length,))}
        for sample in self.samples:
            schemas[sample] = Schema(torch.int64, (response_length,))
        return schemas

    @abstractmethod
    def label_schemas(self) -> dict[str, Schema]:
        """Schemas of the answer: numbers, or integers, or fixed-length lists of these."""

    def find_invalid(
        self, labels: dict[str, torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor, str]]:
        """Yield (field of the answer, which of its values are invalid, what a valid one is).

        The mask is bool, (batch,) or the shape of the field. That values have the type and shape of
        their schema, and that numbers are finite, was checked before.
        """
        yield from ()

    @abstractmethod
    def simulate(self, scores: torch.Tensor) -> dict[str, torch.Tensor]:
        """The answers of somebody who judges by `scores (batch, n)` of the n samples."""

    @abstractmethod
    def loss_of(
        self,
        rewards: torch.Tensor,
        labels: dict[str, torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """Statistics of a batch, all scalars; 'loss' is minimised."""

    def loss(
        self,
        reward_model: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        labels: dict[str, torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """`loss_of` with the rewards (batch,) of `reward_model(queries, responses)`."""
        rewards = [reward_model(labels['query'], labels[sample]) for sample in self.samples]
        return self.loss_of(torch.stack(rewards, dim=1), labels)

    @abstractmethod
    def guessing_loss(self, labels: dict[str, torch.Tensor]) -> float:
        """The mean loss over `labels` of the best constant rewards, which depend on no response."""

    @abstractmethod
    def agreement(self, rewards: torch.Tensor, labels: dict[str, torch.Tensor]) -> torch.Tensor:
        """How often the rewards order the samples as the labels do.

        1 is always, 0 what chance gives, -1 never.
        """

    def is_right(
        self, rewards: torch.Tensor, labels: dict[str, torch.Tensor]
    ) -> torch.Tensor | None:
        """Which labels, bool (batch,), somebody who judges by the rewards would have given.

        None where labels are no choice.
        """
        return None

    def target_scales(self, labels: dict[str, torch.Tensor]) -> torch.Tensor | None:
        """Numbers (batch,) whose mean and deviation the rewards should have.

        None where labels do not tell.
        """
        return None


TYPES: dict[str, type[LabelType]] = {}


def register(label_type: type[LabelType]) -> type[LabelType]:
    """Class decorator: makes a label type known to `get` under its `name`."""
    TYPES[label_type.name] = label_type
    return label_type


@register
class PickBest(LabelType):
    """The best of N responses: cross entropy of a softmax over their rewards (equation 1)."""

    name = 'best_of_N'

    def __init__(self, num_responses: int) -> None:
        self.samples = tuple(f'sample{i}' for i in range(num_responses))
        self.chance = 1 / num_responses if num_responses > 0 else None

    def label_schemas(self) -> dict[str, Schema]:
        return {'best': INDEX}

    def find_invalid(
        self, labels: dict[str, torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor, str]]:
        """`best` is the index of a sample."""
        best = labels['best']
        yield 'best', (best < 0) | (best >= len(self.samples)), f'0 to {len(self.samples) - 1}'

    def simulate(self, scores: torch.Tensor) -> dict[str, torch.Tensor]:
        return {'best': scores.argmax(1)}

    def loss_of(
        self,
        rewards: torch.Tensor,
        labels: dict[str, torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """The cross entropy, in nats."""
        error = F.cross_entropy(rewards, labels['best'].to(rewards.device))
        return {'loss': error, 'error': error}

    def guessing_loss(self, labels: dict[str, torch.Tensor]) -> float:
        """ln N: every response is equally likely to be the best."""
        return math.log(len(self.samples))

    def agreement(self, rewards: torch.Tensor, labels: dict[str, torch.Tensor]) -> torch.Tensor:
        """The mean over all other samples.

        1 where the best has the higher reward, -1 where it has the lower.
        """
        others = len(self.samples) - 1
        if others == 0:
            return torch.zeros(())
        ahead = (rewards.gather(1, labels['best'][:, None]) - rewards).sign()
        return ahead.sum() / (others * len(rewards))

    def is_right(self, rewards: torch.Tensor, labels: dict[str, torch.Tensor]) -> torch.Tensor:
        """Where the best has the highest reward."""
        return rewards.argmax(1) == labels['best']


@register
class ScalarRating(LabelType):
    """A score for one response: squared error."""

    name = 'scalar_rating'
    samples = ('sample',)

    def label_schemas(self) -> dict[str, Schema]:
        return {'score': NUMBER}

    def simulate(self, scores: torch.Tensor) -> dict[str, torch.Tensor]:
        return {'score': scores[:, 0]}

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

    def guessing_loss(self, labels: dict[str, torch.Tensor]) -> float:
        """The variance of the scores: every response gets their mean."""
        return labels['score'].var(correction=0).item()

    def agreement(self, rewards: torch.Tensor, labels: dict[str, torch.Tensor]) -> torch.Tensor:
        """Their correlation."""
        return pearson_r(labels['score'], rewards[:, 0]).nan_to_num(0.0)

    def target_scales(self, labels: dict[str, torch.Tensor]) -> torch.Tensor | None:
        return labels['score']


@register
class ScalarComparison(LabelType):
    """How much better the second of two responses is: squared error of the rewards' difference."""

    name = 'scalar_compare'
    samples = ('sample0', 'sample1')
    chance = 1 / 2

    def label_schemas(self) -> dict[str, Schema]:
        return {'difference': NUMBER}

    def simulate(self, scores: torch.Tensor) -> dict[str, torch.Tensor]:
        return {'difference': scores[:, 1] - scores[:, 0]}

    def loss_of(
        self,
        rewards: torch.Tensor,
        labels: dict[str, torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """The mean squared error of the difference."""
        predicted = rewards[:, 1] - rewards[:, 0]
        error = F.mse_loss(predicted, labels['difference'].to(predicted.device))
        return {'loss': error, 'error': error}

    def guessing_loss(self, labels: dict[str, torch.Tensor]) -> float:
        """The mean square of the differences: both responses get the same reward."""
        return labels['difference'].square().mean().item()

    def agreement(self, rewards: torch.Tensor, labels: dict[str, torch.Tensor]) -> torch.Tensor:
        """1 where the difference has the right sign, -1 where it has the wrong one, on average."""
        difference = rewards[:, 1] - rewards[:, 0]
        return (difference.sign() * labels['difference'].sign()).mean()

    def is_right(self, rewards: torch.Tensor, labels: dict[str, torch.Tensor]) -> torch.Tensor:
        """Where the difference has the right sign."""
        return (rewards[:, 1] - rewards[:, 0]).sign() == labels['difference'].sign()

    def target_scales(self, labels: dict[str, torch.Tensor]) -> torch.Tensor | None:
        return labels['difference'] / 2  # as in the original


def get(name: str) -> LabelType:
    """The label type called `name`: scalar_rating, scalar_compare, best_of_4, ...

    UserError where there is none.
    """
    for pattern, label_type in TYPES.items():
        # With a sign, because the original accepts best_of_-1, which has no samples.
        match = re.fullmatch(re.escape(pattern).replace('N', '(-?[0-9]{1,4})'), str(name))
        if match is None:
            continue
        numbers = [int(number) for number in match.groups()]
        if all(number <= MAX_RESPONSES for number in numbers):
            return label_type(*numbers)
    choices = ', '.join(_usage(pattern) for pattern in TYPES)
    raise UserError(f'--labels.type {name!r:.80} is none of {choices}')


def _usage(pattern: str) -> str:
    if 'N' not in pattern:
        return pattern
    return f'{pattern} (as in {pattern.replace("N", "4")}, up to {MAX_RESPONSES})'


def schemas_of(hparams: HParams) -> dict[str, Schema]:
    """{field: Schema} of all fields of a label, the question's first; hparams: train_reward's."""
    label_type = get(hparams.labels.type)
    if not label_type.samples:
        raise UserError(
            f'--labels.type {hparams.labels.type} shows no response: its number of responses must'
            ' be at least 1'
        )
    questions = label_type.question_schemas(
        query_length=hparams.task.query_length, response_length=hparams.task.response_length
    )
    return {**questions, **label_type.label_schemas()}
