"""Actions of labellers on the page.

A labeller's mistake raises an HTTPException or Refused, whose text they see; a failing disk raises
a UserError.
"""

import contextlib
import dataclasses
import hmac
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.exceptions import HTTPException

from lm_human_preferences.errors import UserError
from lm_human_preferences.labels.answers import REASONS
from lm_human_preferences.labels.folder import GOLD, LabelFolder, Question, given
from lm_human_preferences.labels.labeller import Labeller
from lm_human_preferences.language.texts import tokenisers

HOLD_SECONDS = 120.0  # seconds without an answer after which other labellers may get the question


class LabellingService:
    """Labellers at work on one folder; their files of answers stay open until `stack` is closed.

    A random key decides in which order samples are shown, and what a question is called in the
    browser: its id, a digest of the samples in their stored order, would reveal that order.
    """

    def __init__(
        self,
        folder: LabelFolder,
        labellers: Sequence[str],
        stack: contextlib.ExitStack,
        note: Callable[[str], None] = print,
    ) -> None:
        self.folder, self.note = folder, note
        encoder = folder.encoding().get_encoder()
        self.encoder = tokenisers.for_people(encoder, folder.task['task'].get('chat'))
        self.labellers: dict[str, Labeller] = {}
        self._key = secrets.token_bytes(32)
        self._lock = threading.Lock()  # hides an answer from other threads until it is on the disk
        for name in labellers:
            self.labellers[name] = stack.enter_context(Labeller(folder, name, self._key))
        self.assignments = Assignments(folder, self.labellers)

    def task(self, name: str) -> dict[str, Any]:
        """Return {name: value} of the facts that the page shows with every question."""
        return {
            'labeller': name,
            'instructions': self.folder.task['instructions'],
            'control': dataclasses.asdict(self.folder.label_type.control),
            'reasons': REASONS,
        }

    def question(self, name: str) -> dict[str, Any]:
        """Return the question to answer now, after reading what other programs have added."""
        with self._lock:
            try:
                self.folder.refresh()
            except UserError as e:
                self.note(f'note: {e}')  # go on with the questions that could be read
            return self._next(name)

    def answer(
        self,
        name: str,
        question: str,
        answer: str,
        seconds: float,
        choice: Sequence[int] = (),
        reason: str = '',
    ) -> dict[str, Any]:
        """Write a choice, or a skip and its reason, to the disk; return the next question.

        answer: uuid of the answer, which is written only once however often it is sent. question:
        name, in the browser, of the question that the labeller holds. seconds: time that they took,
        cut to the time for which they have held the question.
        """
        labeller, label_type = self.labellers[name], self.folder.label_type
        control = label_type.control
        is_choice = len(choice) == control.keys and control.accepts(choice)
        is_uuid = re.fullmatch('[0-9a-f]{32}', answer) is not None
        if not (is_uuid and seconds >= 0 and (is_choice or reason in REASONS)):  # NaN >= 0 is False
            raise HTTPException(detail='There is no such answer.', status_code=400)
        with self._lock:
            id, since = self.assignments.held.get(name, ('', 0.0))
            sent = self.folder.given.get(answer)
            if sent is None or sent.labeller != name:  # the page may send an answer twice
                if self._token(id) != question:
                    text = 'That question does not wait for you any more.'
                    raise HTTPException(detail=text, status_code=409)
                asked = self.folder.questions[id]
                value = None if reason else label_type.answer_of(choice, labeller.order(asked))
                took = min(seconds, self.assignments.clock() - since)
                said = {'reason': reason or None, 'is_bad': control.is_bad(choice)}
                labeller.answer(asked, value, took, uuid=answer, **said)
            return self._next(name)

    skip = answer  # a skip is sent like an answer, with a reason instead of a choice

    def undo(self, name: str, answer: str) -> dict[str, Any]:
        """Take back an answer or a skip, and return its question, to be answered again."""
        with self._lock:
            undone = self.labellers[name].undo(answer)
            if undone is None:
                raise HTTPException(detail='No such answer.', status_code=404)
            self.assignments.hold(name, undone.question)
            return self._next(name)

    def _next(self, name: str) -> dict[str, Any]:
        """Return a labeller's next question (or None) and the labeller's progress."""
        question, left = self.assignments.give(name)
        labeller = self.labellers[name]
        last = next(reversed(labeller.log.kept), None)
        return {
            'question': None if question is None else self._shown(name, question),
            'done': labeller.done(),
            'left': left,
            'last': last,
        }

    def _shown(self, name: str, question: Question) -> dict[str, Any]:
        """Return a question for the browser, with the samples in the order for labeller `name`."""
        tokens = map(self.encoder.without_padding, question.tokens().values())
        query, *samples = map(self.encoder.decode, tokens)
        order = self.labellers[name].order(question)
        return {
            'id': self._token(question.id),
            'query': query,
            'samples': [samples[index] for index in order],
        }

    def _token(self, question: str) -> str:
        """Return the name of a question in the browser: a keyed digest of its id."""
        return hmac.digest(self._key, question.encode(), 'sha256').hex()


