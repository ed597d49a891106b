"""Hyperparameters: nested dataclasses, overridden by dotted names.

The original's utils/hyperparams.py.
"""

import contextlib
import dataclasses
import json
import math
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from typing import Any, TextIO

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError

_BOOLS = {'t': True, 'true': True, 'True': True, 'f': False, 'false': False, 'False': False}

TEXTS = tuple[str, ...]  # type of an option that may be given several times
MAX_INT = 2**63 - 1
MAX_FLOAT = 3e38  # what a float32 tensor can hold
_WORDS: dict[Any, str] = {
    bool: 'true or false',
    int: 'a whole number (int)',
    float: 'a number (float)',
    str: 'text (str)',
    types.NoneType: 'None',
    TEXTS: 'texts (str)',
}


class UnknownFieldError(AttributeError, KeyError):
    """A name that no field has.

    The original raised one or the other, or nothing, depending on the method.
    """

    __str__ = AttributeError.__str__


def option(
    default: Any,
    help: str,  # the keyword of click
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    one_of: Collection[str] = (),
    ours: bool = False,
    recorded: bool = True,
    formerly: str | None = None,
) -> Any:
    """A field with a line of help; the other arguments say which values are accepted.

    at_least, at_most: inclusive limits. above: an exclusive one. ours: the original does not know
    the option, so it is left out of what is printed and saved while it has its default. recorded:
    False for an option that is about this start of the program only, and is left out of what is
    printed and saved altogether. formerly: the name that the field had in an earlier version; it
    is still understood wherever a name is read, and never written. Groups cannot be renamed.
    """
    metadata = {
        'help': help,
        'at_least': at_least,
        'above': above,
        'at_most': at_most,
        'one_of': one_of,
        'ours': ours,
        'recorded': recorded,
        'formerly': formerly,
    }
    return dataclasses.field(default=default, repr=not ours, metadata=metadata)


