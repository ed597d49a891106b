"""Facts about a folder of labels: its questions, labellers and comparisons of policies."""

import collections
import itertools
import math
import statistics
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

from lm_human_preferences.label_types import TIE, Value
from lm_human_preferences.labels.answers import Answer, is_unnamed
from lm_human_preferences.labels.folder import GOLD, VALIDATION, LabelFolder
from lm_human_preferences.labels.report import agreement

Policy = tuple[str, str]  # (path, digest of the weights)
Said = dict[str, dict[str, Value]]  # {question: {labeller: answer}}, without skips


def report(folder: LabelFolder, without: Collection[str] = ()) -> dict[str, Any]:
    """Return the report of `./launch.py labels` for JSON. without: labellers to leave out."""
    of_named: Said = {}  # only named labellers: one person may have given all unnamed answers
    disagreements: Said = {}
    answered = retired = 0
    for question in folder.questions.values():
        answers = folder.answers_to(question, without)
        given = {each.labeller: each.value for each in answers if each.value is not None}
        answered += bool(given)
        retired += question.is_retired(folder.answers_to(question))
        if question.kind == GOLD:  # so easy that agreement says nothing
            continue
        named = [name for name in given if not is_unnamed(name)]
        of_named[question.id] = {name: given[name] for name in named}
        first, *others = given.values() or [None]
        if not all(folder.label_type.matches(value, first) for value in others):
            disagreements[question.id] = given
    names = [name for name in folder.logs if name not in without]
    return {
        'label_type': folder.label_type.name,
        'questions': {'all': len(folder.questions), 'answered': answered, 'retired': retired},
        'training_labels': len(folder.counted(without=without)),
        'agreement': _agreement(folder, of_named),
        'labellers': {name: _labeller(folder, name, of_named) for name in names},
        'comparisons': comparisons(folder, folder.counted(VALIDATION, without)),
        'disagreements': disagreements,
    }


def _agreement(folder: LabelFolder, said: Said) -> dict[str, Any]:
    """Return how often labellers agree about the same question; for ratings, only alpha."""
    label_type = folder.label_type
    equal: dict[str, int] = {}  # {id of a question: number of pairs of equal answers}
    pairs: dict[str, int] = {}
    for question, given in said.items():
        if len(given) > 1:
            same = collections.Counter(map(repr, given.values()))
            equal[question] = sum(math.comb(count, 2) for count in same.values())
            pairs[question] = math.comb(len(given), 2)
    total = sum(pairs.values())
    raw = low = high = chance = None
    if not label_type.is_numeric:
        raw = sum(equal.values()) / total if total else None
        low, high = _interval(folder, equal, pairs)
        # Agreement of two labellers who guess, with one more answer if ties are allowed.
        chance = 1 / (len(label_type.samples) + 1) if label_type.ties else label_type.chance
    values = [list(said[question].values()) for question in pairs]
    alpha = agreement.krippendorff_alpha(values, label_type)
    return {
        'questions': len(pairs),
        'pairs': total,
        'raw': raw,
        'low': low,
        'high': high,
        'chance': chance,
        'alpha': alpha if math.isfinite(alpha) else None,
    }


def _interval(
    folder: LabelFolder, successes: Mapping[str, int], counts: Mapping[str, int]
) -> tuple[float, float]:
    """Return the 95 % interval of a fraction. successes, counts: {question: number}.

    Questions are clustered by query, unless all have the same query.
    """
    queries: dict[str, Hashable] = {}
    for question in counts:
        queries[question] = tuple(folder.questions[question].ids['query'])
    is_one = len(set(queries.values())) == 1
    successes_of: collections.Counter[Hashable] = collections.Counter()
    counts_of: collections.Counter[Hashable] = collections.Counter()
    for question, query in queries.items():
        cluster = question if is_one else query
        successes_of[cluster] += successes[question]
        counts_of[cluster] += counts[question]
    return agreement.clustered_interval(list(successes_of.values()), list(counts_of.values()))


