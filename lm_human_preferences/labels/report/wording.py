"""Wording of the report on labels, in lines for the terminal."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lm_human_preferences.labels.report.agreement import in_words

Facts = Mapping[str, Any]  # report that label_report.report returns, or an entry of it
NOTHING = '-'  # in an empty cell of the table
MOST_DISAGREEMENTS = 20  # most disagreements that are shown
PARTS = {  # {split of the labels in evaluation.reward_on_labels: its name here}
    'held_out': 'held out of its training',
    'trained_on': 'others',
    'comparisons': 'comparisons of policies',
}


def lines(folder: str, found: Facts) -> Iterator[str]:
    """Yield the lines of a report on a folder, and on a reward model's predictions, if any."""
    counts = '{all} questions, {answered} answered, {retired} retired'.format(**found['questions'])
    yield f'{folder}: {counts}; {found["training_labels"]} labels to train on'
    if found['questions']['retired']:
        yield 'retired: skipped by two labellers, so not asked any more'
    yield from _agreement(found['agreement'])
    if found['labellers']:
        yield ''
        yield from aligned(labellers(found['labellers']))
    if found['disagreements']:
        yield ''
        yield from _disagreements(found['disagreements'])
    for each in found['comparisons']:
        yield ''
        yield from _comparison(each)
    if 'reward' in found:
        yield ''
        yield from _reward(found['reward'])


def _agreement(found: Facts) -> Iterator[str]:
    if not found['pairs']:
        yield 'No question has answers of two labellers with names; see --repeated of ask.'
        return
    where = f'{found["pairs"]} pairs of answers to {found["questions"]} questions'
    chance = ''
    if found['raw'] is None:
        yield f'Labellers rated the same question in {where}.'
    else:
        interval = in_words(found['low'], found['high'])
        yield f'Labellers agreed in {100 * found["raw"]:.1f} % of {where} ({interval}).'
        chance = f'Chance is {100 * found["chance"]:.1f} %; '
    alpha = 'undefined, because all these answers are the same'
    if found['alpha'] is not None:
        alpha = f'{found["alpha"]:.3f}'
    yield f"{chance}Krippendorff's alpha is {alpha}."


def _comparison(found: Facts) -> Iterator[str]:
    policy, against, ties = found['policy'], found['against'], found['ties']
    if found['win_rate'] is None:
        yield f'{against} and {policy}: none of {ties} answers prefers one to the other.'
        return
    count = f'{found["wins_of_against"]} of {found["n"]} answers to {found["questions"]} questions'
    rate = f'{100 * found["win_rate"]:.1f} % ({in_words(found["low"], found["high"])})'
    yield f'{against} was preferred to {policy} in {count}: {rate}.'
    if ties:
        yield f'  {ties} more answers prefer neither, and are left out'


def _disagreements(found: Mapping[str, Facts]) -> Iterator[str]:
    shown = f'the last {MOST_DISAGREEMENTS} at most; --output FILE has all'
    yield f'{len(found)} disagreements ({shown}):'
    for question, answers in list(found.items())[-MOST_DISAGREEMENTS:]:
        given = ', '.join(f'{name} {json.dumps(value)}' for name, value in answers.items())
        yield f'  {question[:8]}: {given}'


def _reward(found: Facts) -> Iterator[str]:
    yield f'{found["run"]} predicts these labels:'
    predicted = [part for part in PARTS if found[part]]
    for part in predicted:
        yield f'  {PARTS[part]}: {found[part]["in_words"]}'
    if not predicted:
        yield '  there is nothing to predict: no label prefers one of the responses'


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
    rows = [{'labeller': name, **_cells(found[name])} for name in sorted(found)]
    heads = [head for head in rows[0] if any(row[head] != NOTHING for row in rows)]
    return [heads, *([row[head] for head in heads] for row in rows)]


def _cells(found: Facts) -> dict[str, str]:
    median, pairs, p = found['median_seconds'], found['agreement_pairs'], found['positions_p_value']
    gold = found['gold']
    return {
        'kind': found['kind'],
        'answers': str(found['answers']),
        'ties': NOTHING if found['ties'] is None else str(found['ties']),
        'all bad': str(found['all_bad'] or NOTHING),
        'skipped': str(found['skipped']),
        'median s': NOTHING if median is None else f'{median:.1f}',
        'agreement': f'{round(found["agreement"] * pairs)} of {pairs}' if pairs else NOTHING,
        'gold': f'{gold["right"]} of {gold["answers"]}' if gold and gold['answers'] else NOTHING,
        'positions': ' '.join(map(str, found['positions'] or [])) or NOTHING,
        'p': NOTHING if p is None else f'{p:.3f}',
    }