@dataclasses.dataclass
class HParams:
    """Base of all hyperparameter classes, which are dataclasses as well."""

    def override_from_json_file(self, filename: str) -> None:
        """Override from a JSON file of nested objects, local or remote, and check all values.

        UserError names the file.
        """
        nested = storage.read_json(filename)
        try:
            self.override_from_nested_dict(nested)
            self.check_values()
        except (AttributeError, TypeError, ValueError) as e:
            raise UserError(
                f'{filename} does not hold the hyperparameters that it should: {e}'
            ) from e

    def override_from_str(self, hparam_str: str) -> None:
        """Override from 'x.y=1,name=foobar'; a value cannot hold a comma."""
        pairs = [pair.partition('=') for pair in hparam_str.split(',')]
        for key, separator, _ in pairs:
            if not separator:
                raise ValueError(f'malformed hyperparameter {key!r}: expected name=value')
        self.override_from_str_dict({key: value for key, _, value in pairs})

    def override_from_str_dict(self, flat_dict: dict[str, str], separator: str = '.') -> None:
        """Override from {'x.y': '1'}; values are read as the types of the fields say.

        ValueError if one cannot be read.
        """
        self.override_from_dict(
            {key: parse(self._field(key, separator).type, text) for key, text in flat_dict.items()},
            separator=separator,
        )

    def parse_json(self, s: str) -> None:
        self.override_from_nested_dict(json.loads(s))

    def override_from_dict(self, flat_dict: dict[str, Any], separator: str = '.') -> None:
        """Override from {'x.y': 1}.

        'on' makes a fresh group and those that hold it, 'off' makes it None. A field of a group
        that is off is an AttributeError; groups that are on keep their values (the original made
        those around the one switched on anew).
        """
        flat_dict = {self._current(key, separator): value for key, value in flat_dict.items()}
        groups = {key: group_class(self._field(key, separator).type) for key in flat_dict}
        inner: dict[str, dict[str, Any]] = {}
        for key, value in flat_dict.items():
            name, nested, rest = key.partition(separator)
            if nested:
                inner.setdefault(name, {})[rest] = value
                continue
            group = groups[key]
            if group and value in ('on', 'off'):
                value = group() if value == 'on' else None
            setattr(self, name, value)
        for name, values in inner.items():
            on = any(
                groups[name + separator + key] and value not in ('off', None)
                for key, value in values.items()
            )
            if on and name not in flat_dict and getattr(self, name) is None:
                group = group_class(self._field(name).type)
                assert group is not None  # a dotted name was found below it
                setattr(self, name, group())
            if getattr(self, name) is None:
                raise AttributeError(f'{name} is None: it has no field {next(iter(values))!r}')
            getattr(self, name).override_from_dict(values, separator)

    def override_from_nested_dict(self, nested_dict: dict[str, Any]) -> None:
        """Override from {'x': {'y': 1}}; an object switches its group on."""
        for key, value in nested_dict.items():
            name = self._current(key)
            group = group_class(self._field(name).type)
            if not isinstance(value, dict):
                setattr(self, name, value)
                continue
            if not group:
                raise UnknownFieldError(
                    f'{name!r} of {type(self).__name__} holds no fields: {sorted(value)}'
                )
            if getattr(self, name) is None:
                setattr(self, name, group())
            getattr(self, name).override_from_nested_dict(value)

    def to_nested_dict(self, *, recorded_only: bool = False) -> dict[str, Any]:
        """What override_from_nested_dict takes.

        It has the fields that the original has too, and others unless at their default.

        recorded_only: leave out the options that are about one start of the program, see `option`.
        """
        nested = {}
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.metadata.get('ours') and value == f.default:
                continue
            if recorded_only and not f.metadata.get('recorded', True):
                continue
            if isinstance(value, HParams):
                value = value.to_nested_dict(recorded_only=recorded_only)
            nested[f.name] = value
        return nested

    def validate(self, *, prefix: str = '') -> None:
        """`check_values`, for one. Subclasses add what must hold between fields."""
        self.check_values(prefix=prefix)
        for f in dataclasses.fields(self):
            if isinstance(value := getattr(self, f.name), HParams):
                value.validate(prefix=f'{prefix}{f.name}.')

    def check_values(self, *, prefix: str = '') -> None:
        """TypeError for a value of the wrong type, ValueError for one that is not accepted."""
        for f in dataclasses.fields(self):
            name = f'--{prefix}{f.name}'
            value = getattr(self, f.name)
            if not _is_of_type(value, f.type):
                raise TypeError(f'{name} must be {describe(f.type)}, got {value!r:.80}')
            _check_accepted(name, f, value)
            if isinstance(value, HParams):
                value.check_values(prefix=f'{prefix}{f.name}.')

    def _current(self, key: str, separator: str = '.') -> str:
        """Today's name of the field `key`, which may be the name that it had formerly."""
        return former_names(type(self), separator).get(key, key)

    def _field(self, key: str, separator: str = '.') -> dataclasses.Field:
        try:
            return fields(type(self), separator)[self._current(key, separator)]
        except KeyError:
            raise UnknownFieldError(
                f'{type(self).__module__}.{type(self).__name__} has no field {key!r}'
            ) from None


@lru_cache
def fields(cls: type[HParams], separator: str = '.') -> dict[str, dataclasses.Field]:
    """All fields below `cls`, groups included, by dotted name: dict of str to dataclasses.Field."""
    by_name = {}
    for f in dataclasses.fields(cls):
        by_name[f.name] = f
        group = group_class(f.type)
        if group:
            for key, field in fields(group, separator).items():
                by_name[f'{f.name}{separator}{key}'] = field
    return by_name


@lru_cache
def former_names(cls: type[HParams], separator: str = '.') -> dict[str, str]:
    """{former dotted name: today's} of the fields below `cls` that were renamed."""
    return renamed(fields(cls, separator))


def renamed(fields: Mapping[str, dataclasses.Field]) -> dict[str, str]:
    """The same for `fields` {dotted name: field}; see `option` about `formerly`."""
    names = {}
    for name, field in fields.items():
        formerly = field.metadata.get('formerly')
        if formerly:
            names[name.removesuffix(field.name) + formerly] = name
    return names


