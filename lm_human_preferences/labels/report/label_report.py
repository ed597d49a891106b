"""What a folder of labels tells about its questions, its labellers and the policies compared."""

from __future__ import annotations

import collections
import math
import statistics
from collections.abc import Collection, Sequence
from typing import Any

from lm_human_preferences.label_types import TIE, LabelType
from lm_human_preferences.labels.answers import Answer
from lm_human_preferences.labels.folder import EVERYBODY, GOLD, VALIDATION, LabelFolder
from lm_human_preferences.labels.report.agreement import (
    agreement_interval,
    clustered_interval,
    interval_alpha,
    krippendorff_alpha,
    pairwise_share,
    raw_agreement,
    uniform_p_value,
    value_counts,
)

QUICK = 1.0  # seconds in which nobody reads a question


def report(folder: LabelFolder, without: Collection[str] = ()) -> dict[str, Any]:
    """Everything that `./launch.py labels` shows, as JSON has it: None where there is no number.

    without: labellers whose answers are left out.
    """
    folder.check_labellers(without)
    names = [name for name in folder.logs if name not in without]
    answers = _answers_by_question(folder, names)
    # Gold questions are easier than others: to agree on them tells nothing.
    not_gold = {
        question: given
        for question, given in answers.items()
        if folder.questions[question].kind != GOLD
    }
    return {
        'label_type': folder.label_type.name,
        'questions': _questions(folder, answers),
        'training_labels': len(folder.counted(without=without)),
        'agreement': _agreement(folder, not_gold),
        'labellers': {name: _labeller(folder, name, not_gold) for name in names},
        'comparisons': _comparisons(folder, without),
        **_review(folder, names),
        **_remarks(folder, names),
    }


def _review(folder: LabelFolder, names: Collection[str]) -> dict[str, Any]:
    """On how many questions labellers disagree, and on how many who decided; if anybody did."""
    deciding = [name for name in names if folder.logs[name].decisions]
    if not deciding:
        return {}
    disputed = sum(map(folder.is_disputed, folder.questions.values()))
    decided = {name: len(folder.logs[name].decisions) for name in deciding}
    return {'review': {'disputed': disputed, 'decided': decided}}


def _remarks(folder: LabelFolder, names: Collection[str]) -> dict[str, Any]:
    """The remarks to answers and decisions, the oldest first, if there are any."""
    with_remark: list[Answer] = []
    for name in names:
        log = folder.logs[name]
        for given in (*log.by_question.values(), *log.decisions.values()):
            if given[-1].remark is not None:
                with_remark.append(given[-1])
    if not with_remark:
        return {}
    with_remark.sort(key=lambda answer: answer.time)
    remarks = [
        {
            'labeller': answer.labeller,
            'question': answer.question,
            'said': f'skipped: {answer.reason}' if answer.value is None else answer.value,
            'remark': answer.remark,
        }
        for answer in with_remark
    ]
    return {'remarks': remarks}


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


def _agreement(folder: LabelFolder, answers: dict[str, list[Answer]]) -> dict[str, Any]:
    """How far labellers who answered the same question agree.

    raw, chance: how often they gave the same answer, with the ends of its interval, low and high;
    None for numbers, which need not be equal to agree.
    """
    values = [
        [answer.value for answer in given if answer.value is not None] for given in answers.values()
    ]
    found: dict[str, Any] = {
        'questions': sum(len(of_question) > 1 for of_question in values),
        'pairs': sum(math.comb(len(of_question), 2) for of_question in values),
        'raw': None,
        'low': None,
        'high': None,
        'chance': None,
    }
    if folder.label_type.is_numeric:
        return {**found, 'alpha': _number(interval_alpha(values))}
    counts = value_counts(values)
    low, high = agreement_interval(counts)
    return {
        **found,
        'raw': _number(raw_agreement(counts)[0]),
        'low': low,
        'high': high,
        'chance': _chance(folder.label_type),
        'alpha': _number(krippendorff_alpha(counts)),
    }


def _chance(label_type: LabelType) -> float | None:
    """How often somebody who guesses gives the same answer as another: a tie is one more answer."""
    if not label_type.ties:
        return label_type.chance
    return 1 / (len(label_type.samples) + 1)


