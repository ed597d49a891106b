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
from lm_human_preferences.utils.streams import printable

REASONS = (  # reasons for skipping a question, from which labellers choose
    'cannot tell which is better',
    'not understandable',
    'offensive',
    'other',
)
BAD = 'bad'  # field of an answer: true if the answer is a tie, and the reason is that all are bad
IMPORTED = 'imported'  # field of an answer: true if it was imported from another tool
SIMULATED = 'simulated'  # field of an answer: true if a simulated labeller gave it
UNNAMED = 'imported'  # name of the labeller if imported answers name nobody
GIVEN_BY = 'labeller'  # field of a label with texts instead of tokens: name of the labeller
ID = 'id'  # field with the id that a label has in another tool
GIVEN_ID = 'given_id'  # field of an imported question or answer: the label's id in the other tool


def is_unnamed(labeller: str) -> bool:
    """Return whether `labeller` stands for people whose imported answers had no names."""
    return re.fullmatch(rf'{UNNAMED}(-\d+)?', labeller) is not None


def files_of(folder: str) -> list[Path]:
    """Return a folder's .jsonl files, short names first; UserError if a link leads elsewhere."""
    if os.path.islink(folder) and not storage.is_within(folder, os.path.dirname(folder)):
        raise UserError(
            f'{folder} is a link to a folder elsewhere, so answers would be written there: replace'
            ' the link by the folder itself'
        )
    # Short names come first, so that anna.jsonl is read before a copy such as anna-copy.jsonl.
    return sorted(Path(folder).glob('*.jsonl'), key=lambda file: (len(file.stem), file.stem))


def question_id(tokens: Mapping[str, Sequence[int]]) -> str:
    """Return the id of a question {field: token ids}: the hexadecimal SHA-256 of its token ids."""
    text = json.dumps(list(tokens.values()), separators=(',', ':'))
    return hashlib.sha256(text.encode()).hexdigest()


_FIELDS = {  # {attribute of Answer: name of its field in a file of answers}
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
_OPTIONAL = {'skip': None, BAD: False, IMPORTED: False, SIMULATED: False, GIVEN_ID: None}
GIVEN_IDS = int | str | None  # types that the id of an imported label may have
_SCHEMA = {
    'answer': str,
    'question': str,
    'skip': str | None,
    'order': [COUNT],
    BAD: bool,
    IMPORTED: bool,
    SIMULATED: bool,
    GIVEN_ID: GIVEN_IDS,
}


@dataclasses.dataclass(frozen=True)
class Answer:
    """A labeller's answer to a question, or their decision to skip it."""

    uuid: str
    labeller: str
    question: str
    order: tuple[int, ...]  # order in which the samples were shown
    seconds: float  # seconds that the labeller took; 0 for an imported answer
    time: float  # time of the answer, in seconds since 1970
    value: Value | None  # answer in the format of the label type; None if the question was skipped
    reason: str | None = None  # reason why the question was skipped, if it was
    is_bad: bool = False  # whether a tie means that all samples are bad
    is_imported: bool = False  # whether the answer was given in another tool
    is_simulated: bool = False  # whether a simulated labeller gave the answer
    given_id: int | str | None = None  # id that the imported label had in its file
    line: int = dataclasses.field(default=0, compare=False)  # line number of the answer in its file

    @classmethod
    def of_record(
        cls, record: dict[str, Any], labeller: str, label_type: LabelType, line: int
    ) -> Answer:
        """Parse a record of an answer file; ValueError if the record is not a valid answer."""
        record = {**_OPTIONAL, **record}
        field, value = label_type.field, record.get(label_type.field)
        is_whole = (
            matches_schema(record, _SCHEMA)
            and sorted(record['order']) == list(range(len(label_type.samples)))
            and all(is_number(record.get(name)) for name in ('seconds', 'time'))
            and (value is not None or record['skip'] is not None)
        )
        if not is_whole:
            raise ValueError(f'{field} or skip is missing, or another field has the wrong type')
        if value is not None and not label_type.is_valid(value):
            raise ValueError(f'{field} must be {label_type.expected}, not {value!r:.80}')
        if record[BAD] and value != TIE:
            raise ValueError(f'{BAD} is only allowed if {field} is {TIE!r}')
        given = {name: record[field] for name, field in _FIELDS.items()}
        given['order'] = tuple(record['order'])
        return cls(labeller=labeller, value=value, line=line, **given)

    def record(self, label_type: LabelType) -> dict[str, Any]:
        """Return the answer as a record {field: value}, which `of_record` can parse."""
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


class AnswerLog(json_lines.Reader):
    """Answers in the file of one labeller, up to the last line that `refresh` has read.

    given: {uuid: answer} of all files, shared: no answer may be in two of them.
    """

    def __init__(
        self,
        path: str,
        label_type: LabelType,
        given: dict[str, Answer],
        most_lines: int | None = None,
    ) -> None:
        super().__init__(path, most_lines)
        self.label_type, self.given = label_type, given
        self.labeller = os.path.basename(path).removesuffix('.jsonl')
        self.kept: dict[str, Answer] = {}  # {uuid: answer}, without answers that were taken back
        self.last: dict[str, Answer] = {}  # {id of a question: last of its answers in `kept`}
        self.latest = 0.0  # time of the latest answer, even if it was taken back

    def refresh(self) -> None:
        """Read the lines that were added to the file since the last call."""
        for where, record in self.new_records():
            if 'undo' in record:
                self._take_back(str(record['undo']), where)
            else:
                self._add(record, where)

    def _add(self, record: dict[str, Any], where: str) -> None:
        try:
            answer = Answer.of_record(record, self.labeller, self.label_type, self.lines)
        except ValueError as e:
            raise UserError(
                f'{where} is not an answer of the type {self.label_type.name}: {e}'
            ) from e
        if answer.uuid in self.given:
            raise UserError(
                f'{where} repeats an answer of {self.given[answer.uuid].labeller}: one of the two'
                ' answers is a copy; take the copy out of the folder'
            )
        self.given[answer.uuid] = self.kept[answer.uuid] = self.last[answer.question] = answer
        self.latest = max(self.latest, answer.time)

    def _take_back(self, uuid: str, where: str) -> None:
        if uuid not in self.kept:
            raise UserError(f'{where} takes back an unknown answer, {printable(uuid):.80}')
        del self.kept[uuid]
        self.last = {answer.question: answer for answer in self.kept.values()}