def members(ty: Any) -> tuple[Any, ...]:
    """The types that `ty` allows: those of a Union, or `ty` alone."""
    is_union = typing.get_origin(ty) in (typing.Union, types.UnionType)
    return typing.get_args(ty) if is_union else (ty,)


def group_class(ty: Any) -> type[HParams] | None:
    """The HParams class that `ty` or Optional `ty` holds, or None."""
    return next((t for t in members(ty) if isinstance(t, type) and issubclass(t, HParams)), None)


def _is_of_type(value: Any, ty: Any) -> bool:
    allowed = members(ty)
    if TEXTS in allowed:
        is_sequence = isinstance(value, (tuple, list))
        return is_sequence and all(isinstance(text, str) for text in value)
    if float in allowed:
        allowed = (*allowed, int)
    return isinstance(value, allowed)


def _check_accepted(name: str, field: dataclasses.Field, value: Any) -> None:
    """ValueError for a value that no tensor holds, is out of range, or is none of the choices."""
    if isinstance(value, int) and not -MAX_INT <= value <= MAX_INT:
        raise ValueError(f'{name} must be a number of at most 64 bits')
    if isinstance(value, float) and not abs(value) <= MAX_FLOAT:  # NaN fails this too
        raise ValueError(f'{name} must be a finite number, got {value}')
    if isinstance(value, (int, float)) and not _in_range(field, value):
        raise ValueError(f'{name} must be {describe_range(field)}, got {value}')
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


def describe_range(field: dataclasses.Field) -> str:
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


def describe(ty: Any) -> str:
    """`ty` in words, for error messages."""
    return ' or '.join(
        'on or off' if group_class(t) else _WORDS.get(t) or t.__name__ for t in members(ty)
    )


def check_multiple(total: int, name: str, factors: Mapping[str, int]) -> None:
    """UserError unless the product of `factors` {name: number} divides `total`.

    The message names the nearest totals that would do.
    """
    factors = {factor: number for factor, number in factors.items() if number != 1}
    part = math.prod(factors.values())
    below = total - total % part
    if below != total:
        parts = ' x '.join(f'{factor} {number}' for factor, number in factors.items())
        near = f'{below} or {below + part}' if below > 0 else below + part
        raise UserError(
            f'{name} {total} is not a multiple of {parts}{f" = {part}" * (len(factors) > 1)}: take'
            f' {near}'
        )


def dump(hparams: HParams, *, name: str = 'hparams', out: TextIO | None = None) -> None:
    """Write `name:` and sorted, indented `name: value` lines to `out`, else standard output."""
    nested = hparams.to_nested_dict(recorded_only=True)
    print(f'{name}:', *_dump_lines(nested, '  '), sep='\n', file=out)


def _dump_lines(nested: Mapping[str, Any], indent: str) -> Iterator[str]:
    for key, value in sorted(nested.items()):
        if isinstance(value, dict):
            yield f'{indent}{key}:'
            yield from _dump_lines(value, indent + '  ')
        else:
            yield f'{indent}{key}: {value}'


def parse(ty: Any, s: str | float) -> Any:
    """Read `s` as type `ty`; ValueError if it is not one, TypeError if a Union is ambiguous."""
    options = [t for t in members(ty) if t is not types.NoneType]
    if len(options) < len(members(ty)) and (
        s == 'None' or (s in ('none', '') and str not in options)
    ):
        return None
    if len(options) > 1 and (str in options or {int, float} <= set(options)):
        raise TypeError(f'cannot tell which of {describe(ty)} {s!r} is meant to be')
    for option in options[:-1]:
        with contextlib.suppress(ValueError):
            return _parse_as(option, s)
    return _parse_as(options[-1], s)


def _parse_as(ty: Any, s: str | float) -> Any:
    if ty is str:
        return s
    if ty in (int, float):
        return ty(s)
    if ty is bool:
        values = _BOOLS
    elif group_class(ty):
        values = {'on': 'on', 'off': 'off'}
    else:
        values = {}
    if not isinstance(s, str) or s not in values:
        raise ValueError(f'{s!r} is not {describe(ty)}')
    return values[s]
