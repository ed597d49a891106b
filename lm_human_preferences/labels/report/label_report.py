"""Report on a folder of labels: facts for JSON, and tables for the terminal."""

import collections
import itertools
import json
import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from lm_human_preferences.label_types import TIE, Value
from lm_human_preferences.labels import agreement
from lm_human_preferences.labels.answers import Answer, is_unnamed
from lm_human_preferences.labels.folder import GOLD, VALIDATION, LabelFolder

Policy = tuple[str, str]  # (path of a policy, digest of its weights)
Said = dict[str, dict[str, Value]]  # {question: {labeller: answer}}, without skips
Facts = Mapping[str, Any]  # a report on labels, or a part of such a report

NOTHING = '-'  # text of an empty cell in a table
MOST_DISAGREEMENTS = 20  # maximum number of disagreements to show
PARTS = {  # {split of the labels in evaluation.reward_on_labels: its name in the report}
    'held_out': 'held out of its training',
    'trained_on': 'others',
    'comparisons': 'comparisons of policies',
}


def report(folder: LabelFolder, without: Collection[str] = ()) -> dict[str, Any]:
    """Return what `./launch.py labels` reports, as JSON values. without: labellers to leave out."""
    of_named: Said = {}  # answers of named labellers; unnamed answers may all come from one person
    disagreements: Said = {}
    answered = retired = 0
    for question in folder.questions.values():
        answers = folder.answers_to(question, without)
        given = {each.labeller: each.value for each in answers if each.value is not None}
        answered += bool(given)
        retired += question.is_retired(folder.answers_to(question))
        if question.kind == GOLD:  # gold questions are easy, so agreement on them says little
            continue
        named = [name for name in given if not is_unnamed(name)]
        of_named[question.id] = {name: given[name] for name in named}
        first, *others = given.values() or [None]
        if not all(folder.label_type.matches(value, first) for value in others):
            disagreements[question.id] = given
    return {
        'questions': {'all': len(folder.questions), 'answered': answered, 'retired': retired},
        'training_labels': len(folder.counted(without=without)),
        'agreement': _agreement(folder, of_named),
        'labellers': {
            name: _labeller(folder, name, of_named) for name in folder.logs if name not in without
        },
        'comparisons': comparisons(folder, folder.counted(VALIDATION, without)),
        'disagreements': disagreements,
    }


def _agreement(folder: LabelFolder, said: Said) -> dict[str, Any]:
    """Return how often pairs of answers are equal (None for numbers), and Krippendorff's alpha."""
    label_type = folder.label_type
    equal: dict[str, int] = {}  # {id of a question: number of pairs of equal answers}
    pairs: dict[str, int] = {}
    for question, given in said.items():
        if len(given) > 1:
            same = collections.Counter(map(repr, given.values()))
            equal[question] = sum(math.comb(count, 2) for count in same.values())
            pairs[question] = math.comb(len(given), 2)
    total = sum(pairs.values())
    answers = [list(said[question].values()) for question in pairs]
    alpha = agreement.krippendorff_alpha(answers, label_type)
    raw = low = high = chance = None
    if not label_type.is_numeric and total:
        raw = sum(equal.values()) / total
        low, high = _interval(folder, equal, pairs)
        # Chance that two guessing labellers agree; a tie is one more possible answer.
        chance = 1 / (len(label_type.samples) + 1) if label_type.ties else label_type.chance
    found = {'raw': raw, 'low': low, 'high': high, 'chance': chance}
    known = alpha if math.isfinite(alpha) else None
    return {'questions': len(pairs), 'pairs': total, 'alpha': known, **found}


def _interval(
    folder: LabelFolder, successes: Mapping[str, int], counts: Mapping[str, int]
) -> tuple[float, float]:
    """Return the 95 % interval of a fraction. successes, counts: {question: number}.

    Questions are clustered by query, unless all have the same query.
    """
    clusters: dict[str, Any] = {}
    for question in counts:
        clusters[question] = tuple(folder.questions[question].ids['query'])
    if len(set(clusters.values())) == 1:
        clusters = {question: question for question in counts}
    wins, answers = collections.Counter(), collections.Counter()
    for question, cluster in clusters.items():
        wins[cluster] += successes[question]
        answers[cluster] += counts[question]
    return agreement.clustered_interval(list(wins.values()), list(answers.values()))


def _labeller(folder: LabelFolder, name: str, said: Said) -> dict[str, Any]:
    """Return a labeller's row of the table: {heading: value or None}."""
    label_type, last = folder.label_type, [*folder.logs[name].last.values()]
    kind = 'people'
    if any(answer.is_simulated for answer in last):
        kind = 'simulated'
    elif last and all(answer.is_imported for answer in last):
        kind = 'imported'
    own = [answer for answer in last if answer.value is not None]
    of_people = [answer for answer in own if not (answer.is_imported or answer.is_simulated)]
    seconds = [answer.seconds for answer in of_people]
    positions, gold, equal = [0] * len(folder.samples), [], []
    for answer in own:
        best, right = label_type.preferred(answer.value), folder.questions[answer.question].gold
        if best is not None and not answer.is_imported:
            positions[answer.order.index(best)] += 1  # where the preferred sample was shown
        if right is not None:
            gold.append(label_type.matches(answer.value, right))
    for given in said.values():
        if name in given and not label_type.is_numeric:
            others = [value for other, value in given.items() if other != name]
            equal += [value == given[name] for value in others]
    p_value = agreement.uniform_p_value(positions)
    return {
        'kind': kind,
        'answers': len(own),
        'ties': sum(answer.value == TIE for answer in own) or None,
        'all bad': sum(answer.is_bad for answer in own) or None,  # an answer 'all bad' is a tie
        'skipped': len(last) - len(own),
        'median s': round(statistics.median(seconds), 1) if seconds else None,
        'agreement': f'{sum(equal)} of {len(equal)}' if equal else None,
        'gold': f'{sum(gold)} of {len(gold)}' if gold else None,
        'positions': ' '.join(map(str, positions)) if any(positions) else None,
        'p': None if p_value is None else round(p_value, 3),
    }


