"""What every label type is: a question about samples, its answers, and the loss that they give."""

from __future__ import annotations

import dataclasses
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import torch

    from lm_human_preferences.utils.core import Schema

Value = Any  # an answer: a JSON value, which is of another form in each label type
TIE = 'tie'  # the answer of somebody who prefers none of the samples
TIED = -1  # the same in a tensor of numbers of samples
TIE_KEY = 0  # the number that is pressed for it


@dataclasses.dataclass(frozen=True)
class Control:
    """What a labeller presses to answer, in a terminal and on the page.

    template: the name in labels/page/page.html of how the page shows it: 'choose' and 'order' make
    the responses buttons, 'scale' has a row of numbers below them. choices: the numbers that can be
    pressed are 1 to this. keys: how many of them make an answer; if several, no number counts
    twice. meaning: of the numbers, for the help. title, ends: of a scale, what it is of, and what
    the lowest, the middle and the highest number stand for. tie: what TIE_KEY means; '' where there
    are no ties.
    """

    template: str
    choices: int
    meaning: str
    keys: int = 1
    title: str = ''
    ends: tuple[str, str, str] = ('', '', '')
    tie: str = ''

    def accepts(self, numbers: Sequence[int]) -> bool:
        """Whether `numbers`, pressed in this order, are an answer or the beginning of one."""
        if list(numbers) == [TIE_KEY]:
            return bool(self.tie)
        are_choices = all(1 <= number <= self.choices for number in numbers)
        are_distinct = len(set(numbers)) == len(numbers)
        return are_choices and are_distinct and len(numbers) <= self.keys


