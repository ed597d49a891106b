"""Import of labels as texts into a folder of labels."""

import collections
import contextlib
import dataclasses
import itertools
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
from lm_human_preferences.labels.texts.records import TextLabel

Tokens = dict[str, list[int]]
Questions = Sequence[tuple[TextLabel, Tokens]]  # see tokenise
AT_WORK = 'nothing was imported; import again when they have left'


def as_asked(questions: Questions, folder: LabelFolder) -> list[tuple[TextLabel, Tokens]]:
    """Return questions and answers with the samples in the order in which they were first asked.

    A preference that was not asked before is shuffled: its file has the chosen response first.
    """
    asked: dict[tuple[Any, ...], Tokens] = {}
    for question in folder.questions.values():
        tokens = folder.tokens(question)
        asked.setdefault(_in_any_order(tokens), tokens)
    found = []
    for label, tokens in questions:
        _, new = shuffled(label, tokens, folder.label_type)
        first = asked.setdefault(_in_any_order(tokens), new)
        found.append((_moved(label, tokens, first, folder.label_type), first))
    return found


def shuffled(label: TextLabel, tokens: Tokens, label_type: LabelType) -> tuple[TextLabel, Tokens]:
    """Return a label and its question, with the samples in random order if they were in none.

    The tokens decide, so that a preference that is read again is the same question.
    """
    if label.is_ordered:
        return label, tokens
    query, *samples = tokens.values()
    random.Random(question_id(tokens)).shuffle(samples)
    moved = dict(zip(tokens, [query, *samples], strict=True))
    return _moved(label, tokens, moved, label_type), moved


def _in_any_order(tokens: Tokens) -> tuple[Any, ...]:
    """Return what query and samples have in common with those in another order."""
    query, *samples = map(tuple, tokens.values())
    return query, *sorted(samples)


def _moved(label: TextLabel, tokens: Tokens, asked: Tokens, label_type: LabelType) -> TextLabel:
    """Return the label of `tokens` for the same question as it was `asked`."""
    if tokens == asked or label.answer is None:
        return label
    moves = sorted(zip(_by_sample(tokens), _by_sample(asked), strict=True))
    places = [place for _, place in moves]
    return dataclasses.replace(label, answer=label_type.moved(label.answer, places))


def _by_sample(tokens: Tokens) -> list[int]:
    """Return the numbers of the samples, sorted by their tokens."""
    _, *samples = tokens.values()
    return sorted(range(len(samples)), key=samples.__getitem__)


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
    golds: dict[str, tuple[Value, str]] = {}  # with where they are
    for question in writer.folder.questions.values():
        if question.kind == GOLD:
            golds[question.id] = question.gold, f'a gold question of {writer.folder.path}'
    for label, tokens in questions:
        id = question_id(tokens)
        if kind == GOLD:
            gold, where = golds.setdefault(id, (label.answer, label.where))
            if not writer.folder.label_type.matches(label.answer, gold):
                raise UserError(f'{label.where} contradicts {where}: the answers must be equal')
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
        if label.id is not None:
            header[GIVEN_ID] = label.id
        headers.append(header)
    writer.add(new, headers)
    return len(new)


def add_labels(
    questions: Questions, writer: QuestionWriter, policies: Sequence[str], labeller: str
) -> list[str]:
    """Add questions and the answers to them, and return lines that say what was done.

    Those without a name are of `labeller`. UserError, and nothing is added, if one is at work.
    """
    folder = writer.folder
    questions, repeated = _each_once(as_asked(questions, folder), labeller)
    questions, notes = _without_known(questions, folder, labeller)
    given = _answers(questions, folder, labeller)
    with contextlib.ExitStack() as stack:
        writers = {}
        # Who has no file yet cannot be at work, and gets one only if nobody is.
        for name in sorted(given, key=lambda name: name not in folder.logs):
            writers[name] = stack.enter_context(Labeller(folder, name, at_work=AT_WORK))
        added = add_questions(questions, writer, policies)
        lines = [f'{folder.path}: {added} questions added, {len(folder.questions)} in all']
        for name, by_question in given.items():
            new, more_notes = _new_answers(name, by_question, writers[name].log)
            writers[name].add(new)
            lines.append(f'{len(new)} answers of {name} added')
            notes += more_notes
    if repeated:
        notes.append(
            f'{repeated} rows without a name are the same as an earlier one, and were left out: a'
            ' "labeller" or an "id" in each row says that they are answers of several people'
        )
    return [*lines, *notes]


