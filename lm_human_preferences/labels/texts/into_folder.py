"""Import of text labels into a folder of labels."""

import contextlib
import dataclasses
import operator
import uuid as uuids
from collections.abc import Callable, Sequence
from typing import Any

from lm_human_preferences.errors import UserError
from lm_human_preferences.label_types import LabelType
from lm_human_preferences.labels.answers import GIVEN_ID, UNNAMED, Answer, question_id
from lm_human_preferences.labels.folder import GOLD, TRAIN, LabelFolder, QuestionWriter
from lm_human_preferences.labels.labeller import Labeller
from lm_human_preferences.labels.texts.records import TextLabel, Tokens


def as_asked(labels: Sequence[TextLabel], folder: LabelFolder) -> list[TextLabel]:
    """Return `labels`, each with its samples in the order of the question's first occurrence.

    UserError for an answer that is not on the folder's scale.
    """
    label_type = folder.label_type
    asked: dict[tuple[Any, ...], Tokens] = {}
    for question in folder.questions.values():
        tokens = question.tokens()
        asked.setdefault(_in_any_order(tokens), tokens)
    found = []
    for label in labels:
        if label_type.scale is not None and label.answer is not None:
            low, high = label_type.scale
            if not low <= label.answer <= high:
                raise UserError(
                    f'{label.where}, field {label_type.field!r}: {label.answer} is not on the scale'
                    f' of {folder.path}, {low} to {high}: use another folder, or convert the answer'
                )
        first = asked.setdefault(_in_any_order(label.tokens), label.tokens)
        found.append(_moved(label, first, label_type))
    return found


def _in_any_order(tokens: Tokens) -> tuple[Any, ...]:
    """Return a key of a question that does not depend on the order of its samples."""
    query, *samples = map(tuple, tokens.values())
    return query, *sorted(samples)


def _moved(label: TextLabel, asked: Tokens, label_type: LabelType) -> TextLabel:
    """Return a label with samples in the order of `asked`, and the answer renumbered to match."""
    answer = label.answer
    if answer is not None:
        _, *left = asked.values()
        places = []
        for name in label_type.samples:
            places.append(left.index(label.tokens[name]))
            left[places[-1]] = []  # two samples with the same tokens get different indices
        answer = label_type.moved(answer, places)
    return dataclasses.replace(label, answer=answer, tokens=asked)


def add_questions(
    labels: Sequence[TextLabel],
    writer: QuestionWriter,
    source: str,
    *,
    kind: str = TRAIN,
    labellers: Callable[[int], int] | None = None,
) -> int:
    """Add the new questions, with the answers of gold questions; return how many were added.

    source: recorded as the policy of each sample. labellers: function from the index of a new
    question to the number of people who should answer it; default: as many as have answered it.
    """
    new: dict[str, list[TextLabel]] = {}
    for label in labels:
        id = question_id(label.tokens)
        if id not in writer.folder.questions:
            new.setdefault(id, []).append(label)
    headers = []
    for number, of_question in enumerate(new.values()):
        first = of_question[0]
        people = len({label.labeller for label in of_question})
        header: dict[str, Any] = {
            'kind': kind,
            'labellers': labellers(number) if labellers else people,
            'policies': [source] * len(first.samples),
            'part': 'given',
            'texts_read': 0,
        }
        if kind == GOLD:
            header['gold'] = first.answer
        if first.id is not None:
            header[GIVEN_ID] = first.id
        headers.append(header)
    writer.add([of_question[0].tokens for of_question in new.values()], headers)
    return len(new)


def add_labels(labels: Sequence[TextLabel], writer: QuestionWriter, labeller: str) -> list[str]:
    """Add labels to a folder, as questions and answers; return lines that say what was added.

    labeller: name for answers that name nobody. UserError if one of the labellers is at work; then
    nothing is added.
    """
    folder = writer.folder
    labels = as_asked(labels, folder)
    given, repeated = _answers(labels, folder, labeller)
    with contextlib.ExitStack() as stack:
        writers = {}
        # Open existing labellers' files first: if one is in use, no new labeller's file is made.
        for name in sorted(given, key=lambda name: name not in folder.logs):
            writers[name] = stack.enter_context(Labeller(folder, name))
        added = add_questions(labels, writer, UNNAMED)
        lines = [f'{folder.path}: {added} questions added, {len(folder.questions)} in all']
        for name, by_question in given.items():
            lines += _add_answers(writers[name], by_question)
    ids = {question_id(label.tokens) for label in labels}
    if gold := sum(folder.questions[id].kind == GOLD for id in ids):
        lines.append(
            f'{gold} questions are gold: answers to them check labellers, and train nothing'
        )
    if repeated:
        lines.append(
            f'{repeated} rows without a name are the same as an earlier one, and were left out: a'
            ' "labeller" or an "id" in each row says that they are answers of several people'
        )
    return lines


def _answers(
    labels: Sequence[TextLabel], folder: LabelFolder, labeller: str
) -> tuple[dict[str, dict[str, Answer]], int]:
    """Return {labeller: {id of a question: last answer}}, and the number of repeated rows.

    Unnamed answers to one question count as those of different people; repeated rows count once.
    """
    unnamed: dict[str, list[tuple[Any, ...]]] = {}  # {question: [(answer, is_bad, id of label)]}
    repeated = 0
    now = folder.time_of_next_answer()
    given: dict[str, dict[str, Answer]] = {}
    for number, label in enumerate(labels):
        name, id = label.labeller or labeller, question_id(label.tokens)
        if name == UNNAMED:
            row = (repr(label.answer), label.is_bad, label.id)
            rows = unnamed.setdefault(id, [])
            if row in rows:
                repeated += 1
                continue
            rows.append(row)
            if len(rows) > 1:
                name = f'{UNNAMED}-{len(rows)}'
        answer = Answer(
            uuid=str(uuids.uuid4()),
            labeller=name,
            question=id,
            value=label.answer,
            order=tuple(range(len(label.samples))),  # the order that the labeller saw is unknown
            seconds=0.0,
            # A training takes the oldest labels first, so times increase in the order of the rows.
            time=now + 1e-6 * number,
            is_bad=label.is_bad,
            is_imported=True,
            given_id=label.id,
        )
        given.setdefault(name, {})[id] = answer
    return given, repeated


def _add_answers(labeller: Labeller, given: dict[str, Answer]) -> list[str]:
    """Add a labeller's new or changed answers from `given`; return lines that say what was done."""
    new, left_out = [], 0
    for question, answer in given.items():
        before = labeller.log.last.get(question)
        if before is None or before.value is None:  # a skip does not count as an answer
            new.append(answer)
        elif not before.is_imported:
            left_out += 1  # an answer given in this program may be newer than the imported one
        elif (before.value, before.is_bad) != (answer.value, answer.is_bad):
            new.append(answer)
    labeller.add(sorted(new, key=operator.attrgetter('age')))
    lines = [f'{len(new)} answers of {labeller.name} added']
    if left_out:
        lines.append(f'{left_out} answers of {labeller.name} were left out: those given here count')
    return lines
