"""Assignment of questions to labellers."""

import time
from collections.abc import Callable, Mapping

from lm_human_preferences.labels.folder import GOLD, LabelFolder, Question, given
from lm_human_preferences.labels.labeller import Labeller

HOLD_SECONDS = 120.0  # seconds without an answer after which a question may go to others, too


class Assignments:
    """Gives each labeller one question at a time, and each question to as many as it needs.

    A labeller holds a question until they answer it. If others have nothing else to do, they get a
    question that has been held for HOLD_SECONDS, too; the first answer counts. Everybody is asked
    the gold questions, but not when nothing else is left: by that they would be known. Callers hold
    a lock.
    """

    def __init__(
        self,
        folder: LabelFolder,
        labellers: Mapping[str, Labeller],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder, self.labellers, self.clock = folder, labellers, clock
        self.held: dict[str, tuple[str, float]] = {}  # {labeller: (question, since when)}

    def give(self, name: str) -> tuple[Question | None, int]:
        """Return the question to be answered now, and the number of questions left.

        It is the same question until it is answered. Those that others hold count as left.
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
        """Have a labeller hold a question from now on, and no other one."""
        self.held[name] = question, self.clock()

    def _waiting(self, name: str, own: str) -> list[Question]:
        """Return the questions that a labeller, who holds the question `own`, will be asked.

        Gold questions are left out near the end, so that another question follows each gold one:
        each of the other labellers may meanwhile answer the question that they hold, and get one
        more.
        """
        questions = self.folder.questions.values()
        open_to = [question for question in questions if self.folder.is_open_for(question, name)]
        others = sum(question.kind != GOLD for question in open_to)
        has_only_gold = self.folder.count(GOLD) == len(questions)
        if has_only_gold or others >= 2 * len(self.labellers):
            return open_to
        return [question for question in open_to if question.kind != GOLD or question.id == own]

    def _rank(self, name: str, question: Question) -> int:
        """Return the sort key by which questions are given.

        A labeller gets about as large a part of the gold questions as of the others, which they
        share.
        """
        rank = int.from_bytes(self.labellers[name].rank(question.id))
        return rank // len(self.labellers) if question.kind == GOLD else rank
