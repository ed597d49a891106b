"""Assignment of questions to labellers."""

import time
from collections.abc import Callable, Mapping

from lm_human_preferences.labels.folder import GOLD, LabelFolder, Question, given
from lm_human_preferences.labels.labeller import Labeller

HOLD_SECONDS = 120.0  # seconds without an answer after which others may get the question, too


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
        """Let labeller `name` hold this question from now on, in place of any other."""
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
