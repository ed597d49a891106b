"""Actions of labellers on the page; a refusal is an HTTPException, whose text they see."""

import contextlib
import dataclasses
import hmac
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from starlette.exceptions import HTTPException

from lm_human_preferences.errors import UserError
from lm_human_preferences.label_types import Value
from lm_human_preferences.labels.answers import REASONS
from lm_human_preferences.labels.folder import LabelFolder, Question
from lm_human_preferences.labels.labeller import AlreadyAnswered, AlreadyUsed, Labeller
from lm_human_preferences.labels.page.assignments import Assignments
from lm_human_preferences.language import tokenisers

MOST_STEPS = 9  # highest number of a scale: there is a key for each
REFRESH_SECONDS = 0.5  # after which it is worth looking for what others have written


class LabellingService:
    """Labellers at work on one folder, each writing a file of answers, until it is closed.

    Samples are in an order, and questions have names in the browser, that nobody can compute who
    lacks a random key: an id would tell the order.
    """

    def __init__(
        self, folder: LabelFolder, labellers: Sequence[str], note: Callable[[str], None] = print
    ) -> None:
        self.folder, self.note = folder, note
        control = folder.label_type.control
        if control.template == 'scale' and not 0 <= control.first < control.last <= MOST_STEPS:
            raise UserError(
                f'{folder.path} has numbers from {control.first} to {control.last}: people can'
                f' answer by those from 0 to {MOST_STEPS}'
            )
        encoder = folder.encoding().get_encoder()
        self.encoder = tokenisers.for_people(encoder, folder.task['task'].get('chat'))
        self.labellers: dict[str, Labeller] = {}
        self._key = secrets.token_bytes(32)
        with contextlib.ExitStack() as stack:
            for name in labellers:
                labeller = stack.enter_context(Labeller(folder, name, self._key))
                self.labellers[name] = labeller
            self._stack = stack.pop_all()
        for line in folder.notes():
            note(line)
        self.assignments = Assignments(folder, self.labellers)
        self._refreshed = time.monotonic()

    def close(self) -> None:
        self._stack.close()

    def task(self, name: str) -> dict[str, Any]:
        """Return what stays from question to question."""
        return {
            'labeller': name,
            'instructions': self.folder.task['instructions'],
            'control': dataclasses.asdict(self.folder.label_type.control),
            'reasons': REASONS,
        }

    def question(self, name: str) -> dict[str, Any]:
        """Return the question for a labeller to answer now, with what others have written."""
        with self.folder.lock:
            if time.monotonic() - self._refreshed >= REFRESH_SECONDS:
                self._read_on()
            return self._next(name)

    def answer(
        self, name: str, question: str, choice: Sequence[int], answer: str, seconds: float
    ) -> dict[str, Any]:
        """Record an answer, on the disk on return, and return what comes next; see `_record`."""
        label_type = self.folder.label_type
        control = label_type.control
        is_whole = len(choice) == control.keys and control.accepts(choice)
        if not is_whole:
            raise HTTPException(400, 'No such choice.')

        def value_of(asked: Question) -> Value:
            return label_type.answer_of(choice, self.labellers[name].order(asked))

        is_bad = control.is_bad(choice)
        return self._record(name, question, answer, seconds, value_of, is_bad=is_bad)

    def skip(
        self, name: str, question: str, reason: str, answer: str, seconds: float
    ) -> dict[str, Any]:
        """Record that a labeller skips a question; see `answer`."""
        if reason not in REASONS:
            raise HTTPException(400, 'No such reason.')
        return self._record(name, question, answer, seconds, lambda asked: None, reason=reason)

    def _record(
        self,
        name: str,
        token: str,
        uuid: str,
        seconds: float,
        value_of: Callable[[Question], Value | None],
        **said: Any,
    ) -> dict[str, Any]:
        """Record what is said about the question that a labeller holds, once for each uuid.

        token: of that question. seconds: that it took, at most as long as they have held it. said:
        more arguments of Labeller.answer.
        """
        labeller = self.labellers[name]
        with self.folder.lock:
            id, since = self.assignments.held.get(name, ('', 0.0))
            if uuid not in labeller.log.uuids:  # else it is only sent again
                if self._token(id) != token:
                    raise HTTPException(409, 'That question does not wait for you any more.')
                asked = self.folder.questions[id]
                took = min(seconds, self.assignments.clock() - since)
                try:
                    labeller.answer(asked, value_of(asked), took, uuid=uuid, **said)
                except AlreadyAnswered as e:
                    raise HTTPException(409, 'You have answered this question already.') from e
                except UserError as e:
                    raise self._not_saved(e) from e
            return self._next(name)

    def undo(self, name: str, answer: str) -> dict[str, Any]:
        """Take back an answer or a skip, and return its question, to be answered again."""
        with self.folder.lock:
            try:
                undone = self.labellers[name].undo(answer)
            except AlreadyUsed as e:
                text = 'That answer stays: the reward model has learned from it already.'
                raise HTTPException(409, text) from e
            except UserError as e:
                raise self._not_saved(e) from e
            if undone is None:
                raise HTTPException(404, 'No such answer.')
            self.assignments.hold(name, undone.question)
            return self._next(name)

    def _next(self, name: str) -> dict[str, Any]:
        """Return the question for a labeller and their progress; others replace damaged ones."""
        shown = None
        while shown is None and (question := self.assignments.give(name)):
            shown = self._shown(name, question)
        labeller = self.labellers[name]
        done, last = labeller.done(), labeller.log.last()
        open_to = self.assignments.open_to(name)
        there = len(self.folder.questions.keys() - self.folder.damaged)
        return {
            'question': shown,
            'done': done,
            'left': len(self.assignments.waiting(name)),
            'others': max(0, there - len(open_to) - done),  # one that is done may be damaged
            'last': None if last is None else last.uuid,
        }

    def _shown(self, name: str, question: Question) -> dict[str, Any] | None:
        """Return a question with its texts in the labeller's order; None if it is damaged."""
        try:
            tokens = self.folder.tokens(question)
            query = self._text(tokens['query'])
            samples = [self._text(tokens[field]) for field in self.folder.samples]
        except (UserError, LookupError, TypeError, ValueError) as e:
            if isinstance(e.__cause__, OSError):  # the page tries again
                self.note(f'note: {e}')
                raise HTTPException(503, 'The questions cannot be read.') from e
            self.note(f'note: the question {question.id} is left out: {e}')
            self.folder.damaged.add(question.id)
            return None
        order = self.labellers[name].order(question)
        return {
            'id': self._token(question.id),
            'query': query,
            'samples': [samples[index] for index in order],
        }

    def _token(self, question: str) -> str:
        """Return the name of a question in the browser."""
        return hmac.digest(self._key, question.encode(), 'sha256').hex()

    def _text(self, tokens: Sequence[int]) -> str:
        return self.encoder.decode(self.encoder.without_padding(tokens))

    def _read_on(self) -> None:
        """Read what others have written: new questions, answers given in a terminal."""
        self._refreshed = time.monotonic()
        try:
            self.folder.refresh()
        except UserError as e:
            self.note(f'note: {e}')  # what could be read counts

    def _not_saved(self, error: UserError) -> HTTPException:
        """Return the reply if a line is not on the disk, or not in the file of that name."""
        self.note(f'note: {error}')
        cause = error.__cause__
        reason = cause.strerror if isinstance(cause, OSError) else None
        return HTTPException(
            507, f'It could not be saved: {reason or "the file of your answers was moved"}.'
        )

    def summary(self) -> str:
        """Say how many questions each labeller has answered or skipped."""
        counts = []
        for name, labeller in self.labellers.items():
            values = [answer.value for answer in labeller.log.last_answers()]
            skipped = values.count(None)
            count = f'{name} {len(values) - skipped}'
            counts.append(f'{count} ({skipped} skipped)' if skipped else count)
        return f'Saved: {", ".join(counts)}.'
