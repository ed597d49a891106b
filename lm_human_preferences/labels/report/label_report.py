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
Said = dict[str, dict[str, Value]]  # {question: {labeller: answer}}, without skips
QUICK = 1.0  # seconds in which nobody reads a question


def report(folder: LabelFolder, without: Collection[str] = ()) -> dict[str, Any]:
    """Return the facts of `./launch.py labels` as JSON, without some labellers."""
    folder.check_labellers(without)
    said: Said = {}
    # Answers of people who are not known may all be of one person.
    of_named: Said = {}
    for question in folder.questions.values():
        # Gold questions are easier than others: to agree on them says nothing.
        if question.kind != GOLD:
            answers = folder.answers_to(question, without)
            given = {each.labeller: each.value for each in answers if each.value is not None}
            said[question.id] = given
            of_named[question.id] = {
                name: value for name, value in given.items() if not is_unnamed(name)
            }
    names = [name for name in folder.logs if name not in without]
    return {
        'label_type': folder.label_type.name,
        'questions': _questions(folder, without),
        'training_labels': len(folder.counted(without=without)),
        'agreement': _agreement(folder, of_named),
        'labellers': {name: _labeller(folder, name, of_named) for name in names},
        'comparisons': comparisons(folder, folder.counted(VALIDATION, without)),
        'disagreements': _disagreements(folder, said),
    }


def _disagreements(folder: LabelFolder, said: Said) -> Said:
    """Return the answers to questions on which labellers disagree."""
    found = {}
    for question, given in said.items():
        values = list(given.values())
        if not all(folder.label_type.matches(value, values[0]) for value in values):
            found[question] = given
    return found


def _questions(folder: LabelFolder, without: Collection[str]) -> dict[str, int]:
    answered = retired = for_several = 0
    for question in folder.questions.values():
        answers = folder.answers_to(question, without)
        answered += any(answer.value is not None for answer in answers)
        retired += question.is_retired(folder.answers_to(question))
        for_several += 1 < question.labellers < EVERYBODY
    return {
        'all': len(folder.questions),
        'comparisons': folder.count(VALIDATION),
        'gold': folder.count(GOLD),
        'for_several': for_several,
        'answered': answered,
        'retired': retired,
    }


def _agreement(folder: LabelFolder, said: Said) -> dict[str, Any]:
    """Return the agreement of labellers on the same questions; of numbers only alpha."""
    label_type = folder.label_type
    counts = {}  # {question: (pairs of equal answers, pairs)}
    values = []
    for question, given in said.items():
        if len(given) > 1:
            same = collections.Counter(map(repr, given.values()))
            equal = sum(math.comb(count, 2) for count in same.values())
            counts[question] = equal, math.comb(len(given), 2)
            values.append(list(given.values()))
    pairs = sum(pairs for _, pairs in counts.values())
    raw = low = high = chance = None
    if not label_type.is_numeric:
        raw = sum(equal for equal, _ in counts.values()) / pairs if pairs else None
        low, high = _interval(folder, counts)
        # Of two who guess; a tie is one more answer.
        chance = 1 / (len(label_type.samples) + 1) if label_type.ties else label_type.chance
    alpha = agreement.krippendorff_alpha(values, label_type)
    return {
        'questions': len(counts),
        'pairs': pairs,
        'raw': raw,
        'low': low,
        'high': high,
        'chance': chance,
        'alpha': alpha if math.isfinite(alpha) else None,
    }


def _interval(folder: LabelFolder, counts: Mapping[str, tuple[int, int]]) -> tuple[float, float]:
    """Return the 95 % interval of a fraction; {question: (successes, all)}, clustered by query."""
    queries = independent(folder, counts)
    found: dict[Hashable, tuple[int, int]] = {}
    for question, (successes, count) in counts.items():
        before = found.get(queries[question], (0, 0))
        found[queries[question]] = before[0] + successes, before[1] + count
    successes_of, count_of = [each for each, _ in found.values()], [n for _, n in found.values()]
    return agreement.clustered_interval(successes_of, count_of)


def independent(folder: LabelFolder, questions: Iterable[str]) -> dict[str, Hashable]:
    """Return {question: its query}, or where all have the same query {question: question}."""
    queries: dict[str, Hashable] = {}
    for question in questions:
        queries[question] = tuple(folder.tokens(folder.questions[question])['query'])
    if len(set(queries.values())) > 1:
        return queries
    return {question: question for question in queries}


def _labeller(folder: LabelFolder, name: str, said: Said) -> dict[str, Any]:
    label_type, log = folder.label_type, folder.logs[name]
    last = log.last_answers()
    own = [answer for answer in last if answer.value is not None]
    seconds = [answer.seconds for answer in own if not answer.is_imported]
    positions, equal = None, []
    if not label_type.is_numeric:
        positions = _positions(folder, own)
        for given in said.values():
            others = [value for other, value in given.items() if other != name]
            equal += [value == given[name] for value in others] if name in given else []
    return {
        'answers': len(own),
        'ties': sum(answer.value == TIE for answer in own) if label_type.ties else None,
        'all_bad': sum(answer.is_bad for answer in own),  # of the ties
        'skipped': len(last) - len(own),
        'taken_back': len(log.taken_back),
        'median_seconds': statistics.median(seconds) if seconds else None,
        'under_a_second': sum(value < QUICK for value in seconds),
        'positions': positions,
        'positions_p_value': agreement.uniform_p_value(positions or []),
        'agreement': statistics.mean(equal) if equal else None,
        'agreement_pairs': len(equal),
        'gold': _gold(folder, own),
    }


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
    right = []
    for answer in answers:
        gold = folder.questions[answer.question].gold
        if gold is not None:
            right.append(folder.label_type.matches(answer.value, gold))
    return {'answers': len(right), 'right': sum(right)}


def comparisons(folder: LabelFolder, answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Return how often the second of each pair of policies was preferred in `answers`."""
    given: dict[tuple[Policy, Policy], list[Answer]] = collections.defaultdict(list)
    for answer in answers:
        question = folder.questions[answer.question]
        policies = list(zip(question.policies, question.weights, strict=True))
        given[policies[0], policies[-1]].append(answer)
    compared = set(itertools.chain.from_iterable(given))
    found = []
    for (policy, against), of_pair in given.items():
        names = {'policy': _name(policy, compared), 'against': _name(against, compared)}
        found.append({**names, **_wins(folder, of_pair, against)})
    return found


def _name(policy: Policy, compared: Collection[Policy]) -> str:
    """Return the path of a policy, with its weights if others were compared under that path."""
    path, weights = policy
    if sum(path == each for each, _ in compared) == 1:
        return path
    return f'{path} (weights {weights[:8] or "unknown"})'


def _wins(folder: LabelFolder, answers: Sequence[Answer], against: Policy) -> dict[str, Any]:
    """Return how often `against` was preferred; the rate is None if all answers are ties."""
    counts: dict[str, tuple[int, int]] = {}  # {question: (wins, answers)}
    for answer in answers:
        question = folder.questions[answer.question]
        best = folder.label_type.preferred(answer.value)
        if best is not None:
            is_won = (question.policies[best], question.weights[best]) == against
            wins, count = counts.get(question.id, (0, 0))
            counts[question.id] = wins + is_won, count + 1
    won, n = sum(wins for wins, _ in counts.values()), sum(count for _, count in counts.values())
    low, high = _interval(folder, counts)
    return {
        'n': n,
        'questions': len(counts),
        'wins_of_against': won,
        'win_rate': won / n if n else None,
        'low': low,
        'high': high,
        'ties': len(answers) - n,
    }
