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
from collections.abc import Callable, Sequence
from typing import Any

from starlette.exceptions import HTTPException

from lm_human_preferences.errors import UserError
from lm_human_preferences.labels.answers import REASONS
from lm_human_preferences.labels.folder import LabelFolder, Question
from lm_human_preferences.labels.labeller import Labeller
from lm_human_preferences.labels.page.assignments import Assignments
from lm_human_preferences.language import tokenisers


class LabellingService:
    """Labellers at work on one folder, whose files of answers are open until `stack` is closed.

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
        self._lock = threading.Lock()  # so that no thread sees an answer before it is on the disk
        for name in labellers:
            self.labellers[name] = stack.enter_context(Labeller(folder, name, self._key))
        self.assignments = Assignments(folder, self.labellers)

    def task(self, name: str) -> dict[str, Any]:
        """Return {name: value} for the page: what stays the same from question to question."""
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
                self.note(f'note: {e}')  # go on with what could be read
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
        if not (is_uuid and seconds >= 0 and (is_choice or reason in REASONS)):  # NaN fails
            raise HTTPException(400, 'There is no such answer.')
        with self._lock:
            id, since = self.assignments.held.get(name, ('', 0.0))
            if answer not in labeller.log.uuids:  # else the page has sent it again
                if self._token(id) != question:
                    raise HTTPException(409, 'That question does not wait for you any more.')
                asked = self.folder.questions[id]
                value = None if reason else label_type.answer_of(choice, labeller.order(asked))
                took = min(seconds, self.assignments.clock() - since)
                said = {'reason': reason or None, 'is_bad': control.is_bad(choice)}
                labeller.answer(asked, value, took, uuid=answer, **said)
            return self._next(name)

    skip = answer  # with a reason instead of a choice

    def undo(self, name: str, answer: str) -> dict[str, Any]:
        """Take back an answer or a skip, and return its question, to be answered again."""
        with self._lock:
            undone = self.labellers[name].undo(answer)
            if undone is None:
                raise HTTPException(404, 'No such answer.')
            self.assignments.hold(name, undone.question)
            return self._next(name)

    def _next(self, name: str) -> dict[str, Any]:
        """Return a labeller's next question (None if there is none), and their progress."""
        question, left = self.assignments.give(name)
        labeller = self.labellers[name]
        last = labeller.log.last()
        return {
            'question': None if question is None else self._shown(name, question),
            'done': labeller.done(),
            'left': left,
            'last': None if last is None else last.uuid,
        }

    def _shown(self, name: str, question: Question) -> dict[str, Any]:
        """Return a question for the browser, its samples as texts in this labeller's order."""
        tokens = map(self.encoder.without_padding, self.folder.tokens(question).values())
        query, *samples = map(self.encoder.decode, tokens)
        order = self.labellers[name].order(question)
        return {
            'id': self._token(question.id),
            'query': query,
            'samples': [samples[index] for index in order],
        }

    def _token(self, question: str) -> str:
        """Return the name of a question in the browser: a digest of its id, with the key."""
        return hmac.digest(self._key, question.encode(), 'sha256').hex()
