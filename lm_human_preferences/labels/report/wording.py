"""Facts of a report on labels in words, in tables, and for the terminal as a whole."""

import functools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jinja2

from lm_human_preferences.labels.report.agreement import correlation_words, in_words
from lm_human_preferences.utils.terminal import printable

Facts = Mapping[str, Any]  # a part of label_report.report
NOTHING = '-'
TEMPLATES = os.path.dirname(__file__)


def as_text(folder: str, found: Facts) -> str:
    """Return a whole report for the terminal, rendered from labels.jinja."""
    return (
        environment(TEMPLATES)
        .get_template('labels.jinja')
        .render(
            folder=folder,
            found=found,
            table=aligned(labeller_table(sorted(found['labellers'].items()))),
            correlation_words=correlation_words,
        )
    )


@functools.cache
def environment(*directories: str) -> jinja2.Environment:
    """Return the environment of templates whose text is for a terminal."""
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(directories),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Policies have the names that a folder or a run gives them.
        finalize=lambda value: printable(value) if isinstance(value, str) else value,
    )
    found.filters |= {'json': json.dumps, 'spec': format}
    found.globals['in_words'] = in_words
    return found


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