def _labeller(folder: LabelFolder, name: str, said: Said) -> dict[str, Any]:
    label_type, last = folder.label_type, [*folder.logs[name].last.values()]
    kind = 'people'
    if any(answer.is_simulated for answer in last):
        kind = 'simulated'
    elif last and all(answer.is_imported for answer in last):
        kind = 'imported'
    own = [answer for answer in last if answer.value is not None]
    of_people = [answer for answer in own if not (answer.is_imported or answer.is_simulated)]
    seconds = [answer.seconds for answer in of_people]
    positions, equal = None, []
    if not label_type.is_numeric:
        positions = _positions(folder, own)
        for given in said.values():
            others = [value for other, value in given.items() if other != name]
            equal += [value == given[name] for value in others] if name in given else []
    return {
        'kind': kind,
        'answers': len(own),
        'ties': sum(answer.value == TIE for answer in own) if label_type.ties else None,
        'all_bad': sum(answer.is_bad for answer in own),  # also counted as ties
        'skipped': len(last) - len(own),
        'median_seconds': statistics.median(seconds) if seconds else None,
        'positions': positions,
        'positions_p_value': agreement.uniform_p_value(positions or []),
        'agreement': statistics.mean(equal) if equal else None,
        'agreement_pairs': len(equal),
        'gold': _gold(folder, own),
    }


def _positions(folder: LabelFolder, answers: Sequence[Answer]) -> list[int] | None:
    """Count the answers, not imported, that prefer each place on the screen; None for none."""
    places = [0] * len(folder.samples)
    for answer in answers:
        best = folder.label_type.preferred(answer.value)
        if best is not None and not answer.is_imported:
            places[answer.order.index(best)] += 1
    return places if any(places) else None


def _gold(folder: LabelFolder, answers: Sequence[Answer]) -> dict[str, int] | None:
    """Count the answers to gold questions, and the right answers; None for ratings."""
    if folder.label_type.chance is None:
        return None
    found = {'answers': 0, 'right': 0}
    for answer in answers:
        gold = folder.questions[answer.question].gold
        if gold is not None:
            found['answers'] += 1
            found['right'] += folder.label_type.matches(answer.value, gold)
    return found


def comparisons(folder: LabelFolder, answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Return how often the second of each pair of policies was preferred in `answers`."""
    given: dict[tuple[Policy, Policy], list[Answer]] = collections.defaultdict(list)
    for answer in answers:
        question = folder.questions[answer.question]
        policies = list(zip(question.policies, question.weights, strict=True))
        given[policies[0], policies[-1]].append(answer)
    compared = set(itertools.chain(*given))
    found = []
    for (policy, against), of_pair in given.items():
        names = {'policy': _name(policy, compared), 'against': _name(against, compared)}
        found.append({**names, **_wins(folder, of_pair, against)})
    return found


def _name(policy: Policy, compared: Collection[Policy]) -> str:
    """Return a policy's path, with a digest of its weights if several policies had this path."""
    path, weights = policy
    if sum(path == each for each, _ in compared) == 1:
        return path
    return f'{path} (weights {weights[:8] or "unknown"})'


def _wins(folder: LabelFolder, answers: Sequence[Answer], against: Policy) -> dict[str, Any]:
    """Return how often `against` was preferred; the rate is None if all answers are ties."""
    wins: collections.Counter[str] = collections.Counter()
    counts: collections.Counter[str] = collections.Counter()
    for answer in answers:
        question = folder.questions[answer.question]
        best = folder.label_type.preferred(answer.value)
        if best is not None:
            wins[question.id] += (question.policies[best], question.weights[best]) == against
            counts[question.id] += 1
    won, n = wins.total(), counts.total()
    low, high = _interval(folder, wins, counts)
    return {
        'n': n,
        'questions': len(counts),
        'wins_of_against': won,
        'win_rate': won / n if n else None,
        'low': low,
        'high': high,
        'ties': len(answers) - n,
    }