class Assignments:
    """Assignment of one question at a time to each labeller.

    A labeller holds a question until they answer it. Labellers with nothing else to do may also get
    a question that another one has held for HOLD_SECONDS; the first answer counts. Gold questions
    go to everybody, but not when no other question is left, as this would give them away. Callers
    hold a lock.
    """

    def __init__(
        self,
        folder: LabelFolder,
        labellers: Mapping[str, Labeller],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder, self.labellers, self.clock = folder, labellers, clock
        self.held: dict[str, tuple[str, float]] = {}  # {labeller: (id of the question, start time)}

    def give(self, name: str) -> tuple[Question | None, int]:
        """Return (question that labeller `name` answers now, or None; number of questions left).

        The question stays the same until it is answered. Questions that others hold count as left.
        """
        own, _ = self.held.get(name, ('', 0.0))
        waiting = self._waiting(name, own)
        free, shared = [], []
        for question in waiting:
            if question.id == own:
                return question, len(waiting)
            room = question.labellers - given(self.folder.answers_to(question))
            since = [since for held, since in self.held.values() if held == question.id]
            if len(since) < room:
                free.append(question)
            elif sum(self.clock() - each < HOLD_SECONDS for each in since) < room:
                shared.append(question)
        found = min(free or shared, key=lambda question: self._rank(name, question), default=None)
        self.held.pop(name, None)
        if found is not None:
            self.hold(name, found.id)
        return found, len(waiting)

    def hold(self, name: str, question: str) -> None:
        """Let labeller `name` hold this question from now on, and no other question."""
        self.held[name] = question, self.clock()

    def _waiting(self, name: str, own: str) -> list[Question]:
        """Return the questions left for labeller `name`, whose current question has the id `own`.

        Gold questions are left out if fewer than two other questions per labeller are open. All
        other labellers may answer the question that they hold, and get one more: then no question
        might follow a gold question.
        """
        questions = self.folder.questions.values()
        open_to = [question for question in questions if self.folder.is_open_for(question, name)]
        others = sum(question.kind != GOLD for question in open_to)
        has_only_gold = self.folder.count(GOLD) == len(questions)
        if has_only_gold or others >= 2 * len(self.labellers):
            return open_to
        return [question for question in open_to if question.kind != GOLD or question.id == own]

    def _rank(self, name: str, question: Question) -> int:
        """Return the sort key of a question for labeller `name`; the smallest key comes first.

        All labellers share the ordinary questions, but each answers every gold question. Smaller
        keys spread the gold questions evenly over all questions that a labeller gets.
        """
        rank = int.from_bytes(self.labellers[name].rank(question.id))
        return rank // len(self.labellers) if question.kind == GOLD else rank