class LabelType(ABC):
    """A question about one or more responses to a query, its answers, and the loss that they give.

    The samples of a question are numbered from 0, in the order of `samples`. People see them in an
    `order` of their own: the numbers of the samples, in the order in which they are shown.

    `labels` is always a dict of batched tensors, {field: (batch, *schema.shape)}, with the fields
    of `question_schemas` and `label_schemas`. `rewards` as a tensor is (batch, n): the rewards of
    the n samples. `loss_of` gets them from a reward model and has to be differentiable.
    """

    name: str  # as --labels.type; in a class, an N in it is a number, which the constructor takes
    samples: tuple[str, ...]  # fields that hold the responses
    field: str  # that holds the answer
    shape: tuple[int, ...] = ()  # of an answer: () is one number, (4,) a list of four
    # Whether an answer is a number, of which two agree as far as they are close. Else it consists
    # of whole numbers, and two answers agree if they are equal.
    is_numeric: bool = False
    expected: str  # what a valid answer is, for errors
    instructions: str  # for labellers, where nobody says otherwise
    control: Control
    chance: float | None = None  # share of answers that guessing gets right; None: see `matches`
    can_tie: bool = False  # whether "no preference" can be an answer
    ties: bool = False  # whether it may be given, see `allow_ties`

    def allow_ties(self) -> Self:
        """Have TIE be an answer too, where it can be one; returns the label type itself."""
        if self.can_tie and not self.ties:
            self.ties = True
            self.control = dataclasses.replace(self.control, tie='no preference, and go on')
        return self

    # ------------------------------------------------------------ what people answer

    @abstractmethod
    def is_valid(self, value: Any) -> bool:
        """Whether a value of JSON is an answer."""

    @abstractmethod
    def answer_of(self, numbers: Sequence[int], order: Sequence[int]) -> Value:
        """The answer of somebody who has pressed `numbers`, as many as `control` wants."""

    def preferred(self, value: Value) -> int | None:
        """The sample that an answer likes best; None where it does not tell."""
        return None

    def pairs(self, value: Value) -> list[tuple[int, int]]:
        """What an answer tells of each two samples, as (the better one, the worse one)."""
        best = self.preferred(value)
        if best is None:
            return []
        return [(best, other) for other in range(len(self.samples)) if other != best]

    def of_preference(self, chosen: int) -> Value | None:
        """The answer that prefers one of two samples; None where an answer has to tell more."""
        return None

    def matches(self, value: Value, right: Value) -> bool:
        """Whether an answer is right. Not asked where `chance` is None: nothing is right there."""
        return value == right

    # ------------------------------------------------------------ what somebody simulated answers

    @abstractmethod
    def by_rewards(self, rewards: Sequence[float]) -> Value:
        """The answer of somebody who judges by these rewards of the samples."""

    @abstractmethod
    def by_chance(self, rewards: Sequence[float], rng: random.Random) -> Value:
        """A random answer; where it is a number, one about as large as by these rewards."""

    def by_position(self, rewards: Sequence[float], order: Sequence[int]) -> Value:
        """The answer of somebody who likes best what is shown first.

        Where that can be no answer, it is the one by the rewards.
        """
        return self.by_rewards(rewards)

    def simulate(self, scores: torch.Tensor) -> dict[str, torch.Tensor]:
        """The answers of somebody who judges by `scores (batch, n)` of the n samples."""
        import torch

        (schema,) = self.label_schemas().values()
        answers = [self.by_rewards(row) for row in scores.tolist()]
        values = torch.tensor(answers, dtype=schema.dtype)
        return {self.field: values.reshape(len(answers), *self.shape)}

    # ------------------------------------------------------------ what a reward model learns

    def question_schemas(self, *, query_length: int, response_length: int) -> dict[str, Schema]:
        """Schemas of what was shown: the query and the responses, all as token ids."""
        import torch

        from lm_human_preferences.utils.core import Schema

        schemas = {'query': Schema(torch.int64, (query_length,))}
        for sample in self.samples:
            schemas[sample] = Schema(torch.int64, (response_length,))
        return schemas

    def label_schemas(self) -> dict[str, Schema]:
        """The schema of the answer."""
        import torch

        from lm_human_preferences.utils.core import Schema

        dtype = torch.float32 if self.is_numeric else torch.int64
        return {self.field: Schema(dtype, self.shape)}

    def schemas(self, *, query_length: int, response_length: int) -> dict[str, Schema]:
        """Schemas of all fields of a label, the question's first."""
        questions = self.question_schemas(
            query_length=query_length, response_length=response_length
        )
        return {**questions, **self.label_schemas()}

    @abstractmethod
    def loss_of(
        self,
        rewards: torch.Tensor,
        labels: dict[str, torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """Statistics of a batch, all scalars; 'loss' is minimised.

        It is a mean over the batch, so that ranks with different numbers of labels can be averaged.
        """

    def loss(
        self,
        reward_model: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        labels: dict[str, torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """`loss_of` with the rewards (batch,) of `reward_model(queries, responses)`."""
        import torch

        rewards = [reward_model(labels['query'], labels[sample]) for sample in self.samples]
        return self.loss_of(torch.stack(rewards, dim=1), labels)

    def without_ties(self, labels: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Those of `labels` {field: (labels, ...)} that are no ties."""
        if not self.can_tie:
            return labels
        is_choice = labels[self.field] != TIED
        if is_choice.all():
            return labels
        return {field: values[is_choice] for field, values in labels.items()}

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

        None where nothing is right. No label is a tie, see `without_ties`.
        """
        if self.chance is None:
            return None
        import torch

        given = labels[self.field].tolist()
        answers = [self.by_rewards(row) for row in rewards.tolist()]
        right = [self.matches(value, answer) for value, answer in zip(given, answers, strict=True)]
        return torch.tensor(right, dtype=torch.bool)

    def target_scales(self, labels: dict[str, torch.Tensor]) -> torch.Tensor | None:
        """Numbers (batch,) whose mean and deviation the rewards should have.

        None where labels do not tell.
        """
        return None


def is_number(value: Any) -> bool:
    """Whether a value of JSON is a finite number, and no larger than a float can be."""
    if type(value) not in (int, float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
