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


def each(*xs: Sequence[Trial]) -> list[Trial]:
    """Return the trials of all lists, one after the other."""
    return [trial for trials in xs for trial in trials]


def label(descriptor: str | int) -> list[Trial]:
    """Return one trial that sets nothing, for its descriptor in the name of the run."""
    return bind(None, None, descriptor)


def options_shortdesc(var: str, desc: str, opts: Sequence[Any]) -> list[Trial]:
    """Return a trial for each value of a variable, described as in `lx1` for desc l and .1."""
    return each(*[bind(var, value, desc + _short(value)) for value in opts])


def _short(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    text = f'{value:.3}'
    return text.lstrip('0').replace('.', 'x') if '.' in text else text


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
