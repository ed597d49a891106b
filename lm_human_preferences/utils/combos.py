"""Functions that define an experiment as a list of trials (the original's utils/combos.py)."""

from collections.abc import Sequence
from typing import Any

Trial = tuple[tuple[str | None, Any, dict[str, Any]], ...]


def combos(*xs: Sequence[Trial]) -> list[Trial]:
    """Return the Cartesian product of lists; each result joins one trial of each list."""
    if not xs:
        return [()]
    return [x + rest for x in xs[0] for rest in combos(*xs[1:])]


def bind(var: str | None, val: Any, descriptor: str | int | None = '') -> list[Trial]:
    """Return a list of one trial, which sets the variable `var` to `val`."""
    extra: dict[str, Any] = {}
    if descriptor not in ('', None):
        extra['descriptor'] = descriptor
    return [((var, val, extra),)]


def each(*xs: Sequence[Trial]) -> list[Trial]:
    """Return the trials of all lists, one list after the other."""
    return [trial for trials in xs for trial in trials]


def label(descriptor: str | int) -> list[Trial]:
    """Return a list of one trial, which only adds `descriptor` to the name of the run."""
    return bind(None, None, descriptor)


def options_shortdesc(var: str, desc: str, opts: Sequence[Any]) -> list[Trial]:
    """Return a trial for each value in `opts`; its descriptor joins `desc` and the value."""
    return each(*[bind(var, value, desc + _short(value)) for value in opts])


def _short(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    text = f'{value:.3}'
    return text.lstrip('0').replace('.', 'x') if '.' in text else text


def bind_all(prefix: str = '', /, **values: Any) -> list[Trial]:
    """Return one trial that sets the variable `prefix.NAME` to VALUE for each NAME=VALUE."""
    trials = combos()
    for name, value in values.items():
        variable = f'{prefix}.{name}' if prefix else name
        trials = combos(trials, bind(variable, value))
    return trials


def bind_nested(prefix: str, binds: Sequence[Trial]) -> list[Trial]:
    """Return the trials with `prefix.` put before the name of every variable."""
    nested = []
    for trial in binds:
        renamed = []
        for var, val, extra in trial:
            name = None if var is None else f'{prefix}.{var}'
            renamed.append((name, val, extra))
        nested.append(tuple(renamed))
    return nested
