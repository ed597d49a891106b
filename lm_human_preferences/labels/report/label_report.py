"""Facts of a folder of labels: its questions, labellers and comparisons of policies."""

import collections
import itertools
import math
import statistics
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

from lm_human_preferences.label_types import TIE, Value
from lm_human_preferences.labels.answers import Answer, is_unnamed
from lm_human_preferences.labels.folder import EVERYBODY, GOLD, VALIDATION, LabelFolder
from lm_human_preferences.labels.report import agreement

Policy = tuple[str, str]  # path, and the digest of the weights that were there
QUICK = 1.0  # seconds in which nobody reads a question


def report(folder: LabelFolder, without: Collection[str] = ()) -> dict[str, Any]:
    """Return the facts of `./launch.py labels` as JSON, without some labellers."""
    folder.check_labellers(without)
    names = [name for name in folder.logs if name not in without]
    answers = _answers_by_question(folder, names)
    # Gold questions are easier than others: to agree on them says nothing.
    # Answers of people who are not known may all be of one person.
    not_gold, named = {}, {}
    for question, given in answers.items():
        if folder.questions[question].kind != GOLD:
            not_gold[question] = given
            named[question] = [answer for answer in given if not is_unnamed(answer.labeller)]
    return {
        'label_type': folder.label_type.name,
        'questions': _questions(folder, answers),
        'training_labels': len(folder.counted(without=without)),
        'agreement': _agreement(folder, named),
        'labellers': {name: _labeller(folder, name, named) for name in names},
        'comparisons': comparisons(folder, folder.counted(VALIDATION, without)),
        'disagreements': _disagreements(folder, not_gold),
    }


def _disagreements(
    folder: LabelFolder, answers: dict[str, list[Answer]]
) -> dict[str, dict[str, Value]]:
    """Return {question: {labeller: answer}} of questions on which labellers disagree."""
    found = {}
    for question in folder.questions:
        said = {}
        for answer in answers.get(question, ()):
            if answer.value is not None:
                said[answer.labeller] = answer.value
        values = list(said.values())
        if not all(folder.label_type.matches(value, values[0]) for value in values):
            found[question] = said
    return found


def _answers_by_question(folder: LabelFolder, names: Collection[str]) -> dict[str, list[Answer]]:
    """Return {question: last answer, or skip, of each labeller} of questions that have any."""
    found: dict[str, list[Answer]] = collections.defaultdict(list)
    for name in names:
        for question, given in folder.logs[name].by_question.items():
            found[question].append(given[-1])
    return found


def _questions(folder: LabelFolder, answers: dict[str, list[Answer]]) -> dict[str, int]:
    has_answer = [
        any(answer.value is not None for answer in answers.get(question, ()))
        for question in folder.questions
    ]
    questions = folder.questions.values()
    return {
        'all': len(folder.questions),
        'comparisons': folder.count(VALIDATION),
        'gold': folder.count(GOLD),
        'for_several': sum(1 < question.labellers < EVERYBODY for question in questions),
        'answered': sum(has_answer),
        'retired': sum(each.is_retired(folder.answers_to(each)) for each in questions),
    }


def _agreement(folder: LabelFolder, answers: dict[str, list[Answer]]) -> dict[str, Any]:
    """Return the agreement of named labellers on the same questions; of numbers only alpha."""
    values, several = [], []
    for question, given in answers.items():
        values.append([answer.value for answer in given if answer.value is not None])
        if len(given) > 1:
            several.append(question)
    label_type = folder.label_type
    raw = low = high = chance = None
    if not label_type.is_numeric:
        counts = agreement.value_counts(values)
        raw = _number(agreement.raw_agreement(counts)[0])
        clusters = {**dict.fromkeys(answers), **independent(folder, several)}
        low, high = agreement.agreement_interval(counts, list(clusters.values()))
        # Of two who guess; a tie is one more answer.
        chance = 1 / (len(label_type.samples) + 1) if label_type.ties else label_type.chance
    return {
        'questions': sum(len(of_question) > 1 for of_question in values),
        'pairs': sum(math.comb(len(of_question), 2) for of_question in values),
        'raw': raw,
        'low': low,
        'high': high,
        'chance': chance,
        'alpha': _number(agreement.krippendorff_alpha(values, label_type)),
    }


def _labeller(folder: LabelFolder, name: str, answers: dict[str, list[Answer]]) -> dict[str, Any]:
    log = folder.logs[name]
    last = [given[-1] for given in log.by_question.values()]
    own = [answer for answer in last if answer.value is not None]
    seconds = [answer.seconds for answer in own if not answer.is_imported]
    positions, share, pairs = None, math.nan, 0
    if not folder.label_type.is_numeric:
        positions = _positions(folder, own)
        share, pairs = _agreement_with_others(name, answers)
    return {
        'answers': len(own),
        **_ties(folder, own),
        'skipped': len(last) - len(own),
        'taken_back': len(log.taken_back),
        'median_seconds': statistics.median(seconds) if seconds else None,
        'under_a_second': sum(value < QUICK for value in seconds),
        'positions': positions,
        'positions_p_value': None if positions is None else agreement.uniform_p_value(positions),
        'agreement': _number(share),
        'agreement_pairs': pairs,
        'gold': _gold(folder, own),
    }


