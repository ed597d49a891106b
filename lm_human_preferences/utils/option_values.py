"""Which values an option accepts, by what its field declares."""

import dataclasses
from typing import Any

MAX_INT = 2**63 - 1
MAX_FLOAT = 3e38  # what a float32 tensor can hold


def check_accepted(name: str, field: dataclasses.Field, value: Any) -> None:
    """ValueError for a value that no tensor holds, is out of range, or is none of the choices."""
    if isinstance(value, int) and not -MAX_INT <= value <= MAX_INT:
        raise ValueError(f'{name} must be a number of at most 64 bits')
    if isinstance(value, float) and not abs(value) <= MAX_FLOAT:  # NaN fails this too
        raise ValueError(f'{name} must be a finite number, got {value}')
    if isinstance(value, (int, float)) and not _in_range(field, value):
        raise ValueError(f'{name} must be {_describe_range(field)}, got {value}')
    choices = field.metadata.get('one_of')
    if choices and value not in choices:
        raise ValueError(f'{name} {value} is none of {", ".join(choices)}')


def _in_range(field: dataclasses.Field, value: float) -> bool:
    limits = field.metadata
    at_least, above, at_most = limits.get('at_least'), limits.get('above'), limits.get('at_most')
    if at_least is not None and value < at_least:
        return False
    if above is not None and value <= above:
        return False
    return at_most is None or value <= at_most


def _describe_range(field: dataclasses.Field) -> str:
    """The values that `field` accepts, such as 'from 0 to 1'; '' if it accepts any number."""
    limits = field.metadata
    at_least, above, at_most = limits.get('at_least'), limits.get('above'), limits.get('at_most')
    if at_least is not None and at_most is not None:
        return f'from {at_least} to {at_most}'
    limits_in_words = []
    if at_least is not None:
        limits_in_words.append(f'at least {at_least}')
    elif above is not None:
        limits_in_words.append(f'above {above}')
    if at_most is not None:
        limits_in_words.append(f'at most {at_most}')
    return ' and '.join(limits_in_words)