def comparisons(folder: LabelFolder, answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Return how often the second of each pair of policies was preferred in `answers`.

    A policy's name is its path, with a digest of its weights if several policies had this path.
    """
    given: dict[tuple[Policy, Policy], list[Answer]] = collections.defaultdict(list)
    for answer in answers:
        question = folder.questions[answer.question]
        policies = list(zip(question.policies, question.weights, strict=True))
        given[policies[0], policies[-1]].append(answer)
    paths = collections.Counter(path for path, _ in set(itertools.chain(*given)))
    found = []
    for pair, of_pair in given.items():
        names = []
        for path, weights in pair:
            digest = f' (weights {weights[:8] or "unknown"})'
            names.append(path if paths[path] == 1 else path + digest)
        wins: collections.Counter[str] = collections.Counter()
        counts: collections.Counter[str] = collections.Counter()
        for answer in of_pair:
            question = folder.questions[answer.question]
            best = folder.label_type.preferred(answer.value)
            if best is not None:
                wins[question.id] += (question.policies[best], question.weights[best]) == pair[1]
                counts[question.id] += 1
        low, high = _interval(folder, wins, counts)
        numbers = {'n': counts.total(), 'wins_of_against': wins.total(), 'low': low, 'high': high}
        ties = len(of_pair) - counts.total()
        found.append({'policy': names[0], 'against': names[1], **numbers, 'ties': ties})
    return found


def lines(folder: str, found: Facts) -> Iterator[str]:
    """Yield the lines of a report on a folder, and on a reward model's predictions, if any."""
    counts = '{all} questions, {answered} answered, {retired} retired (skipped by two labellers)'
    yield f'{folder}: {counts.format(**found["questions"])}'
    yield f'labels to train on: {found["training_labels"]}'
    if found['labellers']:
        yield ''
        yield from aligned(labellers(found['labellers']))
    yield ''
    yield from aligned(_measured(found))
    if found['disagreements']:
        yield ''
        yield f'{len(found["disagreements"])} disagreements, of which --output FILE has all:'
        for question, answers in list(found['disagreements'].items())[-MOST_DISAGREEMENTS:]:
            given = ', '.join(f'{name} {json.dumps(value)}' for name, value in answers.items())
            yield f'  {question[:8]}: {given}'
    if 'reward' in found:
        reward = found['reward']
        yield ''
        yield f'{reward["run"]} predicts these labels:'
        for part, name in PARTS.items():
            yield f'  {name}: {reward[part]["in_words"] if reward[part] else "no labels"}'


def _measured(found: Facts) -> list[list[str]]:
    """Return one table, with rows for the labellers' agreement and each comparison of policies."""
    agreed = found['agreement']
    where = f'agreement, {agreed["pairs"]} pairs of answers to {agreed["questions"]} questions'
    result = alpha = interval = chance = NOTHING
    if agreed['raw'] is not None:
        result, chance = (f'{100 * agreed[name]:.1f} %' for name in ('raw', 'chance'))
        interval = agreement.in_words(agreed['low'], agreed['high'])
    if agreed['alpha'] is not None:
        alpha = f'{agreed["alpha"]:.3f}'
    rows = [['measured', 'result', 'interval', 'by chance'], [where, result, interval, chance]]
    rows.append(["Krippendorff's alpha", alpha, '', ''])
    for each in found['comparisons']:
        names = f'{each["against"]} preferred to {each["policy"]}, {each["ties"]} ties left out'
        interval = agreement.in_words(each['low'], each['high'])
        rows.append([names, f'{each["wins_of_against"]} of {each["n"]}', interval, '50.0 %'])
    return rows


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each row, with the first column aligned left, and the others right."""
    columns = []
    for number, column in enumerate(zip(*rows, strict=True)):
        width = max(map(len, column))
        align = str.rjust if number else str.ljust
        columns.append([align(cell, width) for cell in column])
    return ['  '.join(row).rstrip() for row in zip(*columns, strict=True)]


def labellers(found: Mapping[str, Facts]) -> list[list[str]]:
    """Return the table of labellers, headings first, without columns that are all empty."""
    rows = [{'labeller': name, **found[name]} for name in sorted(found)]
    heads = [head for head in rows[0] if any(row[head] is not None for row in rows)]
    cells = [[NOTHING if row[head] is None else str(row[head]) for head in heads] for row in rows]
    return [heads, *cells]
