"""Facts of a report on labels in words and tables, for the terminal and the page of a run."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from lm_human_preferences.labels.report.agreement import correlation_words, in_words

Facts = Mapping[str, Any]  # a part of label_report.report
NOTHING = '-'
MOST_DISAGREEMENTS = 20  # that are shown


def lines(folder: str, found: Facts) -> Iterator[str]:
    """Yield a whole report, and what a reward model adds to it, as lines for the terminal."""
    counts = '{all} questions, {answered} answered, {retired} retired'.format(**found['questions'])
    yield f'{folder}: {counts}; {found["training_labels"]} labels to train on'
    if found['questions']['retired']:
        yield 'retired: skipped by two labellers, so not asked any more'
    if found['agreement']['pairs']:
        yield agreement(found['agreement'])
        yield alpha(found['agreement'])
    else:
        nobody = 'no question has answers of two labellers with names; see --repeated of ask.'
        yield f'Agreement: {nobody}'
    if found['labellers']:
        yield ''
        yield from aligned(labeller_table(sorted(found['labellers'].items())))
    if found['disagreements']:
        yield from _disagreements(found['disagreements'])
    for each in found['comparisons']:
        yield ''
        yield comparison(each)
        if each['ties']:
            more = 'more ' if each['n'] else ''
            yield f'  {each["ties"]} {more}answers prefer neither, and are left out'
    if 'reward' in found:
        yield from _reward(found['reward'])


def agreement(found: Facts) -> str:
    """Return how often labellers agree."""
    where = f'{found["pairs"]} pairs of answers to {found["questions"]} questions'
    if found['raw'] is None:
        return f'Labellers rated the same question in {where}.'
    interval = in_words(found['low'], found['high'])
    return f'Labellers agreed in {100 * found["raw"]:.1f} % of {where} ({interval}).'


def alpha(found: Facts) -> str:
    """Return the agreement by chance, and beyond it."""
    value = 'undefined, because all these answers are the same'
    if found['alpha'] is not None:
        value = f'{found["alpha"]:.3f}'
    chance = '' if found['raw'] is None else f'Chance is {100 * found["chance"]:.1f} %; '
    return f"{chance}Krippendorff's alpha is {value}."


def comparison(found: Facts) -> str:
    """Return which of two policies was preferred."""
    policy, against = found['policy'], found['against']
    if found['win_rate'] is None:
        return f'{against} and {policy}: no answer prefers one to the other.'
    count = f'{found["wins_of_against"]} of {found["n"]} answers to {found["questions"]} questions'
    rate = f'{100 * found["win_rate"]:.1f} % ({in_words(found["low"], found["high"])})'
    return f'{against} was preferred to {policy} in {count}: {rate}.'


def _disagreements(found: Mapping[str, Facts]) -> Iterator[str]:
    last = 'the last 20 of ' if len(found) > MOST_DISAGREEMENTS else ''
    yield ''
    yield f'{last}{len(found)} disagreements (--output FILE has all):'
    for question, answers in list(found.items())[-MOST_DISAGREEMENTS:]:
        given = ', '.join(f'{name} {json.dumps(value)}' for name, value in answers.items())
        yield f'  {question[:8]}: {given}'


def _reward(found: Facts) -> Iterator[str]:
    others = 'others' if found['held_out_share'] else 'labels to train on'
    names = {
        'held_out': 'held out of its training',
        'trained_on': others,
        'comparisons': 'comparisons of policies',
    }
    yield ''
    yield f'{found["run"]} predicts these labels:'
    for key, name in names.items():
        if found[key]:
            yield f'  {name}: {_prediction(found[key])}'
    if not any(found[key] for key in names):
        yield '  there is nothing to predict: no label prefers one of the responses'


def _prediction(found: Facts) -> str:
    """Return how well a reward predicts labels; what it may have learned has no interval."""
    count, accuracy = found['labels'], found['accuracy']
    if found['is_undefined']:
        return f'no correlation with {count}: rewards or labels are all the same'
    if accuracy is None:
        measured = f'correlation {found["agreement"]:.3f} with {count}'
    else:
        measured = f'{round(accuracy * count, 1):g} of {count}, {100 * accuracy:.1f} %'
    if found['learned']:
        return f'{measured}, which it may have learned'
    if accuracy is None:
        return f'{measured} ({correlation_words(found["low"], found["high"])})'
    chance = f'chance is {100 * found["chance"]:.1f} %'
    return f'{measured} ({in_words(found["low"], found["high"])}); {chance}'


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each row, its first cell on the left and others on the right."""
    columns = []
    for number, column in enumerate(zip(*rows, strict=True)):
        width = max(map(len, column))
        align = str.rjust if number else str.ljust
        columns.append([align(cell, width) for cell in column])
    return ['  '.join(row).rstrip() for row in zip(*columns, strict=True)]


def labeller_table(labellers: Iterable[tuple[str, Facts]]) -> list[list[str]]:
    """Return a table of labellers, (name, facts) each, its headings first."""
    rows = [{'labeller': name, **_cells(found)} for name, found in labellers]
    heads = list(rows[0]) if rows else []
    for optional in ('ties', 'all bad'):
        if all(row[optional] == NOTHING for row in rows):
            heads = [head for head in heads if head != optional]
    return [heads, *([row[head] for head in heads] for row in rows)]


def _cells(found: Facts) -> dict[str, str]:
    median, share, p = found['median_seconds'], found['agreement'], found['positions_p_value']
    gold, positions = found['gold'], found['positions']
    return {
        'answers': str(found['answers']),
        'ties': NOTHING if found['ties'] is None else str(found['ties']),
        'all bad': str(found['all_bad'] or NOTHING),
        'skipped': str(found['skipped']),
        'taken back': str(found['taken_back']),
        'median s': NOTHING if median is None else f'{median:.1f}',
        'under 1 s': str(found['under_a_second']),
        'agreement': NOTHING if share is None else f'{share:.3f} of {found["agreement_pairs"]}',
        'gold': f'{gold["right"]} of {gold["answers"]}' if gold and gold['answers'] else NOTHING,
        'positions': ' '.join(map(str, positions or [])) or NOTHING,
        'p': NOTHING if p is None else f'{p:.3f}',
    }
