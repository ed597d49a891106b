"""Answers of labellers: a single answer, and the log of all answers of a labeller."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError
from lm_human_preferences.label_types import TIE, LabelType, Value, is_number
from lm_human_preferences.labels import json_lines
from lm_human_preferences.storage.schema import COUNT, matches_schema
from lm_human_preferences.utils.terminal import printable

REASONS = (  # reasons for skipping a question, from which labellers choose
    'cannot tell which is better',
    'not understandable',
    'offensive',
    'other',
)
BAD = 'bad'  # field of an answer: true for a tie because all samples are bad
IMPORTED = 'imported'  # field of an answer: true if it was imported from another tool
SIMULATED = 'simulated'  # field of an answer: true if a simulated labeller gave it
UNNAMED = 'imported'  # name of the labeller if imported answers name nobody
GIVEN_BY = 'labeller'  # field of a label in a file of texts: name of its labeller
ID = 'id'  # field of a label in a file: its id in another tool
GIVEN_ID = 'given_id'  # field of a question or an answer: ID of the imported label


def is_unnamed(labeller: str) -> bool:
    """Return whether `labeller` stands for people whose imported answers had no names."""
    return re.fullmatch(rf'{UNNAMED}(-\d+)?', labeller) is not None


def files_of(folder: str) -> list[Path]:
    """Return the .jsonl files of `folder`, copies last; UserError if it links elsewhere."""
    if os.path.islink(folder) and not storage.is_within(folder, os.path.dirname(folder)):
        raise UserError(
            f'{folder} is a link to a folder elsewhere, in which answers would be written: put the'
            ' folder itself in its place'
        )
    # Short names first: people's copies of a file have longer names.
    return sorted(Path(folder).glob('*.jsonl'), key=lambda file: (len(file.stem), file.stem))


def question_id(tokens: Mapping[str, Sequence[int]]) -> str:
    """Return the id of a question {field: token ids}: the SHA-256, in hexadecimal, of all ids."""
    text = json.dumps(list(tokens.values()), separators=(',', ':'))
    return hashlib.sha256(text.encode()).hexdigest()


# {attribute of Answer: its field in a line of the file}
_FIELDS = {
    'uuid': 'answer',
    'question': 'question',
    'reason': 'skip',
    'order': 'order',
    'seconds': 'seconds',
    'time': 'time',
    'is_bad': BAD,
    'is_imported': IMPORTED,
    'is_simulated': SIMULATED,
    'given_id': GIVEN_ID,
}


@dataclasses.dataclass(frozen=True)
class Answer:
    """A labeller's answer to a question, or their decision to skip it."""

    uuid: str
    labeller: str
    question: str
    order: tuple[int, ...]  # order in which the samples were shown
    seconds: float  # time that the labeller took; 0 if imported
    time: float  # seconds since 1970, see LabelFolder.time_of_next_answer
    value: Value | None  # the answer itself, in the form of the label type; None for a skip
    reason: str | None = None  # reason for a skip
    is_bad: bool = False  # whether a tie means that all samples are bad
    is_imported: bool = False  # whether the answer was given in another tool
    is_simulated: bool = False  # whether a simulated labeller gave the answer
    given_id: int | str | None = None  # id that the imported label had in its file

    @classmethod
    def of_record(cls, record: dict[str, Any], labeller: str, label_type: LabelType) -> Answer:
        """Parse a line of a file of answers; TypeError or ValueError if it is no valid answer."""
        field, value = label_type.field, record.get(label_type.field)
        is_whole = (
            matches_schema(record, {'answer': str, 'question': str, 'order': [COUNT]})
            and sorted(record['order']) == list(range(len(label_type.samples)))
            and all(is_number(record.get(name)) for name in ('seconds', 'time'))
            and all(type(record.get(name, False)) is bool for name in (BAD, IMPORTED, SIMULATED))
            and (value is not None or isinstance(record.get('skip'), str))
        )
        if not is_whole:
            raise ValueError(f'{field} or skip is missing, or another field is not of its kind')
        if value is not None and not label_type.is_valid(value):
            raise ValueError(f'{field} must be {label_type.expected}, not {value!r:.80}')
        if record.get(BAD) and value != TIE:
            raise ValueError(f'{BAD} must be beside {field} {TIE!r}')
        check_given_id(record.get(GIVEN_ID))
        given = {name: record[field] for name, field in _FIELDS.items() if field in record}
        given['order'] = tuple(record['order'])
        return cls(labeller=labeller, value=value, **given)

    def record(self, label_type: LabelType) -> dict[str, Any]:
        """Return {field: value} for a line of the file of answers, which `of_record` parses."""
        record = {} if self.value is None else {label_type.field: self.value}
        for name, field in _FIELDS.items():
            value = getattr(self, name)
            if value is not None and value is not False:
                record[field] = value
        return record

    @property
    def age(self) -> tuple[float, str, str]:
        """Return a sort key that puts older answers first."""
        return self.time, self.labeller, self.question


