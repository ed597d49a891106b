"""Labels as texts, brought into a folder of labels."""

from __future__ import annotations

import collections
import time
import uuid as uuids
from collections.abc import Callable, Sequence
from typing import Any

from lm_human_preferences.labels.answers import Answer, question_id, shown_order
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
    """Add those questions that are not in the folder yet; returns how many they are.

    policies: which one each sample is of. labellers(number): how many people are to answer the
    question that is added as that number; None: as many as have answered it. Of gold questions the
    answers are kept with them.
    """
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
    """Record the answers to `questions`, which are in the folder.

    Returns how many of each labeller were added. labeller: who gave those that name nobody. An
    answer that was imported before is not added again; one that has changed since then is, and
    counts from then on.
    """
    now = time.time()
    answers: dict[str, list[Answer]] = {}
    given: collections.Counter[tuple[str, str]] = collections.Counter()
    for number, (label, tokens) in enumerate(questions):
        name, id = label.labeller or labeller, question_id(tokens)
        given[name, id] += 1
        count = len(label.samples)
        answer = Answer(
            uuid=str(uuids.uuid5(UUIDS, f'{name}/{id}/{given[name, id]}/{label.answer}')),
            labeller=name,
            question=id,
            value=label.answer,
            reason=None,
            order=tuple(range(count)) if label.is_ordered else shown_order(name, id, count),
            seconds=round(label.seconds, 3),
            # In the order of the file, of which training takes the first labels.
            time=now + 1e-6 * number,
        )
        answers.setdefault(name, []).append(answer)
    added = {}
    for name, of_labeller in answers.items():
        with Labeller(folder, name) as writer:
            added[name] = writer.add(of_labeller)
    return added
