"""Labeller at work: the next question, and answers that are on the disk before the next one."""

import contextlib
import os
import threading
import time
import uuid as uuids
from collections.abc import Iterator, Sequence
from typing import Any

from lm_human_preferences.errors import OptionError, UserError
from lm_human_preferences.label_types import Value
from lm_human_preferences.labels.answers import (
    Answer,
    AnswerLog,
    asking_rank,
    shown_order,
)
from lm_human_preferences.labels.folder import LabelFolder, Question
from lm_human_preferences.labels.json_lines import Writer
from lm_human_preferences.runs.run_files import ANSWERS, LABELLER


def check_name(labeller: str) -> None:
    """Raise OptionError for what cannot name a labeller."""
    if not LABELLER.fullmatch(labeller):
        raise OptionError(
            '--labeller', f'{labeller!r:.80}: give a name of up to 32 letters, digits, _ and -'
        )


def names_in(text: str) -> list[str]:
    """Return the names in NAME,NAME; OptionError for one that is not a name or comes twice."""
    names = [name.strip() for name in text.split(',')]
    for name in names:
        check_name(name)
        if names.count(name) > 1:
            raise OptionError('--labeller', f'{text:.80} names {name} twice')
    return names


class AlreadyUsed(UserError):
    """An answer cannot be taken back, because a training has learned from it."""


class AlreadyAnswered(UserError):
    """Error: the labeller has answered this question already."""


class Labeller(contextlib.AbstractContextManager['Labeller']):
    """One labeller at work: the only writer of their file of answers.

    at_work: what to do if there is another one, for the error.
    key: of the order on the screen, see answers.shown_order. dropped: bytes of an unfinished answer
    that were removed. Calls from several threads wait for each other.
    """

    def __init__(
        self,
        folder: LabelFolder,
        name: str,
        key: bytes | None = None,
        at_work: str = 'use another --labeller',
    ) -> None:
        check_name(name)
        self.folder, self.name, self._key = folder, name, key
        path = os.path.join(folder.path, ANSWERS, f'{name}.jsonl')
        with contextlib.suppress(OSError):  # which the writer explains
            os.makedirs(os.path.dirname(path), exist_ok=True)
        in_use = f'{path} is in use: {name} is labelling already; {at_work}'
        self._writer = Writer(path, in_use)
        self.dropped = self._writer.dropped
        self._one_at_a_time = threading.Lock()
        self._left_out: set[str] = set()
        self._queue: list[Question] = []
        self._position = 0
        try:
            folder.refresh()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._writer.close()

    @property
    def log(self) -> AnswerLog:
        return self.folder.logs[self.name]

    def next_question(self) -> Question | None:
        """Return the question to be asked next, or None; raises as `check_file` does."""
        self.check_file()
        self.folder.refresh()
        if len(self._queue) != len(self.folder.questions):
            self._queue = sorted(
                self.folder.questions.values(),
                key=lambda question: asking_rank(self.name, question.id, self._key),
            )
            self._position = 0
        for start in (self._position, 0):  # others may have taken back what they had answered
            for index in range(start, len(self._queue)):
                if self._is_open(self._queue[index]):
                    self._position = index
                    return self._queue[index]
        return None

    def check_file(self) -> None:
        """Raise json_lines.FileTaken if the file of answers was moved, replaced or changed."""
        with self._one_at_a_time:
            self._writer.check_unchanged()

    def upcoming(self) -> Iterator[Question]:
        """Yield the questions that are open for this labeller now, the next one first."""
        yield from filter(self._is_open, self._queue[self._position :])

    def _is_open(self, question: Question) -> bool:
        return question.id not in self._left_out and self._waits(question)

    def _waits(self, question: Question) -> bool:
        return self.folder.is_open_for(question, self.name)

    def left(self) -> int:
        """Return how many questions wait for this labeller, with those that were left out."""
        return sum(map(self._waits, self.folder.questions.values()))

    def done(self) -> int:
        """Return how many questions they have answered or skipped."""
        return len(self.log.by_question)

    def leave_out(self, question: Question) -> None:
        """Stop asking this labeller a question, which is damaged."""
        self._left_out.add(question.id)

    def order(self, question: Question) -> tuple[int, ...]:
        """Return the samples of a question in the order in which they are shown."""
        return shown_order(self.name, question.id, len(self.folder.samples), self._key)

    def answer(
        self,
        question: Question,
        value: Value | None,
        seconds: float,
        *,
        reason: str | None = None,
        uuid: str | None = None,
        only_once: bool = False,
        simulated: bool = False,
    ) -> Answer:
        """Record an answer, or with value None a skip and its reason; on the disk on return.

        uuid: the same one, given again after an answer that may have been lost, records nothing
        twice. AlreadyAnswered if it was given with another answer, and with `only_once` if the
        question has an answer of another uuid.
        """
        answer = Answer(
            uuid=uuid or str(uuids.uuid4()),
            labeller=self.name,
            question=question.id,
            value=value,
            reason=reason,
            order=self.order(question),
            seconds=round(seconds, 3),
            time=self.folder.time_of_next_answer(),
            is_simulated=simulated,
        )
        with self._one_at_a_time:
            with self.folder.lock:
                before = self.log.uuids.get(answer.uuid)
                other = self.log.answer_to(answer.question)
            if before is not None:
                if before.said != answer.said:
                    raise AlreadyAnswered(
                        f'{self._writer.path} has another answer {answer.uuid} already'
                    )
                self._writer.check_unchanged()
                return before
            if only_once and other is not None:
                raise AlreadyAnswered(f'{self._writer.path} has an answer to this question already')
            self._append(answer.record(self.folder.label_type))
            return answer

    def add(self, answers: Sequence[Answer]) -> None:
        """Record answers that were given elsewhere."""
        with self._one_at_a_time:
            if answers:
                self._append(*(answer.record(self.folder.label_type) for answer in answers))

    def undo(self, uuid: str | None = None) -> Answer | None:
        """Take back the answer `uuid`, or the last one; AlreadyUsed if it was learned from."""
        with self._one_at_a_time:
            answer = self.log.last() if uuid is None else self.log.uuids.get(uuid)
            if answer is None:
                return None
            if answer.uuid in self.log.taken_back:
                self._writer.check_unchanged()
            elif self.log.line_of[answer.uuid] <= self.folder.lines_used(self.name):
                raise AlreadyUsed('this answer stays: the reward model has learned from it')
            else:
                self._append({'undo': answer.uuid, 'time': time.time()})
            self._position = 0
            return answer

    def _append(self, *records: dict[str, Any]) -> None:
        """Write lines, which the log then reads and checks as those of other programs."""
        self._writer.check_unchanged()  # else the log below would be read from another file
        try:
            self._writer.append(records)
        finally:
            # Also after an error: another thread may have read the line before it was cut off.
            with self.folder.lock:
                self.log.refresh()
