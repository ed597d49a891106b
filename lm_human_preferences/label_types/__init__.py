"""Label types (in the original: label_types.py): the samples shown, the answers, and the loss.

To add one, derive a class from LabelType and decorate it with `register`; see the example in
CONTRIBUTING.md. Only methods about tensors import torch, so that asking people starts fast.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lm_human_preferences.errors import OptionError
from lm_human_preferences.label_types.base import TIE, TIED, Control, LabelType, is_number
from lm_human_preferences.label_types.base import Value as Value

if TYPE_CHECKING:
    import torch

MAX_RESPONSES = 1000  # largest number of responses in a label

TYPES: dict[str, type[LabelType]] = {}


def register(label_type: type[LabelType]) -> type[LabelType]:
    """Register a class of label types, so that `get` finds it by its `name` (class decorator)."""
    TYPES[label_type.name] = label_type
    return label_type


@register
class PickBest(LabelType):
    """Best of N responses. Loss: cross entropy of softmax(rewards), equation 1 of the paper."""

    name = 'best_of_N'
    field = 'best'
    instructions = 'Read the text, then the responses to it. Choose the one that you like best.'
    tied = TIED

    def __init__(self, num_responses: int) -> None:
        self.samples = tuple(f'sample{i}' for i in range(num_responses))
        self.expected = f'a whole number from 0 to {num_responses - 1}'
        self.control = Control('choose', num_responses, 'choose the best, and go on')
        self.chance = 1 / num_responses if num_responses > 0 else None
        self.can_tie = num_responses > 1

    def is_valid(self, value: Any) -> bool:
        if value == TIE:
            return self.ties
        return type(value) is int and 0 <= value < len(self.samples)

    def answer_of(self, numbers: Sequence[int], order: Sequence[int]) -> int | str:
        (number,) = numbers
        return TIE if self.control.is_tie(numbers) else order[number - 1]

    def preferred(self, value: int | str) -> int | None:
        return None if isinstance(value, str) else value

    def by_rewards(self, rewards: Sequence[float]) -> int:
        return max(range(len(rewards)), key=lambda index: rewards[index])

    def by_chance(self, rewards: Sequence[float], rng: random.Random) -> int:
        return rng.randrange(len(rewards))

    def loss_of(
        self, rewards: torch.Tensor, labels: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the mean cross entropy in nats; a tie counts as the mean over all choices."""
        import torch

        best = labels['best'].to(rewards.device)
        surprises = -rewards.log_softmax(dim=1)
        of_best = surprises.gather(1, best.clamp(min=0)[:, None])[:, 0]
        error = torch.where(best == TIED, surprises.mean(dim=1), of_best).mean()
        return {'loss': error, 'error': error}

    def is_right(self, rewards: torch.Tensor, labels: dict[str, torch.Tensor]) -> torch.Tensor:
        is_best = (rewards == rewards.max(dim=1, keepdim=True).values).double()
        return is_best.gather(1, labels['best'][:, None])[:, 0] / is_best.sum(1)


class _Number(LabelType):
    """Base class of label types whose answer is a number: ratings and comparisons."""

    is_numeric = True
    expected = 'a number'
    scale: tuple[int, int]

    def __init__(self) -> None:
        self.set_scale(*self.scale)

    def is_valid(self, value: Any) -> bool:
        return is_number(value)

    def moved(self, value: float, places: Sequence[int]) -> float:
        """Return the answer unchanged, since a number does not depend on the order of samples."""
        return value

    def by_chance(self, rewards: Sequence[float], rng: random.Random) -> float:
        return rng.gauss(0, 1) * max(1.0, abs(self.by_rewards(rewards)))


