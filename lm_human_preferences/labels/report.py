"""What a folder of labels tells about its questions, its labellers and the policies compared."""

from __future__ import annotations

import collections
import math
import statistics
from collections.abc import Collection, Sequence
from typing import Any

from lm_human_preferences.labels.agreement import (
    chi_square,
    krippendorff_alpha,
    raw_agreement,
    value_counts,
    wilson_interval,
)
from lm_human_preferences.labels.answers import Answer
from lm_human_preferences.labels.folder import EVERYBODY, GOLD, VALIDATION, LabelFolder

QUICK = 1.0  # seconds in which nobody reads a question


def report(folder: LabelFolder, without: Collection[str] = ()) -> dict[str, Any]:
    """Everything that `./launch.py labels` shows, as JSON has it: None where there is no number.

    without: labellers whose answers are left out.
    """
    folder.check_labellers(without)
    names = [name for name in folder.logs if name not in without]
    answers = _answers_by_question(folder, names)
    return {
        'label_type': folder.label_type,
        'questions': _questions(folder, answers),
        'training_labels': len(folder.counted(without=without)),
        'agreement': _agreement(folder, answers),
        'labellers': {name: _labeller(folder, name, answers) for name in names},
        'comparisons': _comparisons(folder, without),
    }


def is_choice(folder: LabelFolder) -> bool:
    """Whether the answers are the best of several samples, which can be equal by chance."""
    return folder.label_type.startswith('best_of_')


def _answers_by_question(folder: LabelFolder, names: Collection[str]) -> dict[str, list[Answer]]:
    """{question: the last answer, or skip, of each labeller}, for questions that have any."""
    found: dict[str, list[Answer]] = collections.defaultdict(list)
    for name in names:
        for question in folder.logs[name].by_question:
            answer = folder.logs[name].answer_to(question)
            assert answer is not None  # by_question has no question without
            found[question].append(answer)
    return found


def _questions(folder: LabelFolder, answers: dict[str, list[Answer]]) -> dict[str, int]:
    given = [
        sum(answer.value is not None for answer in answers.get(question, ()))
        for question in folder.questions
    ]
    questions = folder.questions.values()
    return {
        'all': len(folder.questions),
        'comparisons': sum(question.kind == VALIDATION for question in questions),
        'gold': sum(question.kind == GOLD for question in questions),
        'for_several': sum(1 < question.labellers < EVERYBODY for question in questions),
        'answered': sum(count > 0 for count in given),
        'retired': sum(folder.is_retired(question) for question in questions),
    }


def _agreement(folder: LabelFolder, answers: dict[str, list[Answer]]) -> dict[str, Any] | None:
    """How far labellers who answered the same question chose the same sample.

    Gold questions, which are easier than others, are left out.
    """
    if not is_choice(folder):
        return None
    others = {
        question: given
        for question, given in answers.items()
        if folder.questions[question].kind != GOLD
    }
    counts = value_counts(list(_choices(others).values()), len(folder.samples))
    share, pairs = raw_agreement(counts)
    return {
        'questions': int((counts.sum(1) > 1).sum()),
        'pairs': pairs,
        'raw': _number(share),
        'chance': 1 / len(folder.samples),
        'alpha': _number(krippendorff_alpha(counts)),
    }


def _choices(answers: dict[str, list[Answer]]) -> dict[str, list[int]]:
    """{question: the samples that were chosen}, without skips."""
    return {
        question: [int(answer.value) for answer in given if answer.value is not None]
        for question, given in answers.items()
    }


def _labeller(folder: LabelFolder, name: str, answers: dict[str, list[Answer]]) -> dict[str, Any]:
    """What one labeller has done."""
    log = folder.logs[name]
    last = [given[-1] for given in log.by_question.values()]
    own = [answer for answer in last if answer.value is not None]
    seconds = [answer.seconds for answer in own if answer.seconds > 0]  # 0: not known
    positions, p_value = None, None
    if is_choice(folder):
        shown = collections.Counter(answer.shown_position() for answer in own)
        positions = [shown[position] for position in range(len(folder.samples))]
        _, p_value = chi_square(positions)
    share, pairs = _agreement_with_others(name, answers) if is_choice(folder) else (math.nan, 0)
    return {
        'answers': len(own),
        'skipped': len(last) - len(own),
        'taken_back': log.undone,
        'median_seconds': statistics.median(seconds) if seconds else None,
        'under_a_second': sum(value < QUICK for value in seconds),
        'positions': positions,
        'positions_p_value': p_value,
        'agreement': _number(share),
        'agreement_pairs': pairs,
        'gold': _gold(folder, own),
    }


def _gold(folder: LabelFolder, answers: Sequence[Answer]) -> dict[str, int] | None:
    """How many gold questions are among those answered, and how many answers are right.

    A difference is right if its sign is; None for ratings, which need not be the same number.
    """
    if folder.label_type == 'scalar_rating':
        return None
    known = [
        (answer.value, folder.questions[answer.question].gold)
        for answer in answers
        if folder.questions[answer.question].gold is not None
    ]
    if is_choice(folder):
        right = sum(value == gold for value, gold in known)
    else:
        right = sum(_sign(value) == _sign(gold) for value, gold in known)
    return {'answers': len(known), 'right': right}


def _sign(value: float | None) -> int:
    assert value is not None
    return (value > 0) - (value < 0)


def _agreement_with_others(name: str, answers: dict[str, list[Answer]]) -> tuple[float, int]:
    """(share of the others' answers to the same questions that are the labeller's, how many)."""
    equal = pairs = 0
    for given in answers.values():
        values = {answer.labeller: answer.value for answer in given if answer.value is not None}
        if name not in values:
            continue
        own = values.pop(name)
        pairs += len(values)
        equal += sum(value == own for value in values.values())
    return (equal / pairs if pairs else math.nan), pairs


def _comparisons(folder: LabelFolder, without: Collection[str]) -> list[dict[str, Any]]:
    """For each pair of policies that were compared, how often the second one was preferred."""
    wins: dict[tuple[str, str], list[int]] = {}
    for answer in folder.counted(VALIDATION, without):
        policies = folder.questions[answer.question].policies
        pair = policies[0], policies[-1]
        better = preferred(folder, answer, policies)
        if better is not None:
            wins.setdefault(pair, []).append(better == pair[1])
    found = []
    for (first, second), won in wins.items():
        low, high = wilson_interval(sum(won), len(won))
        found.append(
            {
                'policy': first,
                'against': second,
                'n': len(won),
                'wins_of_against': sum(won),
                'win_rate': sum(won) / len(won),
                'low': low,
                'high': high,
            }
        )
    return found


def preferred(folder: LabelFolder, answer: Answer, policies: tuple[str, ...]) -> str | None:
    """The policy whose sample is the better one by an answer; None where they are equal."""
    assert answer.value is not None
    if is_choice(folder):
        return policies[int(answer.value)]
    if answer.value == 0:
        return None
    return policies[1] if answer.value > 0 else policies[0]


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