def _each_once(questions: Questions, labeller: str) -> tuple[Questions, int]:
    """Return labels without repeated ones, and how many these were. labeller: see add_labels.

    An unnamed label repeats an earlier one if question, answer and id are the same.
    """
    found: dict[Any, tuple[TextLabel, Tokens]] = {}
    for number, (label, tokens) in enumerate(questions):
        row = question_id(tokens), repr(label.answer), label.id
        has_name = (label.labeller or labeller) != UNNAMED
        found.setdefault(number if has_name else row, (label, tokens))
    return list(found.values()), len(questions) - len(found)


def _without_known(
    questions: Questions, folder: LabelFolder, labeller: str
) -> tuple[Questions, list[str]]:
    """Leave out answers without a name if people of the folder have given them all; say so.

    Also say how many they have given, where that is not all.
    """
    of_people: collections.Counter[tuple[str, str]] = collections.Counter()
    of_unknown = of_people.copy()
    for name, log in folder.logs.items():
        answers, there = list(itertools.chain(*log.by_question.values())), of_people
        if is_unnamed(name):  # whose earlier answers may be imported again
            answers, there = [given[-1] for given in log.by_question.values()], of_unknown
        there.update((answer.question, repr(answer.value)) for answer in answers)
    named: list[tuple[TextLabel, Tokens]] = []
    unnamed: collections.Counter[tuple[str, str]] = collections.Counter()
    for label, tokens in questions:
        if (label.labeller or labeller) == UNNAMED:
            unnamed[question_id(tokens), repr(label.answer)] += 1
        else:
            named.append((label, tokens))
    if not unnamed or not unnamed <= of_people + of_unknown:
        repeated = (unnamed & of_people).total()
        if not repeated:
            return questions, []
        return questions, [
            f'{repeated} of {unnamed.total()} answers without a name are those of people of the'
            ' folder, and count as those of others who agree: if they are its own export, leave'
            ' them out of the file'
        ]
    left_out = f'{unnamed.total()} answers without a name were left out: all of them are there'
    return named, [f'{left_out} (--labeller NAME adds them as those of NAME)']


def _answers(
    questions: Questions, folder: LabelFolder, labeller: str
) -> dict[str, dict[str, list[Answer]]]:
    """Return {labeller: {question: answers in the order of the file}}."""
    votes: collections.Counter[str] = collections.Counter()
    now = folder.time_of_next_answer()
    given: dict[str, dict[str, list[Answer]]] = {}
    for number, (label, tokens) in enumerate(questions):
        name, id = label.labeller or labeller, question_id(tokens)
        if name == UNNAMED:  # another one for each answer to a question
            votes[id] += 1
            if votes[id] > 1:
                name = f'{UNNAMED}-{votes[id]}'
        answer = Answer(
            uuid=str(uuids.uuid4()),
            labeller=name,
            question=id,
            value=label.answer,
            reason=None,
            order=tuple(range(len(label.samples))),  # on no screen of ours
            seconds=0.0,
            # In the order of the file, of which training takes the first labels.
            time=now + 1e-6 * number,
            is_imported=True,
            given_id=label.id,
        )
        given.setdefault(name, {}).setdefault(id, []).append(answer)
    return given


def _new_answers(
    name: str, by_question: dict[str, list[Answer]], log: AnswerLog
) -> tuple[list[Answer], list[str]]:
    """Return which last answers of a labeller are to be added, and notes on others."""
    new, left_out, changed = [], 0, 0
    for id, answers in by_question.items():
        before = log.answer_to(id)
        known = [] if before is None or before.value is None else [before]  # a skip is no answer
        if known and not known[0].is_imported:
            left_out += len(answers)  # it may be later than those, which do not say when
            continue
        *_, last = answers
        if not known or known[0].value != last.value:
            new.append(last)
            changed += any(answer.value != last.value for answer in (*known, *answers))
    notes = []
    if left_out:
        notes.append(f'{left_out} answers of {name} were left out: those given here count')
    if changed:
        note = f'{name} has changed the answer to {changed} questions: the last one counts'
        if is_unnamed(name):
            note += '; if that was somebody else, give --labeller NAME'
        notes.append(note)
    return sorted(new, key=lambda answer: answer.time), notes
