"""Answers of labellers: an answer, the growing file of answers, and their checks."""

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

REASONS = (  # for skipping a question
    'cannot tell which is better',
    'not understandable',
    'offensive',
    'other',
)
BAD = 'bad'  # the field that says whether a tie means that all samples are bad
IMPORTED = 'imported'  # the field that says whether an answer was given elsewhere
SIMULATED = 'simulated'  # the field that says whether a simulated labeller gave an answer
UNNAMED = 'imported'  # labeller of imported answers without a name
GIVEN_BY = 'labeller'  # field of a label with the name of its labeller
ID = 'id'  # field of a label with its id elsewhere
GIVEN_ID = 'given_id'  # field of a question or an answer with this id


def is_unnamed(labeller: str) -> bool:
    """Return whether a labeller stands for unknown people, whose answers were imported."""
    return re.fullmatch(rf'{UNNAMED}(-\d+)?', labeller) is not None


def files_of(folder: str) -> list[Path]:
    """Return the files of answers, NAME before copies of it; UserError for a link elsewhere."""
    if os.path.islink(folder) and not storage.is_within(folder, os.path.dirname(folder)):
        raise UserError(
            f'{folder} is a link to a folder elsewhere, in which answers would be written: put the'
            ' folder itself in its place'
        )
    # Copies have longer names
    return sorted(Path(folder).glob('*.jsonl'), key=lambda file: (len(file.stem), file.stem))


def question_id(tokens: Mapping[str, Sequence[int]]) -> str:
    """Return the SHA-256, in hexadecimal, of a label's {field: token ids} in their order."""
    text = json.dumps(list(tokens.values()), separators=(',', ':'))
    return hashlib.sha256(text.encode()).hexdigest()


# Attributes of Answer, and their fields in a file
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
    """A labeller's answer to a question, or a skip."""

    uuid: str
    labeller: str
    question: str
    order: tuple[int, ...]  # order in which the samples were shown
    seconds: float  # that it took; 0 if it was imported
    time: float  # since 1970, see LabelFolder.time_of_next_answer
    value: Value | None  # in the form of the label type; None for a skip
    reason: str | None = None  # reason for a skip
    is_bad: bool = False  # whether a tie means that all samples are bad
    is_imported: bool = False  # whether it was given elsewhere
    is_simulated: bool = False  # whether a simulated labeller gave it
    given_id: int | str | None = None  # id of the imported label

    @classmethod
    def of_record(cls, record: dict[str, Any], labeller: str, label_type: LabelType) -> Answer:
        """Return the answer in a line of a file; TypeError or ValueError if it is none."""
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
        """Return the line of a file of answers, which `of_record` reads."""
        record = {} if self.value is None else {label_type.field: self.value}
        for name, field in _FIELDS.items():
            value = getattr(self, name)
            if value is not None and value is not False:
                record[field] = value
        return record

    @property
    def age(self) -> tuple[float, str, str]:
        """Return the sort key by which older answers come first."""
        return self.time, self.labeller, self.question


class AnswerLog:
    """Answers of a labeller, as far as the file has been read.

    givers: {uuid: labeller} of the answers in all files; an answer may be in one file only.
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
        self.uuids: dict[str, Answer] = {}  # all answers, also those taken back
        self.line_of: dict[str, int] = {}  # {uuid: number of its line, from 1}
        # {question: its answers in order, without those taken back}
        self.by_question: dict[str, list[Answer]] = {}
        self.taken_back: set[str] = set()
        self.last_time = 0.0  # time of the last answer

    def refresh(self) -> None:
        """Read what was added."""
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
    """Raise TypeError unless a value is an id of a label, or None for no id."""
    is_line = isinstance(value, str) and value.isprintable()
    if value is not None and type(value) is not int and not is_line:
        raise TypeError(f'id must be a whole number or a line of text, not {value!r:.80}')
