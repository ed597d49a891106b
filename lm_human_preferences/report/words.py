"""Constant words of the report and the model card, and formats of numbers and texts."""

import math
import os
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import NamedTuple

Row = Sequence[str]
LEARN, GAIN, SAYS, SURE, LABELS, MADE = (  # sections
    'What it was to learn',
    'Whether it did',
    'What it says now',
    'How sure',
    'Labels',
    'How it was made',
)
NOT_RECORDED, NOT_MEASURED = 'not recorded', 'not measured'
TASKS = {
    'sentiment': 'continue a passage of a book with positive sentiment',
    'descriptiveness': 'continue a passage of a book with vivid description',
    'cnndm': 'summarise a news article',
    'tldr': 'summarise a text of Reddit',
    'mock_sentiment': 'continue a film review as labellers like it',
    'test': 'continue three letters, for tests',
    'chat': 'answer in a chat',
}
MODELS = {
    'test': 'test (a tiny network with random weights, for tests)',
    'reviews': 'reviews (a tiny model of made-up reviews, for tests)',
}
OWN = 'By the reward that it was trained on'
JUDGES = {
    'known reward': 'By the known reward, which it was to learn',
    'judge': 'By the judge, another reward',
}
UNSEEN = 'The reward model, on labels it had not seen'
EXACT = 'Mean reward of a response. Exact: all {} responses to each of {} queries.'
ESTIMATED = 'Mean reward of a response, from {} to each of {} queries. ±: 95 % interval.'
LOGGED = 'Mean score of the responses of a step. How far the best one is was not measured.'
MEANING = (
    'KL: how far the responses have moved from what the model before would write. Best possible: by'
    ' the reward at the head of the column. Best of n samples of the model before: chosen by the'
    ' reward that the run was trained on.'
)
EXAMPLES = 'Two of its labels: ✓ is the response that was chosen.'


class Text(str):
    """Text of a query or a response, which is shown as a block."""


class Table(NamedTuple):
    """Table of a section; without columns, each row is a name and a value."""

    columns: Sequence[str]
    rows: Sequence[Row]
    caption: str = ''

    def __bool__(self) -> bool:
        """Return whether the table has rows; an empty one is not shown."""
        return bool(self.rows)


def facts_table(facts: Mapping[str, str]) -> Table:
    """Return a table of names and values, without those that are ''."""
    return Table((), [(name, value) for name, value in facts.items() if value])


def number(value: object, digits: int = 2) -> str:
    """Format a number with thousands, decimals and a minus sign; show other values as they are."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return NOT_RECORDED if value is None else str(value)
    if value != value or value in (math.inf, -math.inf):
        text = str(value).replace('inf', '∞').replace('nan', 'NaN')
    elif abs(value) >= 1_000_000_000:
        text = f'{Decimal(value):.2e}'
    else:
        text = f'{value:,}' if isinstance(value, int) else f'{value:z,.{digits}f}'
    return text.replace('-', '−')


def percent(fraction: float) -> str:
    """Format a fraction as a percentage without decimals."""
    return f'{number(100 * fraction, 0)} %'


def of_all(count: int, total: int) -> str:
    """Format a fraction: '7 of 14' for few, a percentage for many."""
    return f'{count} of {total}' if total < 100 else percent(count / total)


def ends(low: float, high: float) -> str:
    """Format the 95 % interval of a fraction; (0, 1) means that there are too few."""
    if (low, high) == (0, 1):
        return 'too few: none'
    return f'{number(100 * low, 0)} to {percent(high)}'


def moment(text: object) -> str:
    """Return a recorded time without its seconds; '' without a time."""
    return f'{str(text)[:16].replace("T", " ")} UTC' if text else ''


def short(path: str) -> str:
    """Return the last part of a path or URL, without folders and keys."""
    return os.path.basename(path.partition('?')[0].rstrip('/')) or path
