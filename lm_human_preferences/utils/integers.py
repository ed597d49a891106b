"""Division of integers, without PyTorch, for checks of options."""

import math
from collections.abc import Mapping

from lm_human_preferences.errors import UserError


def exact_div(a: int, b: int) -> int:
    """Return `a // b`; ValueError if there is a remainder."""
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
        parts = ' x '.join(f'{factor} {number}' for factor, number in factors.items())
        near = f'{below} or {below + part}' if below > 0 else below + part
        raise UserError(
            f'{name} {total} is not a multiple of {parts}{f" = {part}" * (len(factors) > 1)}: use'
            f' {near}{otherwise}'
        )
