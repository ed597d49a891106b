"""Answers as labels to learn from, and what they tell about the policy."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Collection, Iterable

from lm_human_preferences.labels.answers import Answer
from lm_human_preferences.labels.folder import TRAIN, VALIDATION, LabelFolder
from lm_human_preferences.labels.report.agreement import clustered_interval
from lm_human_preferences.labels.report.label_report import preferred

INITIAL, POLICY = 'initial', 'policy'  # whose samples a question has
ACTIVE_SECONDS = 600  # after an answer, in which its labeller counts as active


def answered(folder: LabelFolder) -> int:
    """How many training questions have a label: what l(n) is compared with."""
    return sum(
        question.kind == TRAIN and any(a.value is not None for a in folder.answers_to(question))
        for question in folder.questions.values()
    )


def retired(folder: LabelFolder) -> int:
    """How many training questions nobody will be asked any more, though they have no label."""
    return sum(
        question.kind == TRAIN
        and folder.is_retired(question)
        and all(answer.value is None for answer in folder.answers_to(question))
        for question in folder.questions.values()
    )


def active_labellers(folder: LabelFolder) -> list[str]:
    """Who has answered in the last ten minutes."""
    since = time.time() - ACTIVE_SECONDS
    names = []
    for name, log in folder.logs.items():
        last = log.last()
        if last is not None and last.time > since:
            names.append(name)
    return names


def collected(folder: LabelFolder) -> list[Answer]:
    """The answers to learn from, see LabelFolder.answers_that_count.

    They are in the order of the questions, so that it does not matter who answered when.
    """
    found: list[Answer] = []
    for question in folder.questions.values():
        if question.kind in (TRAIN, VALIDATION):
            found += folder.answers_that_count(question)
    return found


def digest(answers: Iterable[Answer]) -> str:
    """SHA-256 of who answered what."""
    said = [(answer.question, answer.labeller, answer.value) for answer in answers]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def newer(folder: LabelFolder, answers: Iterable[Answer], lines: dict[str, int]) -> list[Answer]:
    """Those of `answers` that are not in the first `lines` of their files."""
    return [
        answer
        for answer in answers
        if folder.logs[answer.labeller].line_of[answer.uuid] > lines.get(answer.labeller, 0)
    ]


def of_kind(folder: LabelFolder, answers: Iterable[Answer], kind: str) -> list[Answer]:
    """Those of `answers` whose questions are of a kind."""
    return [answer for answer in answers if folder.questions[answer.question].kind == kind]


@dataclasses.dataclass(frozen=True)
class Wins:
    """How often the policy was preferred to the initial model in `comparisons`.

    low, high: ends of the 95 % interval of the share; see agreement.clustered_interval.
    """

    wins: int
    comparisons: int
    low: float = 0.0
    high: float = 1.0

    @property
    def rate(self) -> float | None:
        """The share, None where nothing was compared."""
        return self.wins / self.comparisons if self.comparisons else None


def policy_wins(folder: LabelFolder, answers: Collection[Answer]) -> Wins:
    """What those of `answers` tell that compare the policy with the initial model."""
    by_question: dict[str, list[bool]] = {}
    for answer in of_kind(folder, answers, VALIDATION):
        better = preferred(folder, answer, folder.questions[answer.question].policies)
        if better is not None:
            by_question.setdefault(answer.question, []).append(better == POLICY)
    wins = [sum(of_question) for of_question in by_question.values()]
    counts = [len(of_question) for of_question in by_question.values()]
    return Wins(sum(wins), sum(counts), *clustered_interval(wins, counts))
