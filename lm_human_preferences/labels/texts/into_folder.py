"""Import of labels as texts into a folder of labels."""

import contextlib
import dataclasses
import random
import uuid as uuids
from collections.abc import Callable, Sequence
from typing import Any

from lm_human_preferences.errors import UserError
from lm_human_preferences.label_types import LabelType, Value
from lm_human_preferences.labels.answers import (
    GIVEN_ID,
    UNNAMED,
    Answer,
    AnswerLog,
    is_unnamed,
    question_id,
)
from lm_human_preferences.labels.folder import GOLD, TRAIN, LabelFolder, QuestionWriter
from lm_human_preferences.labels.labeller import Labeller
from lm_human_preferences.labels.texts.records import TextLabel, Tokens

AT_WORK = 'nothing was imported; import again when they have left'


def as_asked(labels: Sequence[TextLabel], folder: LabelFolder) -> list[TextLabel]:
    """Return labels with the samples in the order in which each question was first asked.

    A preference that was not asked before is shuffled: its file has the chosen response first.
    UserError for an answer that is not on the folder's scale.
    """
    _check_scale(labels, folder)
    asked: dict[tuple[Any, ...], Tokens] = {}
    for question in folder.questions.values():
        tokens = folder.tokens(question)
        asked.setdefault(_in_any_order(tokens), tokens)
    found = []
    for label in labels:
        label = shuffled(label, folder.label_type)
        first = asked.setdefault(_in_any_order(label.tokens), label.tokens)
        found.append(_moved(label, first, folder.label_type))
    return found


def _check_scale(labels: Sequence[TextLabel], folder: LabelFolder) -> None:
    if folder.label_type.scale is None:
        return
    low, high = folder.label_type.scale
    for label in labels:
        if label.answer is not None and not low <= label.answer <= high:
            raise UserError(
                f'{label.where}, field {folder.label_type.field!r}: {label.answer} is not on the'
                f' scale of {folder.path}, {low} to {high}: use another folder, or convert it'
            )


def shuffled(label: TextLabel, label_type: LabelType) -> TextLabel:
    """Return a label with its samples in random order if they were in none.

    The tokens decide, so that a preference that is read again is the same question.
    """
    if label.is_ordered:
        return label
    query, *samples = label.tokens.values()
    random.Random(question_id(label.tokens)).shuffle(samples)
    return _moved(label, dict(zip(label.tokens, [query, *samples], strict=True)), label_type)


def _in_any_order(tokens: Tokens) -> tuple[Any, ...]:
    """Return a key that is the same for a question in every order of its samples."""
    query, *samples = map(tuple, tokens.values())
    return query, *sorted(samples)


def _moved(label: TextLabel, asked: Tokens, label_type: LabelType) -> TextLabel:
    """Return a label with its samples in the order of `asked`, which is the same question."""
    answer = label.answer
    if answer is not None:
        moves = sorted(zip(_by_sample(label.tokens), _by_sample(asked), strict=True))
        answer = label_type.moved(answer, [place for _, place in moves])
    return dataclasses.replace(label, answer=answer, tokens=asked, is_ordered=True)


def _by_sample(tokens: Tokens) -> list[int]:
    """Return the indices of the samples in the order of their tokens."""
    _, *samples = tokens.values()
    return sorted(range(len(samples)), key=samples.__getitem__)


def add_questions(
    labels: Sequence[TextLabel],
    writer: QuestionWriter,
    policies: Sequence[str],
    *,
    kind: str = TRAIN,
    labellers: Callable[[int], int] | None = None,
) -> int:
    """Add new questions, and return their number; gold questions keep their answers.

    labellers: function of the index of a new question that returns how many people are to answer
    it; by default, as many as have answered it.
    """
    folder = writer.folder
    golds: dict[str, tuple[Value, str]] = {}  # answer and place, by question
    for question in folder.questions.values():
        if question.kind == GOLD:
            golds[question.id] = question.gold, f'a gold question of {folder.path}'
    new: dict[str, TextLabel] = {}
    people: dict[str, set[str | None]] = {}
    for label in labels:
        id = question_id(label.tokens)
        if kind == GOLD:
            gold, where = golds.setdefault(id, (label.answer, label.where))
            if not folder.label_type.matches(label.answer, gold):
                raise UserError(f'{label.where} contradicts {where}: the answers must be equal')
        if id not in folder.questions:
            new.setdefault(id, label)
            people.setdefault(id, set()).add(label.labeller)
    headers = []
    for number, (id, label) in enumerate(new.items()):
        header: dict[str, Any] = {
            'kind': kind,
            'labellers': labellers(number) if labellers else len(people[id]),
            'policies': list(policies),
            'part': 'given',
            'texts_read': 0,
        }
        if kind == GOLD:
            header['gold'] = label.answer
        if label.id is not None:
            header[GIVEN_ID] = label.id
        headers.append(header)
    writer.add([label.tokens for label in new.values()], headers)
    return len(new)


