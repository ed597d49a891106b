"""Import of labels as texts into a folder of labels."""

import dataclasses
import uuid as uuids
from collections.abc import Callable, Sequence
from typing import Any

from lm_human_preferences.label_types import Value
from lm_human_preferences.labels.answers import (
    Answer,
    AnswerLog,
    clean_remark,
    question_id,
    shown_order,
)
from lm_human_preferences.labels.folder import GOLD, TRAIN, LabelFolder, QuestionWriter
from lm_human_preferences.labels.labeller import Labeller
from lm_human_preferences.labels.texts.records import TextLabel

Questions = Sequence[tuple[TextLabel, dict[str, list[int]]]]  # see tokenise
UUIDS = uuids.UUID('6b1d5d0e-53a5-4c50-9d56-0f6a3c6e9a77')  # of answers brought in: any constant


def add_questions(
    questions: Questions,
    writer: QuestionWriter,
    policies: Sequence[str],
    *,
    kind: str = TRAIN,
    labellers: Callable[[int], int] | None = None,
) -> int:
    """Add new questions, and return their number; gold ones keep their answers."""
    answered: dict[str, set[str | None]] = {}
    for label, tokens in questions:
        answered.setdefault(question_id(tokens), set()).add(label.labeller)
    new, headers = [], []
    seen = set(writer.folder.questions)
    for label, tokens in questions:
        id = question_id(tokens)
        if id in seen:
            continue
        seen.add(id)
        new.append(tokens)
        header: dict[str, Any] = {
            'kind': kind,
            'labellers': labellers(len(headers)) if labellers else len(answered[id]),
            'policies': list(policies),
            'part': 'given',
            'texts_read': 0,
        }
        if kind == GOLD:
            header['gold'] = label.answer
        headers.append(header)
    writer.add(new, headers)
    return len(new)


def add_answers(questions: Questions, folder: LabelFolder, labeller: str) -> dict[str, int]:
    """Record answers to questions of the folder; return how many of each labeller were new."""
    now = folder.time_of_next_answer()
    # {labeller: {question: answers in the order of the file}}
    given: dict[str, dict[str, list[Answer]]] = {}
    for number, (label, tokens) in enumerate(questions):
        name, id = label.labeller or labeller, question_id(tokens)
        to_question = given.setdefault(name, {}).setdefault(id, [])
        count = len(label.samples)
        answer = Answer(
            uuid=_uuid(name, id, len(to_question) + 1, label.answer),
            labeller=name,
            question=id,
            value=label.answer,
            reason=None,
            order=tuple(range(count)) if label.is_ordered else shown_order(name, id, count),
            seconds=round(label.seconds, 3),
            # In the order of the file, of which training takes the first labels.
            time=now + 1e-6 * number,
            remark=clean_remark(label.remark),
        )
        to_question.append(answer)
    added = {}
    for name, by_question in given.items():
        with Labeller(folder, name) as writer:
            # Even those that were taken back since
            imported = [answer for answer in writer.log.uuids.values() if answer.is_imported]
            last = {answer.question: answer for answer in imported}
            new = [
                answer
                for id, answers in by_question.items()
                for answer in _not_imported(answers, last.get(id), writer.log)
            ]
            added[name] = writer.add(sorted(new, key=lambda answer: answer.time))
    return added


def _uuid(labeller: str, question: str, number: int, value: Value | None) -> str:
    """Return an id that is the same whenever this answer of a labeller is imported."""
    return str(uuids.uuid5(UUIDS, f'{labeller}/{question}/{number}/{value}'))


def _not_imported(given: Sequence[Answer], last: Answer | None, log: AnswerLog) -> list[Answer]:
    """Return which of the answers `given` have to be added for the last one to count."""
    new = [answer for answer in given[:-1] if answer.uuid not in log.uuids]
    counts = given[-1]
    if not new and last is not None and last.value == counts.value:
        return []
    number = len(given)
    while counts.uuid in log.uuids:  # from an import before the last one
        number += 1
        uuid = _uuid(counts.labeller, counts.question, number, counts.value)
        counts = dataclasses.replace(counts, uuid=uuid)
    return [*new, counts]
