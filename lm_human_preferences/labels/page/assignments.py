"""Assignment of questions to labellers."""

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from lm_human_preferences.labels.answers import asking_rank
from lm_human_preferences.labels.folder import GOLD, LabelFolder, Question, given

LEASE_SECONDS = 600.0
MOST_LEASES = 16  # of a labeller at a time


class Assignments:
    """Gives the questions of a folder to several labellers, none of them to more than it needs.

    Whoever is given a question has a lease on it, which ends when it is answered or after
    `seconds`; then others may be given it. key: of the order in which they are asked, see
    answers.asking_rank. Callers hold the folder's lock. Gold questions, which everybody is asked,
    come while there are others, and not when nothing else is left: they would be known by that.
    """

    def __init__(
        self,
        folder: LabelFolder,
        labellers: Sequence[str],
        seconds: float = LEASE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        key: bytes | None = None,
    ) -> None:
        self.folder, self.seconds, self.clock = folder, seconds, clock
        # {labeller: {question: when the lease ends}}, in the order in which they are asked
        self._leases: dict[str, dict[str, float]] = {name: {} for name in labellers}
        # {labeller: {question: when it was given; long ago, if by a server before this one}}
        self._given: dict[str, dict[str, float]] = {name: {} for name in labellers}
        self._gold: set[str] = set()
        self._queues = {name: _Queue(name, key, len(labellers)) for name in labellers}
        self._damaged: set[str] = set()
        self._open: set[str] = set()
        # {labeller: open questions that they have answered or skipped, and that others still get}
        self._done_by: dict[str, set[str]] = {name: set() for name in labellers}
        self.update(folder.questions)

    def update(self, questions: Iterable[str] | None = None) -> None:
        """Look again at questions that are new or have other answers; None: at all, also former."""
        new = []
        for question in {*self._open, *self.folder.questions} if questions is None else questions:
            was_open = question in self._open
            self._update_one(question)
            if question in self._open and not was_open:
                new.append(question)
        if new:
            for queue in self._queues.values():
                queue.add(new, self._gold)

    def leave_out(self, question: str) -> None:
        """Stop asking a question, which is damaged."""
        self._damaged.add(question)
        self.update([question])

    def _update_one(self, id: str) -> None:
        self._open.discard(id)
        for done in self._done_by.values():
            done.discard(id)
        question = self.folder.questions.get(id)
        if question is None or id in self._damaged:
            return
        if question.kind == GOLD:
            self._gold.add(id)
        answers = self.folder.answers_to(question)
        if not self.folder.needs_answers(question, answers):
            return
        self._open.add(id)
        for answer in answers:
            if answer.labeller in self._done_by:
                self._done_by[answer.labeller].add(id)

    def left(self, labeller: str) -> int:
        """Return how many questions wait for a labeller, including those leased to others."""
        if self._has_only_gold(labeller):
            return 0
        return len(self._open) - len(self._done_by[labeller])

    def _has_only_gold(self, labeller: str) -> bool:
        """Return whether all that waits for a labeller is gold, in a folder that has more."""
        done = self._done_by[labeller]
        others = len(self._open) - len(done) - len((self._gold & self._open) - done)
        return others == 0 and len(self._gold) < len(self.folder.questions)

    def done_by_others(self, labeller: str, done: int) -> int:
        """Return how many closed questions others answered; done: by the labeller."""
        # Only the damaged ones are looked at: this is called for each reply.
        damaged = self._damaged & self.folder.questions.keys()
        closed = len(self.folder.questions) - len(damaged) - len(self._open)
        own = done - len(self._done_by[labeller])
        return max(0, closed - own)  # own ones may be damaged

    def open(self) -> int:
        """Return how many questions wait for anybody."""
        return len(self._open)

    def renew(self, labeller: str, held: Iterable[str]) -> list[str]:
        """Renew the leases on the questions on a labeller's page; return those that are lost."""
        lost = []
        for question in held:
            if self._is_free(question, labeller):
                self._given[labeller].setdefault(question, -math.inf)
                self._lease(labeller, question)
            else:
                self.end(labeller, question)
                lost.append(question)
        return lost

    def give(self, labeller: str, count: int, held: Iterable[str] = ()) -> list[Question]:
        """Return up to `count` questions besides those `held`; those with a lease come first."""
        held = set(held)
        found: list[Question] = []
        for question in self._candidates(labeller):
            if len(found) == count:
                break
            if question not in held and self._is_free(question, labeller):
                held.add(question)
                self._given[labeller].setdefault(question, self.clock())
                self._lease(labeller, question)
                found.append(self.folder.questions[question])
        return found

    def seconds_since(self, labeller: str, question: str) -> float | None:
        """Return the time since a labeller was given a question; None if it is not for them."""
        if question not in self._given[labeller]:
            self.renew(labeller, [question])  # a page may have it from the server before
        since = self._given[labeller].get(question)
        return None if since is None else self.clock() - since

    def give_back(self, labeller: str, question: str) -> None:
        """Ask a labeller again, and first, a question whose answer they have taken back."""
        self.end(labeller, question)
        self._given[labeller][question] = self.clock()
        others = self._leases[labeller]
        self._leases[labeller] = {question: self.clock() + self.seconds, **others}

    def end(self, labeller: str, question: str) -> None:
        """End a lease: the labeller has answered."""
        self._leases[labeller].pop(question, None)

    def _lease(self, labeller: str, question: str) -> None:
        self._leases[labeller][question] = self.clock() + self.seconds

    def _candidates(self, labeller: str) -> Iterator[str]:
        yield from tuple(self._leases[labeller])
        if self._has_only_gold(labeller):
            return
        yield from self._queues[labeller].upcoming(self._open, self._done_by[labeller])

    def _is_free(self, id: str, labeller: str) -> bool:
        if id not in self._open or id in self._done_by[labeller]:
            return False
        now = self.clock()
        own = self._leases[labeller]
        if own.get(id, now) <= now and sum(end > now for end in own.values()) >= MOST_LEASES:
            return False
        others = sum(
            leases.get(id, now) > now for name, leases in self._leases.items() if name != labeller
        )
        question = self.folder.questions[id]
        return others < question.labellers - given(self.folder.answers_to(question))


class _Queue:
    """Questions in a labeller's order, and the position before which none is open.

    sharers: labellers who share all questions but the gold ones, of which each is asked about that
    part. In it are the gold ones.
    """

    def __init__(self, labeller: str, key: bytes | None, sharers: int) -> None:
        self.labeller, self._key, self._sharers = labeller, key, sharers
        self._ranked: list[tuple[bytes, str]] = []
        self._known: set[str] = set()
        self._position = 0

    def add(self, questions: Sequence[str], gold: Collection[str]) -> None:
        """Ask these too, or once more."""
        self._position = 0
        for question in questions:
            if question not in self._known:
                rank = asking_rank(self.labeller, question, self._key)
                if question in gold:
                    part = int.from_bytes(rank) // self._sharers
                    rank = part.to_bytes(len(rank))
                self._ranked.append((rank, question))
        self._known.update(questions)
        self._ranked.sort()

    def upcoming(self, open: set[str], done: set[str]) -> Iterator[str]:
        """Yield the questions that are `open`, without those that the labeller has `done`."""
        is_start = True
        for position in range(self._position, len(self._ranked)):
            question = self._ranked[position][1]
            if question in open and question not in done:
                is_start = False
                yield question
            elif is_start:
                self._position = position + 1