def _ties(folder: LabelFolder, answers: Sequence[Answer]) -> dict[str, int]:
    if not folder.label_type.ties:
        return {}
    return {'ties': sum(answer.value == TIE for answer in answers)}


def _positions(folder: LabelFolder, answers: Sequence[Answer]) -> list[int] | None:
    """Return how often each place on the screen was preferred; imported answers have none."""
    places = []
    for answer in answers:
        best = folder.label_type.preferred(answer.value)
        if best is not None and not answer.is_imported:
            places.append(answer.order.index(best))
    if not places:
        return None
    return [places.count(position) for position in range(len(folder.samples))]


def _gold(folder: LabelFolder, answers: Sequence[Answer]) -> dict[str, int] | None:
    """Return the numbers of answers to gold questions, and of right ones; None for ratings."""
    if folder.label_type.chance is None:
        return None
    count = right = 0
    for answer in answers:
        gold = folder.questions[answer.question].gold
        if gold is not None:
            count += 1
            right += folder.label_type.matches(answer.value, gold)
    return {'answers': count, 'right': right}


def _agreement_with_others(name: str, answers: dict[str, list[Answer]]) -> tuple[float, int]:
    """Return (share of others' answers to the same questions that are equal, their number)."""
    equal = pairs = 0
    for given in answers.values():
        values = {answer.labeller: answer.value for answer in given if answer.value is not None}
        if name not in values:
            continue
        own = values.pop(name)
        pairs += len(values)
        equal += sum(value == own for value in values.values())
    return (equal / pairs if pairs else math.nan), pairs


def independent(folder: LabelFolder, questions: Iterable[str]) -> dict[str, Hashable]:
    """Return {question: its query}, or where all have the same query {question: question}."""
    queries: dict[str, Hashable] = {}
    for question in questions:
        queries[question] = tuple(folder.tokens(folder.questions[question])['query'])
    if len(set(queries.values())) > 1:
        return queries
    return {question: question for question in queries}


def comparisons(folder: LabelFolder, answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Return how often the second of each pair of policies was preferred in `answers`."""
    # {(policy, against): answers}
    given: dict[tuple[Policy, Policy], list[Answer]] = collections.defaultdict(list)
    for answer in answers:
        question = folder.questions[answer.question]
        policies = list(zip(question.policies, question.weights, strict=True))
        given[policies[0], policies[-1]].append(answer)
    compared = set(itertools.chain.from_iterable(given))
    clusters = independent(folder, {answer.question for answer in answers})
    return [
        {
            'policy': _name(policy, compared),
            'against': _name(against, compared),
            **_wins(folder, of_pair, clusters),
        }
        for (policy, against), of_pair in given.items()
    ]


def _name(policy: Policy, compared: Collection[Policy]) -> str:
    """Return the path of a policy, with its weights if others were compared under that path."""
    path, weights = policy
    if sum(path == each for each, _ in compared) == 1:
        return path
    return f'{path} (weights {weights[:8] or "unknown"})'


def _wins(
    folder: LabelFolder, answers: Sequence[Answer], clusters: Mapping[str, Hashable]
) -> dict[str, Any]:
    """Return the wins in answers about one pair of policies; rates are None if all are ties."""
    wins: collections.Counter[Hashable] = collections.Counter()
    counts: collections.Counter[Hashable] = collections.Counter()
    questions = set()
    each = len(folder.samples) // 2
    for answer in answers:
        question = folder.questions[answer.question]
        policies = list(zip(question.policies, question.weights, strict=True))
        best = folder.label_type.preferred(answer.value)
        if best is not None:
            questions.add(question.id)
            counts[clusters[question.id]] += 1
            wins[clusters[question.id]] += int(policies[best] == policies[-1])
    n, won = counts.total(), wins.total()
    low, high = agreement.clustered_interval(list(wins.values()), list(counts.values()))
    rate = won / n if n else None
    ties = {'ties': len(answers) - n} if folder.label_type.ties or n < len(answers) else {}
    return {
        'samples': len(folder.samples),
        'n': n,
        'questions': len(questions),
        'wins_of_against': won,
        'win_rate': rate,
        'low': low,
        'high': high,
        'pairwise': None if rate is None else agreement.pairwise_share(rate, each),
        'pairwise_low': agreement.pairwise_share(low, each),
        'pairwise_high': agreement.pairwise_share(high, each),
        **ties,
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
