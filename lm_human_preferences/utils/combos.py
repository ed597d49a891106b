"""Experiments as lists of trials, composed of few parts (the original's utils/combos.py)."""

from collections.abc import Sequence
from typing import Any

Trial = tuple[tuple[str | None, Any, dict[str, Any]], ...]


def combos(*xs: Sequence[Trial]) -> list[Trial]:
    """Return the Cartesian product: a trial for every choice of one from each of the lists."""
    if not xs:
        return [()]
    return [x + rest for x in xs[0] for rest in combos(*xs[1:])]


def bind(var: str | None, val: Any, descriptor: str | int | None = '') -> list[Trial]:
    """Return one trial that sets one variable. A descriptor may be 0; the original dropped it."""
    extra: dict[str, Any] = {}
    if descriptor not in ('', None):
        extra['descriptor'] = descriptor
    return [((var, val, extra),)]


def bind_all(prefix: str = '', /, **values: Any) -> list[Trial]:
    """Return one trial that sets the variables `prefix.name` for names and values."""
    trials = combos()
    for name, value in values.items():
        variable = f'{prefix}.{name}' if prefix else name
        trials = combos(trials, bind(variable, value))
    return trials


def bind_nested(prefix: str, binds: Sequence[Trial]) -> list[Trial]:
    """Return the trials with `prefix.` before every variable."""
    nested = []
    for trial in binds:
        renamed = []
        for var, val, extra in trial:
            name = None if var is None else f'{prefix}.{var}'
            renamed.append((name, val, extra))
        nested.append(tuple(renamed))
    return nested
