"""Base class of label types: a question about responses, its answers, and the loss."""

from __future__ import annotations

import dataclasses
import heapq
import math
import random
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Self

from lm_human_preferences.errors import UserError

if TYPE_CHECKING:
    import torch

    from lm_human_preferences.utils.core import Schema

Value = Any  # an answer: a JSON value, whose form depends on the label type
TIE = 'tie'  # the answer of somebody who prefers none of the samples
TIED = -1  # number that stands for TIE in tensors of sample indices
TIE_KEY = 0  # number to press for the answer TIE
BAD_KEY = 9  # number to press for the answer TIE if all samples are bad
LARGEST = (2 - 2**-23) * 2.0**127  # largest float32, so that tensors can hold every answer


@dataclasses.dataclass(frozen=True)
class Control:
    """Control by which a labeller answers, in a terminal and on the page."""

    template: str  # 'choose' shows a button for each sample, 'scale' a row of numbers
    choices: int  # how many numbers a labeller can choose from
    meaning: str  # text for the labeller's help: what the numbers mean
    keys: int = 1  # how many different numbers a labeller presses for one answer
    first: int = 1  # lowest number that a labeller can choose
    title: str = ''  # heading above a scale of numbers
    ends: tuple[str, str, str] = ('', '', '')  # text at a scale's lowest, middle and highest number
    tie: str = ''  # text for the labeller's help on TIE_KEY; '' if this key is not offered
    bad: str = ''  # text for the labeller's help on BAD_KEY; '' if this key is not offered

    @property
    def last(self) -> int:
        """Return the highest number that a labeller can choose."""
        return self.first + self.choices - 1

    def is_tie(self, numbers: Sequence[int]) -> bool:
        """Return whether the pressed `numbers` mean that no sample is preferred."""
        return (list(numbers) == [TIE_KEY] and self.tie != '') or self.is_bad(numbers)

    def is_bad(self, numbers: Sequence[int]) -> bool:
        """Return whether the pressed `numbers` mean that all samples are bad."""
        return list(numbers) == [BAD_KEY] and self.bad != ''

    def accepts(self, numbers: Sequence[int]) -> bool:
        """Return whether `numbers`, in this order, are an answer or the beginning of one."""
        if self.is_tie(numbers):
            return True
        are_choices = all(self.first <= number <= self.last for number in numbers)
        are_distinct = len(set(numbers)) == len(numbers)
        return are_choices and are_distinct and len(numbers) <= self.keys


