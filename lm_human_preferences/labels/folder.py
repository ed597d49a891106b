"""Folder of labels: a file of questions, and a file of answers for each labeller.

docs/labelling.md lists the files. Each file has one writer at a time, and lines are only added
(labels/json_lines.py), so any number of readers may follow a folder while people answer.

A question is put to as many labellers as its field `labellers` says. Once two labellers have
skipped it, it is retired, that is, no longer asked; gold questions never are. If a labeller has
answered a question twice, the last answer counts.
"""

from __future__ import annotations

import array
import dataclasses
import json
import math
import operator
import os
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from lm_human_preferences import errors, storage
from lm_human_preferences.errors import UserError, os_errors_as
from lm_human_preferences.label_types import LabelType, Value
from lm_human_preferences.labels import json_lines
from lm_human_preferences.labels.answers import (
    BAD,
    GIVEN_BY,
    GIVEN_ID,
    GIVEN_IDS,
    ID,
    Answer,
    AnswerLog,
    files_of,
    question_id,
)
from lm_human_preferences.labels.task_file import FORMAT, check_same_task, label_type_of, read_task
from lm_human_preferences.labels.texts.token_ids import check_ids
from lm_human_preferences.language.encodings import Encoding
from lm_human_preferences.language.texts import tokenisers
from lm_human_preferences.runs.run_files import ANSWERS, LABELLER, QUESTIONS, TASK, USED
from lm_human_preferences.storage.schema import COUNT, matches_schema
from lm_human_preferences.utils.streams import printable

# Kinds of questions: to train on, to compare two policies, and to check labellers.
TRAIN, VALIDATION, GOLD = 'train', 'validation', 'gold'
EVERYBODY = 1_000_000  # value of `labellers` for questions that everybody is asked
RETIRED_AFTER = 2  # number of skips after which a question is not asked any more
_OPTIONAL = {'episode': None, 'gold': None, GIVEN_ID: None}
_SCHEMA = {
    'id': str,
    'kind': str,
    'labellers': COUNT,
    'part': str,
    'texts_read': COUNT,
    'episode': int | None,
    GIVEN_ID: GIVEN_IDS,
}


@dataclasses.dataclass(frozen=True)
class Question:
    """A question about responses to a query."""

    id: str
    kind: str
    labellers: int  # number of labellers who should answer the question
    policies: list[str]  # policy, or file, that each sample is from
    weights: list[str]  # digest of each policy's weights; '' if unknown
    part: str  # split of the data set from which the query was taken
    texts_read: int  # number of texts read from the split, up to and including the query's
    episode: int | None  # episodes that the policy had trained on; None if it was not in training
    ids: dict[str, array.array[int]]  # token ids of the query and of each sample
    gold: Value | None = None  # known answer of a gold question
    given_id: int | str | None = None  # id of the label that the question was imported from

    def tokens(self) -> dict[str, list[int]]:
        """Return {field: token ids} of the query and the samples."""
        return {field: ids.tolist() for field, ids in self.ids.items()}

    def is_retired(self, answers: Sequence[Answer]) -> bool:
        """Return whether enough of `answers` are skips; a gold question never retires."""
        return self.kind != GOLD and len(answers) - given(answers) >= RETIRED_AFTER


def given(answers: Iterable[Answer]) -> int:
    """Return the number of `answers` that are not skips."""
    return sum(answer.value is not None for answer in answers)


def is_folder(path: str) -> bool:
    return not storage.is_remote(path) and os.path.isfile(os.path.join(path, TASK))


