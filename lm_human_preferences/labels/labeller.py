"""Labeller at work: the order of their questions, and their file of answers."""

import hashlib
import os
import time
import uuid as uuids
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lm_human_preferences.errors import OptionError, UserError
from lm_human_preferences.label_types import Value
from lm_human_preferences.labels.answers import Answer, AnswerLog
from lm_human_preferences.labels.folder import LabelFolder, Question
from lm_human_preferences.labels.json_lines import Writer
from lm_human_preferences.runs.run_files import ANSWERS, LABELLER


def check_name(labeller: str) -> None:
    """Raise OptionError unless `labeller` is a valid name of a labeller."""
    if not LABELLER.fullmatch(labeller):
        raise OptionError(
            f'--labeller {labeller!r:.80}: give a name of up to 32 letters, digits, _ and -'
        )


def names_in(text: str) -> list[str]:
    """Split NAME,NAME into names of labellers; OptionError if a name is invalid or repeated."""
    names = [name.strip() for name in text.split(',')]
    for name in names:
        check_name(name)
        if names.count(name) > 1:
            raise OptionError(f'--labeller {text:.80} names {name} twice')
    return names


class Refused(UserError):
    """Error: a question was answered already, or an answer cannot be taken back any more."""


class Labeller(Writer):
    """One labeller at work: the exclusive writer of their file of answers.

    key: secret that decides the order of the questions, and of the samples in each question.
    """

    def __init__(self, folder: LabelFolder, name: str, key: bytes = b'') -> None:
        check_name(name)
        self.folder, self.name, self._key = folder, name, key
        folder.refresh()  # A damaged folder raises UserError here, before any file is made.
        path = os.path.join(folder.path, ANSWERS, f'{name}.jsonl')
        other = f'{name} is labelling already; use another --labeller, or try again when they leave'
        super().__init__(path, other)
        folder.refresh()

    @property
    def log(self) -> AnswerLog:
        return self.folder.logs[self.name]

    def next_question(self) -> Question | None:
        """Return the question to ask next, or None if none is open."""
        return next(self.upcoming(), None)

    def upcoming(self) -> Iterator[Question]:
        """Yield questions for this labeller to answer; refresh the folder before each question."""
        self.folder.refresh()
        for question in sorted(self.folder.questions.values(), key=lambda each: self.rank(each.id)):
            if self.folder.is_open_for(question, self.name):
                yield question
                self.folder.refresh()

    def rank(self, name: str) -> bytes:
        """Return the sort key, random but fixed, of the question or sample called `name`."""
        return hashlib.sha256(self._key + f'{self.name}/{name}'.encode()).digest()

    def left(self) -> int:
        """Return the number of questions that this labeller can still answer."""
        questions = self.folder.questions.values()
        return sum(self.folder.is_open_for(question, self.name) for question in questions)

    def done(self) -> int:
        """Return the number of questions that this labeller has answered or skipped."""
        return len(self.log.last)

    def order(self, question: Question) -> tuple[int, ...]:
        """Return the indices of a question's samples in the order in which they are shown."""
        samples = range(len(self.folder.samples))
        return tuple(sorted(samples, key=lambda index: self.rank(f'{question.id}/{index}')))

    def answer(
        self, question: Question, value: Value | None, seconds: float, **more: Any
    ) -> Answer:
        """Write an answer, or a skip if `value` is None, to the disk. more: other fields of Answer.

        Refused if another answer has this uuid, or the labeller has answered the question already.
        """
        answer = Answer(
            labeller=self.name,
            question=question.id,
            value=value,
            order=self.order(question),
            seconds=round(seconds, 3),
            time=self.folder.time_of_next_answer(),
            **{'uuid': str(uuids.uuid4()), **more},
        )
        if answer.uuid in self.folder.given or question.id in self.log.last:
            raise Refused(f'{self.name} has answered this question already')
        self.add([answer])
        return answer

    def add(self, answers: Iterable[Answer]) -> None:
        """Write answers, which may be imported ones, to the disk."""
        self.append(answer.record(self.folder.label_type) for answer in answers)

    def undo(self, uuid: str | None = None) -> Answer | None:
        """Take back and return an answer, by default the last; Refused if training has used it."""
        kept, given = self.log.kept, self.folder.given
        answer = next(reversed(kept.values()), None) if uuid is None else given.get(uuid)
        if answer is None or answer.labeller != self.name:
            return None
        if answer.uuid not in kept:  # an earlier copy of this request has taken back the answer
            return answer
        if answer.line <= self.folder.lines_used(self.name):
            raise Refused('That answer stays: the reward model has learned from it')
        self.append([{'undo': answer.uuid, 'time': time.time()}])
        return answer

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append records to the labeller's file, then read the new lines back and check them."""
        super().append(records)
        self.log.refresh()
