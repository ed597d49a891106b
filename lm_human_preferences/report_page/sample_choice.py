"""Which of the samples that were taken on the way are shown, and how."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeGuard

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError
from lm_human_preferences.report_page.safe_text import Part, changes, plain
from lm_human_preferences.runs import run_files

AT_RANDOM, OF_A_KIND = 4, 2  # queries that are shown of each choice
MOST_QUERIES = 64  # that are looked at


class Answer(NamedTuple):
    """What the policy wrote at a step. parts: of the response."""

    step: int
    parts: list[Part]
    score: float
    kl: float


class Query(NamedTuple):
    """A query and the answers to it, in the order of the steps."""

    text: str
    answers: list[Answer]

    @property
    def last(self) -> Answer:
        """What the policy writes at the end."""
        return self.answers[-1]

    def three(self) -> list[Answer]:
        """The answers before, on the way and after; fewer where there are no more."""
        middle = self.answers[len(self.answers) // 2]
        chosen = {each.step: each for each in (self.answers[0], middle, self.answers[-1])}
        return list(chosen.values())


class Choice(NamedTuple):
    """Some queries, and why these."""

    title: str
    why: str
    queries: list[Query]


def choices(run: str, name: str) -> list[Choice]:
    """The queries of a run that are shown; none where it has kept no samples.

    name: of the run, which decides the random choice, so that nobody chose it.
    """
    queries = _queries(_records(run))
    if not queries:
        return []
    shuffled = random.Random(name).sample(queries, len(queries))
    found = [
        Choice(
            'A random choice',
            'By chance alone, so these say most about the policy.',
            shuffled[:AT_RANDOM],
        )
    ]
    if len(queries) <= OF_A_KIND:
        return found
    by_score = sorted(queries, key=lambda query: query.last.score)
    # A score in the upper half that the initial model would hardly have come to.
    high = by_score[len(by_score) // 2 :]
    unlikely = sorted(high, key=lambda query: -query.last.kl)
    return [
        *found,
        Choice('The best', 'The highest scores at the end.', by_score[: -OF_A_KIND - 1 : -1]),
        Choice('The worst', 'The lowest scores at the end.', by_score[:OF_A_KIND]),
        Choice(
            'High scores, unlikely under the initial model',
            'Of the better half, the responses with the highest KL. Where a policy has found out'
            ' what its reward is wrong about, it shows here: do they deserve their scores?',
            unlikely[:OF_A_KIND],
        ),
    ]


def _records(run: str) -> list[dict[str, Any]]:
    """The lines of samples.jsonl that can be read."""
    with contextlib.suppress(UserError, OSError):
        lines = storage.readable_json_lines(storage.join(run, run_files.SAMPLES))
        return list(filter(_is_sample, lines))
    return []


def _is_sample(record: object) -> TypeGuard[dict[str, Any]]:
    if not isinstance(record, dict):
        return False
    texts = all(isinstance(record.get(key), str) for key in ('query', 'response'))
    numbers = [record.get(key) for key in ('step', 'score', 'kl')]
    are_numbers = all(isinstance(value, int | float) and math.isfinite(value) for value in numbers)
    return texts and are_numbers


def _queries(records: Iterable[dict[str, Any]]) -> list[Query]:
    """One for each different query, in the order of the file."""
    by_query: dict[str, dict[int, dict[str, Any]]] = {}
    for record in records:
        if record['query'] in by_query or len(by_query) < MOST_QUERIES:
            by_query.setdefault(record['query'], {})[int(record['step'])] = record
    return [
        Query(plain(text), _answers([given[step] for step in sorted(given)]))
        for text, given in by_query.items()
    ]


def _answers(records: Sequence[dict[str, Any]]) -> list[Answer]:
    first = records[0]['response']
    found = []
    for place, record in enumerate(records):
        parts = [Part(plain(first), is_new=False)]
        if place:
            parts = list(changes(first, record['response']))
        found.append(Answer(int(record['step']), parts, record['score'], record['kl']))
    return found
