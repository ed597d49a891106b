"""Facts of a report on labels in words, for the terminal, the page and the card of a run."""

import json
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jinja2

from lm_human_preferences.labels.report.agreement import correlation_words, in_words
from lm_human_preferences.utils.terminal import printable

Facts = Mapping[str, Any]  # a part of label_report.report
NOTHING = '-'


def as_text(folder: str, found: Facts) -> str:
    """Return a whole report for the terminal, rendered from labels.jinja."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(os.path.dirname(__file__)),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Policies have the names that the folder gives them.
        finalize=lambda value: printable(value) if isinstance(value, str) else value,
    )
    environment.filters |= {'fixed': '{:.3f}'.format, 'percent': _percent, 'json': json.dumps}
    return environment.get_template('labels.jinja').render(
        folder=folder,
        found=found,
        agreement=agreement(found['agreement']),
        table=aligned(labeller_table(sorted(found['labellers'].items()))),
        comparison=comparison,
        in_words=in_words,
        correlation_words=correlation_words,
        mean=statistics.mean,
    )


def _percent(share: float) -> str:
    return f'{100 * share:.1f}'


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each row, its first cell on the left and others on the right."""
    columns = []
    for number, column in enumerate(zip(*rows, strict=True)):
        width = max(map(len, column))
        align = str.rjust if number else str.ljust
        columns.append([align(cell, width) for cell in column])
    return ['  '.join(row).rstrip() for row in zip(*columns, strict=True)]


def agreement(found: Facts) -> list[str]:
    """Describe the agreement of labellers; [] if no question has two answers."""
    if not found['pairs']:
        return []
    where = f'{found["pairs"]} pairs of answers to {found["questions"]} questions'
    chance = '' if found['raw'] is None else f'Chance is {100 * found["chance"]:.1f} %; '
    alpha = 'undefined, because all these answers are the same'
    if found['alpha'] is not None:
        alpha = f'{found["alpha"]:.3f}'
    told = f'Labellers rated the same question in {where}.'
    if found['raw'] is not None:
        share = f'{100 * found["raw"]:.1f} %'
        told = f'Labellers agreed in {share} of {where} ({in_words(found["low"], found["high"])}).'
    return [told, f"{chance}Krippendorff's alpha is {alpha}."]


def comparison(found: Facts) -> str:
    """Say how often a policy was preferred to another."""
    if found['win_rate'] is None:
        return f'{found["against"]} and {found["policy"]}: no answer prefers one to the other.'
    return (
        f'{found["against"]} was preferred to {found["policy"]} in {found["wins_of_against"]} of'
        f' {found["n"]} answers to {found["questions"]} questions: {100 * found["win_rate"]:.1f} %'
        f' ({in_words(found["low"], found["high"])}).'
    )


def labeller_table(labellers: Iterable[tuple[str, Facts]]) -> list[list[str]]:
    """Return a table of labellers, (name, facts) each, its headings first."""
    rows = [{'labeller': name, **_cells(found)} for name, found in labellers]
    heads = list(max(rows, key=len, default={}))  # a folder may have ties, and another none
    return [heads, *([row.get(head, NOTHING) for head in heads] for row in rows)]


def _cells(found: Facts) -> dict[str, str]:
    cells = {'answers': str(found['answers'])}
    if 'ties' in found:
        cells['ties'] = str(found['ties'])
    median, share, p = found['median_seconds'], found['agreement'], found['positions_p_value']
    gold, positions = found['gold'], found['positions']
    return {
        **cells,
        'skipped': str(found['skipped']),
        'taken back': str(found['taken_back']),
        'median s': NOTHING if median is None else f'{median:.1f}',
        'under 1 s': str(found['under_a_second']),
        'agreement': NOTHING if share is None else f'{share:.3f} of {found["agreement_pairs"]}',
        'gold': f'{gold["right"]} of {gold["answers"]}' if gold and gold['answers'] else NOTHING,
        'positions': ' '.join(map(str, positions or [])) or NOTHING,
        'p': NOTHING if p is None else f'{p:.3f}',
    }