class LabelType:
    """A question about responses to a query, its possible answers, and the loss to learn from them.

    A class with only a name and the four methods of the original (`label_schemas`,
    `question_schemas`, `loss`, `target_scales`) can learn from labels in files: see `complete`.
    """

    name: str  # value of --labels.type; best_of_N for the class of best_of_2, best_of_3, ...
    samples: tuple[str, ...]  # names of the fields that hold the responses
    field: str  # name of the field that holds the answer
    shape: tuple[int, ...] = ()  # shape of an answer: () is one number, (4,) a list of four
    is_numeric: bool = False  # whether answers agree if they are close, not only if they are equal
    expected: str  # description of a valid answer, for error messages
    instructions: str = ''  # default instructions for labellers
    control: Control = Control('choose', 2, '')
    scale: tuple[int, int] | None = None  # lowest and highest number that people can answer, if any
    chance: float | None = None  # fraction of answers that guessing gets right; None for ratings
    can_tie: bool = False  # whether the type can offer the answer "no preference"
    ties: bool = False  # whether "no preference" is allowed, see `allow_ties`
    tied: float | None = None  # number that means "no preference", if there is one

    def complete(self) -> None:
        """Derive attributes such as `samples` from the schema methods that the class defines."""
        if type(self).question_schemas is not LabelType.question_schemas:
            questions = self.question_schemas(query_length=1, response_length=1)
            self.samples = tuple(field for field in questions if field != 'query')
        if type(self).label_schemas is not LabelType.label_schemas:
            ((self.field, schema),) = self.label_schemas().items()
            self.is_numeric = schema.dtype.is_floating_point
            self.expected = 'a number' if self.is_numeric else 'a whole number'

    def lacks(self, method: str) -> NoReturn:
        """Raise UserError, which says that the label type's class lacks the needed `method`."""
        raise UserError(
            f'--labels.type {self.name} can only learn from labels in files: its class has no'
            f' method {method}, see CONTRIBUTING.md'
        )

    def allow_ties(self) -> Self:
        """Accept TIE as an answer from now on if the type can have ties; return the label type."""
        if self.can_tie and not self.ties:
            self.ties = True
            has_key = self.control.last < BAD_KEY
            bad = 'no preference, as all are bad, and go on' if has_key else ''
            tie = 'no preference, and go on'
            self.control = dataclasses.replace(self.control, tie=tie, bad=bad)
        return self

    def set_scale(self, low: int, high: int) -> None:
        """Let people answer with whole numbers from `low` to `high`."""
        self.lacks('set_scale')

    def scale_of(self, values: Sequence[Value]) -> tuple[int, int]:
        """Return the (lowest, highest) number of a scale that includes all `values`."""
        self.lacks('scale_of')

    # ------------------------------------------------------------ answers of people

    def is_valid(self, value: Any) -> bool:
        """Return whether a JSON value is a valid answer; by default, answers are numbers."""
        return is_number(value) and (self.is_numeric or type(value) is int)

    def read(self, value: Any) -> Value | None:
        """Return the answer that a JSON value holds; None if it is not valid."""
        if type(value) is float and value.is_integer():
            value = int(value)  # a table with empty cells may hold 0.0 in place of 0
        if not self.is_valid(value) or (self.is_numeric and abs(value) > LARGEST):
            return None
        return value

    def answer_of(self, numbers: Sequence[int], order: Sequence[int]) -> Value:
        """Return the answer for the pressed `numbers`. order: indices of the samples as shown."""
        self.lacks('answer_of')

    def preferred(self, value: Value) -> int | None:
        """Return the index of the sample that an answer prefers to all others, or None."""
        return None

    def pairs(self, value: Value) -> list[tuple[int, int]]:
        """Return [(index of the better, index of the worse sample)] that an answer implies."""
        best = self.preferred(value)
        if best is None:
            return []
        return [(best, other) for other in range(len(self.samples)) if other != best]

    def moved(self, value: Value, places: Sequence[int]) -> Value:
        """Return an answer renumbered for samples that have moved: sample i to places[i]."""
        if isinstance(value, list):
            return [places[sample] for sample in value]
        return places[value] if isinstance(value, int) else value

    def matches(self, value: Value, right: Value) -> bool:
        """Return whether an answer agrees with another, such as a gold question's known answer."""
        return value == right

    # ------------------------------------------------------------ answers of simulated labellers

    def by_rewards(self, rewards: Sequence[float]) -> Value:
        """Return the answer of a labeller who judges by the samples' rewards.

        If rewards are equal, it may favour the first sample; `judged` does not.
        """
        self.lacks('by_rewards')

    def judged(self, rewards: Sequence[float], rng: random.Random) -> Value:
        """Return the answer that rewards imply; with equal best rewards, TIE or a random choice."""
        check_finite(rewards)
        if self.ties and len(set(heapq.nlargest(2, rewards))) == 1:
            return TIE
        if len(set(rewards)) == len(rewards):
            return self.by_rewards(rewards)
        order = rng.sample(range(len(rewards)), len(rewards))
        return self.moved(self.by_rewards([rewards[sample] for sample in order]), order)

    def by_chance(self, rewards: Sequence[float], rng: random.Random) -> Value:
        """Return a random answer; numbers are about as large as those that `by_rewards` returns."""
        self.lacks('by_chance')

    def simulate(
        self, scores: torch.Tensor, rng: random.Random | None = None
    ) -> dict[str, torch.Tensor]:
        """Return {field: answers (batch, *shape)} that `scores` (batch, n samples) imply.

        rng: see `judged`; None: the first of equal samples is better, as in the original.
        """
        import torch

        (schema,) = self.label_schemas().values()
        answers = []
        for row in scores.tolist():
            answers.append(self.judged(row, rng) if rng else self.by_rewards(row))
        values = torch.tensor(answers, dtype=schema.dtype)
        return {self.field: values.reshape(len(answers), *self.shape)}

    # ------------------------------------------------------------ tensors and losses for training

    def question_schemas(self, *, query_length: int, response_length: int) -> dict[str, Schema]:
        """Return {field: schema} of query and responses, all as token ids."""
        import torch

        from lm_human_preferences.utils.core import Schema

        schemas = {'query': Schema(torch.int64, (query_length,))}
        for sample in self.samples:
            schemas[sample] = Schema(torch.int64, (response_length,))
        return schemas

    def label_schemas(self) -> dict[str, Schema]:
        """Return {field: schema} of the answer."""
        import torch

        from lm_human_preferences.utils.core import Schema

        dtype = torch.float32 if self.is_numeric else torch.int64
        return {self.field: Schema(dtype, self.shape)}

    def schemas(self, *, query_length: int, response_length: int) -> dict[str, Schema]:
        """Return {field: schema} of a label: first its question's fields, then its answer's."""
        questions = self.question_schemas(
            query_length=query_length, response_length=response_length
        )
        return {**questions, **self.label_schemas()}

    def loss_of(
        self, rewards: torch.Tensor, labels: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return statistics {name: scalar} of a batch, among them the mean 'loss' to minimise.

        rewards: (batch, n samples). The default calls `loss` with a model that returns them.
        """

        def reward_model(queries: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
            of_sample = [labels[sample] is responses for sample in self.samples]
            return rewards[:, of_sample.index(True)]

        return self.loss(reward_model, labels | {self.field: labels[self.field].to(rewards.device)})

    def loss(
        self,
        reward_model: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        labels: dict[str, torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """Return `loss_of` for the rewards (batch,) of `reward_model(queries, responses)`."""
        import torch

        rewards = [reward_model(labels['query'], labels[sample]) for sample in self.samples]
        return self.loss_of(torch.stack(rewards, dim=1), labels)

    def without_ties(self, labels: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the labels that are not ties, as tensors {field: (labels, ...)}."""
        if self.tied is None:
            return labels
        is_choice = labels[self.field] != self.tied
        if is_choice.all():
            return labels
        return {field: values[is_choice] for field, values in labels.items()}

    def is_right(
        self, rewards: torch.Tensor, labels: dict[str, torch.Tensor]
    ) -> torch.Tensor | None:
        """Return (batch,): 1.0 where rewards imply the label's answer, else 0.0; None for ratings.

        labels: without ties. Among k equal best rewards: 1/k, or 1.0 for one drawn at random.
        """
        if self.chance is None:
            return None
        import torch

        rng = random.Random(0)
        given = labels[self.field].tolist()
        answers = [self.judged(row, rng) for row in rewards.tolist()]
        right = [self.matches(value, answer) for value, answer in zip(given, answers, strict=True)]
        return torch.tensor(right, dtype=torch.float64)

    def target_scales(self, labels: dict[str, torch.Tensor]) -> torch.Tensor | None:
        """Return numbers (batch,) whose mean and deviation the rewards should have, or None."""
        return None


def check_finite(rewards: Iterable[float]) -> None:
    """Raise UserError if one of the rewards is NaN or infinite."""
    for reward in rewards:
        if not math.isfinite(reward):
            raise UserError(
                f'a response has the reward {reward}, which cannot be compared: check the reward'
                ' function, or the training of the reward model'
            )


def is_number(value: Any) -> bool:
    """Return whether a JSON value is a finite number within the range of float."""
    if type(value) not in (int, float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