class AnswerLog:
    """Answers in the file of one labeller, up to the last line that `refresh` has read.

    givers: {uuid of an answer: labeller}, shared by all files: no answer may be in two of them.
    """

    def __init__(
        self,
        path: str,
        label_type: LabelType,
        givers: dict[str, str],
        most_lines: int | None = None,
    ) -> None:
        self.label_type, self.givers = label_type, givers
        self.labeller = os.path.basename(path).removesuffix('.jsonl')
        self.reader = json_lines.Reader(path, most_lines)
        self.uuids: dict[str, Answer] = {}  # {uuid: answer}, including answers that were taken back
        self.line_of: dict[str, int] = {}  # {uuid: number of the answer's line, from 1}
        # {id of a question: answers to it, oldest first, except answers that were taken back}
        self.by_question: dict[str, list[Answer]] = {}
        self.taken_back: set[str] = set()
        self.last_time = 0.0  # time of the latest answer

    def refresh(self) -> None:
        """Read the lines that were added to the file since the last call."""
        for where, record in self.reader.new_records():
            if 'undo' in record:
                self._take_back(record['undo'], where)
            else:
                self._add(record, where)

    def _add(self, record: dict[str, Any], where: str) -> None:
        try:
            answer = Answer.of_record(record, self.labeller, self.label_type)
        except (TypeError, ValueError) as e:
            raise UserError(
                f'{where} is not an answer of the type {self.label_type.name}: {e}'
            ) from e
        if answer.uuid in self.givers:
            raise UserError(
                f'{where} repeats an answer of {self.givers[answer.uuid]}: one of the two is a'
                ' copy; take it out of the folder'
            )
        self.givers[answer.uuid] = self.labeller
        self.uuids[answer.uuid] = answer
        self.line_of[answer.uuid] = self.reader.lines
        self.by_question.setdefault(answer.question, []).append(answer)
        self.last_time = max(self.last_time, answer.time)

    def _take_back(self, uuid: Any, where: str) -> None:
        answer = self.uuids.get(uuid) if isinstance(uuid, str) else None
        if answer is None or uuid in self.taken_back:
            raise UserError(
                f'{where} takes back the answer {printable(str(uuid)):.80}, which is not there'
            )
        self.taken_back.add(answer.uuid)
        self.by_question[answer.question].remove(answer)
        if not self.by_question[answer.question]:
            del self.by_question[answer.question]

    def last(self) -> Answer | None:
        """Return the last answer that has not been taken back."""
        for uuid, answer in reversed(self.uuids.items()):
            if uuid not in self.taken_back:
                return answer
        return None

    def last_answers(self) -> list[Answer]:
        """Return the last answer, or skip, to each question."""
        return [answers[-1] for answers in self.by_question.values()]

    def answer_to(self, question: str) -> Answer | None:
        """Return the last answer, or skip, to a question; None if there is neither."""
        answers = self.by_question.get(question)
        return answers[-1] if answers else None


def check_given_id(value: Any) -> None:
    """Raise TypeError unless `value` is None or can be an id: an integer or a line of text."""
    is_line = isinstance(value, str) and value.isprintable()
    if value is not None and type(value) is not int and not is_line:
        raise TypeError(f'id must be a whole number or a line of text, not {value!r:.80}')
