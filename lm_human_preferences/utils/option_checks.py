"""Checks of options' values (multiples, ranges, choices) that do not need PyTorch."""

import math
import operator
from collections.abc import Mapping
from typing import Any

from lm_human_preferences.errors import UserError

MAX_INT = 2**63 - 1
MAX_FLOAT = 3e38  # about the largest number that a float32 tensor can hold
_LIMITS = {'at_least': operator.ge, 'above': operator.gt, 'at_most': operator.le}


def exact_div(a: int, b: int) -> int:
    """Return `a / b` as an integer; ValueError if there is a remainder."""
    q = a // b
    if a != q * b:
        raise ValueError(f'Inexact division: {a} / {b} = {a / b}')
    return q


def ceil_div(a: int, b: int) -> int:
    return (a - 1) // b + 1


def check_multiple(total: int, name: str, factors: Mapping[str, int], otherwise: str = '') -> None:
    """Raise UserError unless the product of `factors` {name: number} divides `total`."""
    factors = {factor: number for factor, number in factors.items() if number != 1}
    part = math.prod(factors.values())
    below = total - total % part
    if below != total:
        product = ' x '.join(f'{factor} {number}' for factor, number in factors.items())
        product += f' = {part}' if len(factors) > 1 else ''
        near = f'{below} or {below + part}' if below > 0 else below + part
        advice = f'use {near}{otherwise}'
        raise UserError(f'{name} {total} is not a multiple of {product}: {advice}')


def check_accepted(name: str, marks: Mapping[str, Any], value: Any) -> None:
    """Raise ValueError if the option `name` does not allow `value`, or no tensor can hold `value`.

    name: name of the option in the message. marks: arguments of `hyperparams.option`.
    """
    if isinstance(value, int) and not -MAX_INT <= value <= MAX_INT:
        raise ValueError(f'{name} must be a number of at most 64 bits, its sign included')
    if isinstance(value, float) and not abs(value) <= MAX_FLOAT:  # `not <=` also catches NaN
        raise ValueError(f'{name} must be a finite number, got {value}')
    for limit, is_within in _LIMITS.items():
        bound = marks.get(limit)
        if bound is not None and isinstance(value, (int, float)) and not is_within(value, bound):
            raise ValueError(f'{name} must be {limit.replace("_", " ")} {bound}, got {value}')
    choices = marks.get('one_of')
    if choices and value is not None and value not in choices:
        raise ValueError(f'{name} {value} is none of {", ".join(choices)}')