class LabelFolder:
    """Content of a label folder at the last refresh; UserError if `path` is no label folder."""

    def __init__(self, path: str, lines: Mapping[str, int] | None = None) -> None:
        self.path = path
        self.lines = lines  # {labeller: number of lines to read}; None: all lines
        if not is_folder(path):
            command = errors.typed('./launch.py ask EXPERIMENT', os.path.abspath(path))
            raise UserError(
                f'{path} is not a folder of labels: there is no local file {TASK} in it;'
                f' {command} makes one'
            )
        self.task = read_task(path)
        self.label_type = label_type_of(self.task)
        self.samples = self.label_type.samples
        self.questions: dict[str, Question] = {}
        self.logs: dict[str, AnswerLog] = {}
        self.given: dict[str, Answer] = {}  # {uuid: answer} of all labellers, see AnswerLog
        self._reader = json_lines.Reader(os.path.join(path, QUESTIONS))
        self.refresh()

    def encoding(self) -> Encoding:
        """Return the folder's encoding; UserError if it is unknown or lacks a question's token."""
        encoding = tokenisers.find(self.task['encoding'], self.path)
        for question in self.questions.values():
            for field, ids in question.ids.items():
                where = f'{self.path}, question {printable(question.id)}, field {field!r}'
                check_ids(ids.tolist(), encoding, where)
        return encoding

    def refresh(self) -> None:
        """Read the questions and answers that were added; UserError if they cannot be read."""
        # Read answers before questions, as the question of each answer was written earlier.
        for file in files_of(os.path.join(self.path, ANSWERS)):
            name = file.stem
            if not LABELLER.fullmatch(name) or (self.lines is not None and name not in self.lines):
                continue
            if name not in self.logs:
                most = None if self.lines is None else self.lines[name]
                self.logs[name] = AnswerLog(str(file), self.label_type, self.given, most)
            self.logs[name].refresh()
        self.logs = dict(sorted(self.logs.items()))
        for where, record in self._reader.new_records():
            try:
                question = _parse_question(record, self.label_type)
            except (OverflowError, TypeError, ValueError) as e:
                raise UserError(f'{where} is not a question: {e}') from e
            self.questions[question.id] = question
        for log in self.logs.values():
            for unknown in log.last.keys() - self.questions.keys():
                raise UserError(
                    f'{log.path} answers the question {printable(unknown):.80}, which is not in'
                    f' {self._reader.path}'
                )

    def count(self, kind: str) -> int:
        return sum(question.kind == kind for question in self.questions.values())

    def answers_to(self, question: Question, without: Collection[str] = ()) -> list[Answer]:
        """For each labeller not in `without`, return the last answer, or skip, to a question."""
        logs = [log for name, log in self.logs.items() if name not in without]
        return [log.last[question.id] for log in logs if question.id in log.last]

    def is_open_for(self, question: Question, labeller: str) -> bool:
        """Return whether a labeller should be asked a question."""
        answers = self.answers_to(question)
        if any(answer.labeller == labeller for answer in answers):
            return False
        return not question.is_retired(answers) and given(answers) < question.labellers

    def answers_that_count(self, question: Question, without: Collection[str] = ()) -> list[Answer]:
        """Return the answers to a question that count as labels, oldest first.

        If the question is for one labeller, answers after the first count only if imported.
        """
        answers = self.answers_to(question, without)
        answers = [answer for answer in answers if answer.value is not None]
        answers.sort(key=operator.attrgetter('age'))
        if question.labellers > 1:
            return answers
        return [*answers[:1], *(answer for answer in answers[1:] if answer.is_imported)]

    def counted(self, kind: str = TRAIN, without: Collection[str] = ()) -> list[Answer]:
        """Return the answers to questions of one `kind` that count as labels, oldest first.

        UserError for a name in `without` that has no file of answers.
        """
        for name in set(without).difference(self.logs):
            known = ', '.join(self.logs) or 'no answers yet'
            raise UserError(f'{self.path} has no answers of a labeller {name!r:.80}: {known}')
        found = []
        for question in self.questions.values():
            if question.kind == kind:
                found += self.answers_that_count(question, without)
        return sorted(found, key=operator.attrgetter('age'))

    def as_labels(
        self, answers: Iterable[Answer], as_text: bool = False
    ) -> Iterator[dict[str, Any]]:
        """Yield answers as labels {field: value} for a file; imported labels keep their ids.

        as_text: whether to add the fields GIVEN_BY and BAD.
        """
        for answer in answers:
            question = self.questions[answer.question]
            label = {**question.tokens(), self.label_type.field: answer.value}
            for given_id in (question.given_id, answer.given_id):
                if given_id is not None:
                    label[ID] = given_id
            if as_text:
                label[GIVEN_BY] = answer.labeller
            if as_text and answer.is_bad:
                label[BAD] = True
            yield label

    def time_of_next_answer(self) -> float:
        """Return now, or just after the latest answer if that is later, in seconds since 1970."""
        latest = max((log.latest for log in self.logs.values()), default=0.0)
        return max(time.time(), math.nextafter(latest, sys.float_info.max))

    def lines_read(self) -> dict[str, int]:
        """Return {labeller: number of lines read}, the argument `lines` of LabelFolder."""
        return {name: log.lines for name, log in self.logs.items()}

    def lines_used(self, labeller: str) -> int:
        """Return how many lines of a labeller's file a training has used; these lines must stay."""
        reader = json_lines.Reader(os.path.join(self.path, USED))
        lines = 0
        for _, record in reader.new_records():
            lines = max(lines, record.get('answers', {}).get(labeller, 0))
        return lines