@register
class ScalarRating(_Number):
    """A score for one response. Loss: squared error of the reward."""

    name = 'scalar_rating'
    samples = ('sample',)
    field = 'score'
    instructions = 'Read the text, then the response to it. Say how much you like the response.'
    scale = (1, 9)

    def set_scale(self, low: int, high: int) -> None:
        """Let answers be numbers from `low` to `high`."""
        self.scale = low, high
        self.control = Control(
            'scale',
            high - low + 1,
            f'rate it, {high} is best, and go on',
            first=low,
            title='Rating',
            ends=('worst', '', 'best'),
        )

    def scale_of(self, values: Sequence[float]) -> tuple[int, int]:
        low = math.floor(min(values))
        return low, max(math.ceil(max(values)), low + 1)

    def answer_of(self, numbers: Sequence[int], order: Sequence[int]) -> int:
        (number,) = numbers
        return number

    def by_rewards(self, rewards: Sequence[float]) -> float:
        return rewards[0]

    def loss_of(
        self, rewards: torch.Tensor, labels: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the loss, the labels' mean and variance, and the correlation with the rewards."""
        import torch
        from torch.nn import functional as F

        from lm_human_preferences.utils.core import pearson_r

        predicted = rewards[:, 0]
        score = labels['score'].to(predicted.device)
        error = F.mse_loss(predicted, score)
        var, mean = torch.var_mean(score, correction=0)
        # The correlation is NaN if all labels, or all rewards, are equal.
        corr = pearson_r(score, predicted.detach()).nan_to_num(0.0)
        return {'loss': error, 'error': error, 'label_mean': mean, 'label_var': var, 'corr': corr}

    def target_scales(self, labels: dict[str, torch.Tensor]) -> torch.Tensor | None:
        return labels['score']


@register
class ScalarComparison(_Number):
    """How much better the second response is. Loss: squared error of the difference in reward."""

    name = 'scalar_compare'
    samples = ('sample0', 'sample1')
    field = 'difference'
    instructions = 'Read the text, then both responses to it. Say which of them you like better.'
    scale = (-4, 4)
    chance = 1 / 2
    tied = 0

    def set_scale(self, low: int, high: int) -> None:
        """Let answers be numbers from `low` to `high`."""
        self.scale = low, high
        last = high - low + 1
        self.control = Control(
            'scale',
            last,
            f'1: the first is far better, {1 - low}: equal, {last}: the second; and go on',
            title='Which is better',
            ends=('response 1 is far better', 'equal', 'response 2 is far better'),
        )

    def scale_of(self, values: Sequence[float]) -> tuple[int, int]:
        high = max(1, *(math.ceil(abs(value)) for value in values))
        return -high, high

    def answer_of(self, numbers: Sequence[int], order: Sequence[int]) -> int:
        """Return an answer's offset from the scale's middle, positive if the second sample wins."""
        (number,) = numbers
        low, _ = self.scale
        towards_second_shown = number - 1 + low
        return towards_second_shown if order[0] == 0 else -towards_second_shown

    def preferred(self, value: float) -> int | None:
        if value == 0:
            return None
        return 1 if value > 0 else 0

    def moved(self, value: float, places: Sequence[int]) -> float:
        """Return the answer, a difference, negated if the two samples have swapped places."""
        return value if places[0] == 0 else -value

    def matches(self, value: float, right: float) -> bool:
        """Return whether two differences have the same sign."""
        return self.preferred(value) == self.preferred(right)

    def by_rewards(self, rewards: Sequence[float]) -> float:
        return rewards[1] - rewards[0]

    def loss_of(
        self, rewards: torch.Tensor, labels: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the mean squared error of predicted reward differences against the labels."""
        from torch.nn import functional as F

        predicted = rewards[:, 1] - rewards[:, 0]
        error = F.mse_loss(predicted, labels['difference'].to(predicted.device))
        return {'loss': error, 'error': error}

    def is_right(self, rewards: torch.Tensor, labels: dict[str, torch.Tensor]) -> torch.Tensor:
        difference = rewards[:, 1] - rewards[:, 0]
        return (1 + difference.sign() * labels['difference'].sign()).double() / 2

    def target_scales(self, labels: dict[str, torch.Tensor]) -> torch.Tensor | None:
        return labels['difference'] / 2  # half of the labelled difference, as in OpenAI's program


def get(name: str) -> LabelType:
    """Return the label type called `name`, such as best_of_4; OptionError if there is none."""
    for pattern, label_type in TYPES.items():
        # A minus sign is allowed, as the original accepts best_of_-1, a type without samples.
        match = re.fullmatch(re.escape(pattern).replace('N', '(-?[0-9]{1,4})'), str(name))
        if match is None:
            continue
        numbers = [int(number) for number in match.groups()]
        if all(number <= MAX_RESPONSES for number in numbers):
            found = label_type(*numbers)
            found.name = str(name)
            found.complete()
            return found
    choices = []
    for pattern in TYPES:
        example = f' (as in {pattern.replace("N", "4")}, up to {MAX_RESPONSES})'
        choices.append(pattern + example if 'N' in pattern else pattern)
    raise OptionError(f'--labels.type {name!r:.80} is none of {", ".join(choices)}')
