"""Actions of labellers on the page; HTTPException, whose text they see, for what is refused."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from starlette.exceptions import HTTPException

from lm_human_preferences.errors import UserError
from lm_human_preferences.label_types import Value
from lm_human_preferences.labels.answers import REASONS
from lm_human_preferences.labels.folder import LabelFolder, Question
from lm_human_preferences.labels.json_lines import FileTaken
from lm_human_preferences.labels.labeller import AlreadyAnswered, AlreadyUsed, Labeller
from lm_human_preferences.labels.page.assignments import Assignments
from lm_human_preferences.labels.page.key import FolderKey, QuestionTokens
from lm_human_preferences.language import tokenisers

REFRESH_SECONDS = 0.5  # after which it is worth looking for what others have written
CLOCK_SECONDS = 3.0  # that a labeller's clock may be ahead of this one, while a question is shown
MOST_QUESTIONS = 3  # that are given at a time: one to show, two for which nobody has to wait


class LabellingService:
    """Labellers at work on one folder, each writing a file of answers, until it is closed."""

    def __init__(
        self,
        folder: LabelFolder,
        labellers: Sequence[str],
        key: FolderKey,
        note: Callable[[str], None] = print,
    ) -> None:
        self.folder, self.note = folder, note
        encoder = folder.encoding().get_encoder()
        self.encoder = tokenisers.for_people(encoder, folder.task['task'].get('chat'))
        self.labellers: dict[str, Labeller] = {}
        self.tokens = QuestionTokens(key)
        with contextlib.ExitStack() as stack:
            for name in labellers:
                self.labellers[name] = stack.enter_context(Labeller(folder, name, key.order))
            self._stack = stack.pop_all()
        for labeller in self.labellers.values():
            if labeller.dropped:
                note(
                    f'note: an unfinished answer of {labeller.name}, {labeller.dropped} bytes, was'
                    ' dropped'
                )
        for line in folder.notes():
            note(line)
        self.assignments = Assignments(folder, labellers, key=key.order)
        self._refreshed = time.monotonic()
        self._left_out: set[str] = set()  # questions that were noted to be damaged

    def close(self) -> None:
        self._stack.close()

    def task(self, name: str) -> dict[str, Any]:
        """Return what stays from question to question, and the progress of the labeller."""
        with self.folder.lock:
            return {
                'labeller': name,
                'instructions': self.folder.task['instructions'],
                'samples': len(self.folder.samples),
                'control': dataclasses.asdict(self.folder.label_type.control),
                'reasons': REASONS,
                **self._state(name),
            }

    def questions(self, name: str, held: Sequence[str], count: int) -> dict[str, Any]:
        """Return `count` more questions, and which unanswered ones of the page are lost."""
        try:
            self.labellers[name].check_file()
        except UserError as e:
            raise self._not_saved(e) from e
        with self.folder.lock:
            if time.monotonic() - self._refreshed >= REFRESH_SECONDS:
                self._read_on()
            ids = {token: self.tokens.id(token, self.folder.questions) for token in held}
            known = [id for id in ids.values() if id is not None]
            lost_ids = self.assignments.renew(name, known)
            lost = [token for token, id in ids.items() if id is None or id in lost_ids]
            shown = self._give(name, min(count, MOST_QUESTIONS), set(known))
            return {'questions': shown, 'lost': lost, **self._state(name)}

    def _give(self, name: str, count: int, held: set[str]) -> list[dict[str, Any]]:
        """Return questions as they are shown; others replace damaged ones."""
        shown: list[dict[str, Any]] = []
        while len(shown) < count:
            given = self.assignments.give(name, count - len(shown), held)
            if not given:
                break
            held.update(question.id for question in given)
            shown += filter(None, [self._shown(name, question) for question in given])
        return shown

    def _shown(self, name: str, question: Question) -> dict[str, Any] | None:
        """Return a question with its texts in the labeller's order; None if it is damaged."""
        order = self.labellers[name].order(question)
        try:
            tokens = self.folder.tokens(question)
            query = self._text(tokens['query'])
            samples = [self._text(tokens[field]) for field in self.folder.samples]
        except (UserError, OSError, LookupError, TypeError, ValueError) as e:
            if isinstance(e.__cause__, OSError):
                # The page tries again.
                self.note(f'note: {e}')
                reason = e.__cause__.strerror or e.__cause__
                raise HTTPException(503, f'The questions cannot be read: {reason}.') from e
            if question.id not in self._left_out:
                self._left_out.add(question.id)
                self.note(f'note: the question {question.id} is left out: {e}')
            self.assignments.leave_out(question.id)
            return None
        return {
            'id': self.tokens.token(question.id),
            'query': query,
            'samples': [samples[index] for index in order],
        }

    def _text(self, tokens: Sequence[int]) -> str:
        padding = self.encoder.padding_token
        return self.encoder.decode([token for token in tokens if token != padding])

    def _state(self, name: str) -> dict[str, Any]:
        log = self.labellers[name].log
        last = log.last()
        done = len(log.by_question)
        return {
            'done': done,
            'left': self.assignments.left(name),
            'others': self.assignments.done_by_others(name, done),
            'last': None if last is None else last.uuid,
        }

    def _read_on(self) -> None:
        """Read what others have written: new questions, answers given in a terminal."""
        self._refreshed = time.monotonic()
        try:
            changed = self.folder.refresh()
        except (UserError, OSError) as e:
            self.note(f'note: {e}')  # what could be read counts
            if self.folder.lacks_questions():
                self._refreshed = 0.0
                text = 'The questions cannot be read: their file was changed.'
                raise HTTPException(503, text) from e
            self.assignments.update()
        else:
            self.assignments.update(changed)

    def answer(
        self, name: str, question: str, choice: int | Sequence[int], **given: Any
    ) -> dict[str, Any]:
        """Record an answer to the question of a token; on the disk on return. given: of _record."""
        label_type = self.folder.label_type
        numbers = [choice] if isinstance(choice, int) else choice
        if len(numbers) != label_type.control.keys or not label_type.control.accepts(numbers):
            raise HTTPException(400, 'No such choice.')
        asked = self._question(question)
        value = label_type.answer_of(numbers, self.labellers[name].order(asked))
        return self._record(name, asked, value, None, **given)

    def skip(self, name: str, question: str, reason: str, **given: Any) -> dict[str, Any]:
        """Record that a labeller skips a question; see `answer`."""
        if reason not in REASONS:
            raise HTTPException(400, 'No such reason.')
        return self._record(name, self._question(question), None, reason, **given)

    def _question(self, token: str) -> Question:
        with self.folder.lock:
            if self.tokens.id(token, self.folder.questions) is None:
                self._read_on()
            id = self.tokens.id(token, self.folder.questions)
            question = None if id is None else self.folder.questions.get(id)
        if question is None:
            raise HTTPException(404, 'This question does not exist any more.')
        return question

    def _record(
        self,
        name: str,
        question: Question,
        value: Value | None,
        reason: str | None,
        *,
        answer: str,
        seconds: float,
    ) -> dict[str, Any]:
        """Record an answer or a skip with its uuid, `answer`, and the seconds that it took."""
        with self.folder.lock:
            if answer not in self.labellers[name].log.uuids:  # else it is only sent again
                since = self.assignments.seconds_since(name, question.id)
                if since is None:
                    raise HTTPException(409, 'That question does not wait for you any more.')
                seconds = min(seconds, since + CLOCK_SECONDS)
        try:
            self.labellers[name].answer(
                question, value, seconds, reason=reason, uuid=answer, only_once=True
            )
        except AlreadyAnswered as e:
            raise HTTPException(409, 'You have answered this question already.') from e
        except UserError as e:
            raise self._not_saved(e) from e
        with self.folder.lock:
            self.assignments.update([question.id])
            self.assignments.end(name, question.id)
            return self._state(name)

    def undo(self, name: str, answer: str) -> dict[str, Any]:
        """Take back an answer or a skip; the reply has its question, to be shown at once."""
        labeller = self.labellers[name]
        try:
            undone = labeller.undo(answer)
        except AlreadyUsed as e:
            text = 'That answer stays: the reward model has learned from it already.'
            raise HTTPException(409, text) from e
        except UserError as e:
            raise self._not_saved(e) from e
        if undone is None:
            raise HTTPException(404, 'No such answer.')
        with self.folder.lock:
            self.assignments.update([undone.question])
            if labeller.log.answer_to(undone.question) is not None:
                # It was given again, in another window or a terminal.
                raise HTTPException(409, 'Your newer answer to that question stays.')
            self.assignments.give_back(name, undone.question)
            question = self.folder.questions.get(undone.question)
            shown = None if question is None else self._shown(name, question)
            return {'question': shown, **self._state(name)}

    def _not_saved(self, error: UserError) -> HTTPException:
        """Return the reply if a line is not on the disk, or not in the file of that name."""
        self.note(f'note: {error}')
        if isinstance(error, FileTaken):
            what = 'the file of your answers was moved or changed'
            advice = 'Whoever started this page is told there what to do.'
            return HTTPException(507, f'Nothing more can be saved: {what}. {advice}')
        cause = error.__cause__
        reason = cause.strerror if isinstance(cause, OSError) else None
        return HTTPException(
            507, f'It could not be saved: {reason or "the folder cannot be written"}.'
        )

    def summary(self) -> str:
        """Say what each labeller has answered or skipped, and where it is if not in their file."""
        saved, elsewhere = [], ''
        for name, labeller in self.labellers.items():
            values = [answers[-1].value for answers in labeller.log.by_question.values() if answers]
            skipped = values.count(None)
            count = f'{name} {len(values) - skipped}'
            if skipped:
                count += f' ({skipped} skipped)'
            try:
                labeller.check_file()
                saved.append(count)
            except UserError as e:
                elsewhere += f'{count}: {e}. '
        done = f'Saved: {", ".join(saved) or "nothing else"}.'
        return f'{elsewhere}{done} {self.assignments.open()} questions are open.'