def add_labels(
    labels: Sequence[TextLabel], writer: QuestionWriter, policies: Sequence[str], labeller: str
) -> list[str]:
    """Add questions and the answers to them, and return lines that say what was done.

    labeller: name for answers without one. UserError if one of the labellers is at work; then
    nothing is added.
    """
    folder = writer.folder
    labels = as_asked(labels, folder)
    given, notes = _answers(labels, folder, labeller)
    with contextlib.ExitStack() as stack:
        writers = {}
        # New labellers come last, so that they get no file if somebody is at work.
        for name in sorted(given, key=lambda name: name not in folder.logs):
            writers[name] = stack.enter_context(Labeller(folder, name, at_work=AT_WORK))
        added = add_questions(labels, writer, policies)
        lines = [f'{folder.path}: {added} questions added, {len(folder.questions)} in all']
        for name, by_question in given.items():
            new, more_notes = _new_answers(name, by_question, writers[name].log)
            writers[name].add(new)
            lines.append(f'{len(new)} answers of {name} added')
            notes += more_notes
    return [*lines, *notes]


def _answers(
    labels: Sequence[TextLabel], folder: LabelFolder, labeller: str
) -> tuple[dict[str, dict[str, list[Answer]]], list[str]]:
    """Return {labeller: {question: answers in the order of the file}}, and notes.

    Answers without a name to one question are those of different people; repeated rows count once.
    """
    unnamed: dict[str, list[tuple[str, int | str | None]]] = {}  # (answer, id) of each, by question
    repeated = 0
    now = folder.time_of_next_answer()
    given: dict[str, dict[str, list[Answer]]] = {}
    for number, label in enumerate(labels):
        name, id = label.labeller or labeller, question_id(label.tokens)
        if name == UNNAMED:
            row, rows = (repr(label.answer), label.id), unnamed.setdefault(id, [])
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
            reason=None,
            order=tuple(range(len(label.samples))),  # it was not shown here
            seconds=0.0,
            # In the order of the file, of which training takes the first labels.
            time=now + 1e-6 * number,
            is_bad=label.is_bad,
            is_imported=True,
            given_id=label.id,
        )
        given.setdefault(name, {}).setdefault(id, []).append(answer)
    if not repeated:
        return given, []
    return given, [
        f'{repeated} rows without a name are the same as an earlier one, and were left out: a'
        ' "labeller" or an "id" in each row says that they are answers of several people'
    ]


def _new_answers(
    name: str, by_question: dict[str, list[Answer]], log: AnswerLog
) -> tuple[list[Answer], list[str]]:
    """Return the last answers of a labeller that are to be added, and notes on the others."""
    new, left_out, changed = [], 0, 0
    for id, answers in by_question.items():
        before = log.answer_to(id)
        last = answers[-1]
        if before is None or before.value is None:  # a skip is no answer
            new.append(last)
            changed += any(answer.value != last.value for answer in answers)
        elif not before.is_imported:
            left_out += len(answers)  # the answer given here may be the later one
        elif before.value != last.value:
            new.append(last)
            changed += 1
    notes = []
    if left_out:
        notes.append(f'{left_out} answers of {name} were left out: those given here count')
    if changed:
        note = f'{name} has changed the answer to {changed} questions: the last one counts'
        if is_unnamed(name):
            note += '; if that was somebody else, give --labeller NAME'
        notes.append(note)
    return sorted(new, key=lambda answer: answer.time), notes
