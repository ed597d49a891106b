"""Choice of the samples to show."""

import contextlib
import math
import random
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeGuard

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError
from lm_human_preferences.report_page.safe_text import Part, changes, plain
from lm_human_preferences.runs import run_files
from lm_human_preferences.utils.terminal import cut_mark

AT_RANDOM, OF_A_KIND = 4, 2  # queries that are shown of each choice
MOST_QUERIES = 64  # that are looked at


class Answer(NamedTuple):
    """Response at a step."""

    step: int
    parts: list[Part]  # of its text
    score: float
    kl: float
    cut: str = ''  # mark for tokens after its end


class Query(NamedTuple):
    """Query with its answers in the order of the steps."""

    text: str
    answers: list[Answer]

    def three(self) -> list[Answer]:
        """Return the answers before, on the way and after, if there are so many."""
        middle = self.answers[len(self.answers) // 2]
        chosen = {each.step: each for each in (self.answers[0], middle, self.answers[-1])}
        return list(chosen.values())


def choices(run: str, name: str) -> dict[str, list[Query]]:
    """Choose the queries of a run to show; its name decides the random choice.

    Keys are random, best, worst, and unlikely under the initial model, as far as there are some.
    """
    records: list[dict[str, Any]] = []
    with contextlib.suppress(UserError, OSError):
        lines = storage.readable_json_lines(storage.join(run, run_files.SAMPLES))
        records = list(filter(_is_sample, lines))
    queries = _queries(records)
    if not queries:
        return {}
    found = {'random': random.Random(name).sample(queries, len(queries))[:AT_RANDOM]}
    scores = {query.answers[-1].score for query in queries}
    if len(queries) <= OF_A_KIND or len(scores) == 1:  # none is better than another
        return found
    by_score = sorted(queries, key=lambda query: query.answers[-1].score)
    # A score in the upper half that the initial model would hardly have come to.
    high = by_score[len(by_score) // 2 :]
    unlikely = sorted(high, key=lambda query: -query.answers[-1].kl)
    return {
        **found,
        'best': by_score[: -OF_A_KIND - 1 : -1],
        'worst': by_score[:OF_A_KIND],
        'unlikely': unlikely[:OF_A_KIND],
    }


def _is_sample(record: object) -> TypeGuard[dict[str, Any]]:
    if not isinstance(record, dict):
        return False
    texts = all(isinstance(record.get(key), str) for key in ('query', 'response'))
    numbers = [record.get(key) for key in ('step', 'score', 'kl')]
    are_numbers = all(isinstance(value, int | float) and math.isfinite(value) for value in numbers)
    return texts and are_numbers


def _queries(records: Iterable[dict[str, Any]]) -> list[Query]:
    """Group records by query, in the order of the file."""
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
        after_end = record.get('tokens_after_end')
        cut = cut_mark(after_end) if type(after_end) is int else ''
        found.append(Answer(int(record['step']), parts, record['score'], record['kl'], cut))
    return found
