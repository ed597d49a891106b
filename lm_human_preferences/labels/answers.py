"""What a labeller has answered: one answer, its file as it grows, and every check of both."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from lm_human_preferences.errors import UserError
from lm_human_preferences.labels import json_lines

# What labellers are told where nobody says otherwise, by the field of the answer.
INSTRUCTIONS = {
    'best': 'Read the text, then the responses to it. Choose the one that you like best.',
    'score': 'Read the text, then the response to it. Say how much you like the response.',
    'difference': 'Read the text, then both responses to it. Say which of them you like better.',
}
SCALE = 9  # of a rating or a comparison: 1 to 9
REASONS = (  # for skipping a question
    'cannot tell which is better',
    'not understandable',
    'offensive',
    'other',
)


def sample_names(label_type: str) -> list[str]:
    """The fields that hold the responses of a question, as label_types has them."""
    if label_type == 'scalar_rating':
        return ['sample']
    count = 2 if label_type == 'scalar_compare' else int(label_type.removeprefix('best_of_'))
    return [f'sample{i}' for i in range(count)]


def answer_field(label_type: str) -> str:
    """The field that holds the answer, as label_types has it."""
    return {'scalar_rating': 'score', 'scalar_compare': 'difference'}.get(label_type, 'best')


def question_id(tokens: Mapping[str, Sequence[int]]) -> str:
    """SHA-256 of the query and the samples, in hexadecimal.

    tokens: {field: token ids}, in the order of the fields of a label.
    """
    text = json.dumps(list(tokens.values()), separators=(',', ':'))
    return hashlib.sha256(text.encode()).hexdigest()


def shown_order(labeller: str, question: str, count: int) -> tuple[int, ...]:
    """The samples in the order in which a labeller sees them, always the same one."""

    def key(index: int) -> str:
        return hashlib.sha256(f'{labeller}/{question}/{index}'.encode()).hexdigest()

    return tuple(sorted(range(count), key=key))


def asking_rank(labeller: str, question: str) -> bytes:
    """What questions are sorted by for a labeller.

    Each goes through them in an order of their own, so that two who work at the same time seldom
    meet.
    """
    return hashlib.sha256(f'{labeller}/{question}'.encode()).digest()


def choices(label_type: str) -> int:
    """How many different answers a labeller can give, which are numbered from 1."""
    if answer_field(label_type) == 'best':
        return len(sample_names(label_type))
    return SCALE


def chosen_value(label_type: str, order: Sequence[int], number: int) -> float:
    """The value of an answer, by the number of the choice.

    The number is the place of the best sample, a rating up to SCALE, or from 1 (what is shown first
    is far better) to SCALE (the second is). order: the samples as they were shown.
    """
    if answer_field(label_type) == 'best':
        return order[number - 1]
    if label_type == 'scalar_rating':
        return number
    towards_second_shown = number - (SCALE + 1) // 2
    return towards_second_shown if order[0] == 0 else -towards_second_shown


@dataclasses.dataclass(frozen=True)
class Answer:
    """A labeller's answer to a question, or a skip.

    value: the index of the best sample, a score or a difference; None where the question was
    skipped, for `reason`. order: the samples as they were shown. seconds: how long it took. time:
    of the answer, in seconds since 1970.
    """

    uuid: str
    labeller: str
    question: str
    value: float | None
    reason: str | None
    order: tuple[int, ...]
    seconds: float
    time: float

    def shown_position(self) -> int:
        """The position, from 0, at which the chosen sample was shown."""
        assert self.value is not None
        return self.order.index(int(self.value))


class AnswerLog:
    """What a labeller has answered, as far as the file has been read.

    most_lines: how much of the file counts; None: all. by_question: {question: answers that were
    not taken back, the last one last}. uuids: of all answers ever given. line_of: {uuid: number of
    its line, from 1}. undone: number of answers that were taken back.
    """

    def __init__(self, path: str, label_type: str, most_lines: int | None = None) -> None:
        self.label_type = label_type
        self.labeller = os.path.basename(path).removesuffix('.jsonl')
        self.reader = json_lines.Reader(path, most_lines)
        self._forget()

    def _forget(self) -> None:
        self.reader = json_lines.Reader(self.reader.path, self.reader.most_lines)
        self.uuids: dict[str, Answer] = {}
        self.line_of: dict[str, int] = {}
        self.by_question: dict[str, list[Answer]] = {}
        self._taken_back: set[str] = set()

    @property
    def undone(self) -> int:
        return len(self._taken_back)

    def refresh(self) -> set[str]:
        """Read what was added; UserError, naming file and line, for what is no answer.

        Returns the questions whose answers have changed.
        """
        changed: set[str] = set()
        if self.reader.was_cut():
            changed |= self.by_question.keys()
            self._forget()
        for _, line in self.reader.new_lines():
            where = self.reader.where()
            record = json_lines.parse(line, where)
            if 'undo' in record:
                answer = self._take_back(record['undo'], where)
            else:
                answer = self._parsed(record, where)
                self._add(answer, where)
            changed.add(answer.question)
        return changed

    def _add(self, answer: Answer, where: str) -> None:
        if answer.uuid in self.uuids:
            raise UserError(f'{where} repeats the answer {answer.uuid}')
        self.uuids[answer.uuid] = answer
        self.line_of[answer.uuid] = self.reader.lines
        self.by_question.setdefault(answer.question, []).append(answer)

    def _take_back(self, uuid: Any, where: str) -> Answer:
        if not isinstance(uuid, str) or uuid not in self.uuids:
            raise UserError(f'{where} takes back the answer {uuid!s:.80}, which is not there')
        answer = self.uuids[uuid]
        if uuid in self._taken_back:
            return answer
        self._taken_back.add(uuid)
        remaining = self.by_question[answer.question]
        remaining.remove(answer)
        if not remaining:
            del self.by_question[answer.question]
        return answer

    def is_taken_back(self, answer: Answer) -> bool:
        """Whether the labeller has taken an answer back."""
        return answer.uuid in self._taken_back

    def _parsed(self, record: dict[str, Any], where: str) -> Answer:
        try:
            answer = Answer(
                uuid=record['answer'],
                labeller=self.labeller,
                question=record['question'],
                value=record.get(answer_field(self.label_type)),
                reason=record.get('skip'),
                order=tuple(record['order']),
                seconds=record['seconds'],
                time=record['time'],
            )
            check_answer(answer, self.label_type)
        except (KeyError, OverflowError, TypeError, ValueError) as e:
            raise UserError(f'{where} is no answer of the type {self.label_type}: {e}') from e
        return answer

    def last(self) -> Answer | None:
        """The last answer that has not been taken back."""
        for uuid in reversed(self.uuids):
            if uuid not in self._taken_back:
                return self.uuids[uuid]
        return None

    def answer_to(self, question: str) -> Answer | None:
        """The answer to a question that counts, or the skip; None where there is neither."""
        answers = self.by_question.get(question)
        return answers[-1] if answers else None


def is_number(value: Any) -> bool:
    """Whether a value of JSON is a finite number, and no larger than a float can be."""
    if type(value) not in (int, float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def check_answer(answer: Answer, label_type: str) -> None:
    """Raise TypeError or ValueError, which says what is wrong, for an impossible answer."""
    count = len(sample_names(label_type))
    if not isinstance(answer.uuid, str) or not isinstance(answer.question, str):
        raise TypeError('answer and question must be texts')
    if sorted(answer.order) != list(range(count)):
        raise ValueError(f'order must hold 0 to {count - 1}, not {list(answer.order)}')
    for name in ('seconds', 'time'):
        if not is_number(getattr(answer, name)):
            raise TypeError(f'{name} must be a number')
    if answer.value is None:
        if not isinstance(answer.reason, str):
            raise TypeError(f'it has neither {answer_field(label_type)} nor skip')
    elif answer_field(label_type) == 'best':
        if type(answer.value) is not int or not 0 <= answer.value < count:
            raise ValueError(f'best must be 0 to {count - 1}, not {answer.value!r:.80}')
    elif not is_number(answer.value):
        raise TypeError(f'{answer_field(label_type)} must be a number')