def parse_names(names: str | None) -> tuple[str, ...]:
    """Split the value of --without or --labels.without into names of labellers."""
    return tuple(map(str.strip, names.split(','))) if names else ()


def _parse_question(record: dict[str, Any], label_type: LabelType) -> Question:
    """Parse a line of questions.jsonl; OverflowError, TypeError or ValueError if it is invalid."""
    count = len(label_type.samples)
    record = {**_OPTIONAL, 'weights': [''] * count, **record}
    of_each_sample = (str,) * count
    schema = {**_SCHEMA, 'policies': of_each_sample, 'weights': of_each_sample}
    if not matches_schema(record, schema):
        raise ValueError('a field is missing, or has the wrong type')
    gold = record['gold']
    if gold is not None and not label_type.is_valid(gold):
        raise ValueError(f'gold must be {label_type.expected}, not {gold!r:.80}')
    tokens: dict[str, Any] = {}
    for field in ('query', *label_type.samples):
        tokens[field] = record.get(field)
    if question_id(tokens) != record['id']:
        raise ValueError("the value of the field 'id' does not match the token ids")
    ids = {field: array.array('i', given) for field, given in tokens.items()}
    return Question(**{name: record[name] for name in schema}, gold=gold, ids=ids)


class QuestionWriter(json_lines.Writer):
    """Exclusive writer of a folder's questions; creates the folder if it does not exist."""

    def __init__(self, path: str, task: Mapping[str, Any], encoding: Encoding) -> None:
        file = os.path.join(path, QUESTIONS)
        with os_errors_as(f'{path} cannot be made'):
            os.makedirs(path, 0o700, exist_ok=True)
            os.makedirs(os.path.join(path, ANSWERS), exist_ok=True)
        super().__init__(file, 'another program adds questions; try again when it has ended')
        try:
            if is_folder(path):
                check_same_task(path, read_task(path), {**task, 'encoding': encoding.name})
            else:
                encoding.copy_files(path)
                content = {'format': FORMAT, **task, 'encoding': encoding.name}
                text = json.dumps(content, indent=2)
                storage.write_bytes(os.path.join(path, TASK), f'{text}\n'.encode())
            self.folder = LabelFolder(path)
        except BaseException:
            self.close()
            raise

    def add(
        self, questions: Iterable[dict[str, list[int]]], headers: Iterable[Mapping[str, Any]]
    ) -> None:
        """Write questions {field: token ids}, with their other fields in `headers`, to the disk."""
        self.append(
            {'id': question_id(tokens), **header, **tokens}
            for tokens, header in zip(questions, headers, strict=True)
        )
        self.folder.refresh()
