"""Experiments as lists of trials, composed from few parts (the original's utils/combos.py).

A trial is a tuple of entries `(variable, value, extra)`; `extra` may hold a `descriptor`, which
becomes part of the job's name. Every function takes or returns lists of trials.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

Trial = tuple[tuple[str | None, Any, dict[str, Any]], ...]


def combos(*xs: Sequence[Trial]) -> list[Trial]:
    """The Cartesian product: one trial for every choice of one trial from each of the lists."""
    if not xs:
        return [()]
    return [x + rest for x in xs[0] for rest in combos(*xs[1:])]


def each(*xs: Sequence[Trial]) -> list[Trial]:
    """The trials of all lists, one after the other."""
    return [trial for x in xs for trial in x]


def bind(var: str | None, val: Any, descriptor: str | int | None = '') -> list[Trial]:
    """One trial that sets one variable. A descriptor may be 0; the original dropped that one."""
    extra: dict[str, Any] = {} if descriptor in ('', None) else {'descriptor': descriptor}
    return [((var, val, extra),)]


def bind_all(prefix: str = '', /, **values: Any) -> list[Trial]:
    """One trial that sets the variables `prefix.name` for names and values."""
    return combos(
        *[bind(f'{prefix}.{name}' if prefix else name, value) for name, value in values.items()]
    )


def label(descriptor: str | int | None) -> list[Trial]:
    """One trial that sets nothing and only adds to the job's name."""
    return bind(None, None, descriptor)


def labels(*descriptors: str | int | None) -> list[Trial]:
    return each(*[label(d) for d in descriptors])


def options(
    var: str | None,
    opts_with_descs: Iterable[tuple[Any, str | int | None]],
) -> list[Trial]:
    """A trial for every `(value, descriptor)`."""
    return each(*[bind(var, val, descriptor) for val, descriptor in opts_with_descs])


def _shortstr(v: object) -> str:
    if not isinstance(v, float):
        return str(v)
    s = f'{v:.03}'
    return s.lstrip('0').replace('.', 'x') if '.' in s else s


def options_shortdesc(var: str | None, desc: str, opts: Iterable[Any]) -> list[Trial]:
    """A trial for every value, described by `desc` and the value: 0.25 of 'lr' is 'lrx25'."""
    return options(var, [(val, desc + _shortstr(val)) for val in opts])


def options_vardesc(var: str, opts: Iterable[Any]) -> list[Trial]:
    return options_shortdesc(var, var, opts)


def repeat(n: int) -> list[Trial]:
    """The same trial n times, told apart by the descriptors 0 to n - 1."""
    return labels(*range(n))


def foreach(inputs: Sequence[Trial], body: Callable[..., Sequence[Trial]]) -> list[Trial]:
    """Every trial followed by the trials that `body` makes of its descriptors."""
    return [
        trial + rest
        for trial in inputs
        for rest in body(*[extra['descriptor'] for _, _, extra in trial])
    ]


def bind_nested(prefix: str, binds: Sequence[Trial]) -> list[Trial]:
    """The same trials with `prefix.` before every variable."""
    return [
        tuple((var if var is None else f'{prefix}.{var}', val, extra) for var, val, extra in x)
        for x in binds
    ]