def _labeller(folder: LabelFolder, name: str, answers: dict[str, list[Answer]]) -> dict[str, Any]:
    """What one labeller has done. answers: those that agreement is about."""
    log = folder.logs[name]
    last = [given[-1] for given in log.by_question.values()]
    own = [answer for answer in last if answer.value is not None]
    seconds = [answer.seconds for answer in own if answer.is_timed]
    positions, share, pairs = None, math.nan, 0
    if not folder.label_type.is_numeric:
        positions = _positions(folder, own)
        share, pairs = _agreement_with_others(name, answers)
    return {
        'answers': len(own),
        **_ties(folder, own),
        'skipped': len(last) - len(own),
        'taken_back': log.undone,
        'median_seconds': statistics.median(seconds) if seconds else None,
        'under_a_second': sum(value < QUICK for value in seconds),
        'positions': positions,
        'positions_p_value': None if positions is None else uniform_p_value(positions),
        'agreement': _number(share),
        'agreement_pairs': pairs,
        'gold': _gold(folder, own),
    }


def _ties(folder: LabelFolder, answers: Sequence[Answer]) -> dict[str, int]:
    """How many answers are ties, for a folder that allows them; else nothing."""
    if not folder.label_type.ties:
        return {}
    return {'ties': sum(answer.value == TIE for answer in answers)}


def _positions(folder: LabelFolder, answers: Sequence[Answer]) -> list[int] | None:
    """How often the sample at each place on the screen was liked best.

    None where there is nothing to tell: imported answers were given on no screen of ours.
    """
    places = []
    for answer in answers:
        best = folder.label_type.preferred(answer.value)
        if best is not None and not answer.is_imported:
            places.append(answer.order.index(best))
    if not places:
        return None
    return [places.count(position) for position in range(len(folder.samples))]


def _gold(folder: LabelFolder, answers: Sequence[Answer]) -> dict[str, int] | None:
    """How many gold questions are among those answered, and how many answers are right.

    None where no answer is right: ratings need not be the same number.
    """
    if folder.label_type.chance is None:
        return None
    known = [
        (answer.value, folder.questions[answer.question].gold)
        for answer in answers
        if folder.questions[answer.question].gold is not None
    ]
    right = sum(folder.label_type.matches(value, gold) for value, gold in known)
    return {'answers': len(known), 'right': right}


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
    # {(policy, against): {question: for each answer, whether it prefers `against`}}
    given: dict[tuple[str, str], dict[str, list[bool]]] = {}
    not_preferring: dict[tuple[str, str], list[Answer]] = collections.defaultdict(list)
    for answer in folder.counted(VALIDATION, without):
        policies = folder.questions[answer.question].policies
        pair = policies[0], policies[-1]
        better = preferred(folder, answer, policies)
        if better is None:
            not_preferring[pair].append(answer)
        else:
            by_question = given.setdefault(pair, {})
            by_question.setdefault(answer.question, []).append(better == pair[1])
    return [
        {
            'policy': policy,
            'against': against,
            **_wins(folder, list(by_question.values())),
            **_ties(folder, not_preferring[policy, against]),
        }
        for (policy, against), by_question in given.items()
    ]


def _wins(folder: LabelFolder, answers: Sequence[Sequence[bool]]) -> dict[str, Any]:
    """How often the second of two policies was preferred; answers: those to each question.

    pairwise: the estimate of how often one sample of it is preferred to one of the other policy,
    see agreement.pairwise_share, with the ends of its interval.
    """
    wins = [sum(of_question) for of_question in answers]
    counts = [len(of_question) for of_question in answers]
    rate = sum(wins) / sum(counts)
    low, high = clustered_interval(wins, counts)
    each = len(folder.samples) // 2
    return {
        'samples': len(folder.samples),
        'n': sum(counts),
        'questions': len(counts),
        'wins_of_against': sum(wins),
        'win_rate': rate,
        'low': low,
        'high': high,
        'pairwise': pairwise_share(rate, each),
        'pairwise_low': pairwise_share(low, each),
        'pairwise_high': pairwise_share(high, each),
    }


def preferred(folder: LabelFolder, answer: Answer, policies: tuple[str, ...]) -> str | None:
    """The policy whose sample is the best one by an answer; None where it likes none best."""
    best = folder.label_type.preferred(answer.value)
    return None if best is None else policies[best]


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
