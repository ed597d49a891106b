"""Hyperparameters: nested dataclasses, overridden by dotted names.

The original's utils/hyperparams.py.
"""

import contextlib
import dataclasses
import json
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from typing import Any, ClassVar, TextIO

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError
from lm_human_preferences.utils.option_values import check_accepted

_BOOLS = {'t': True, 'true': True, 'True': True, 'f': False, 'false': False, 'False': False}

TEXTS = tuple[str, ...]  # type of an option that may be given several times
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
    help: str | None,  # the keyword of click
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    one_of: Collection[str] = (),
    ours: bool = False,
    lasting: bool = True,
    of_command: bool = False,
    formerly: str | None = None,
    also: str | None = None,
) -> Any:
    """A field with a line of help; the other arguments say which values are accepted.

    help: None for an option that is understood but shown nowhere. at_least, at_most: inclusive
    limits. above: an exclusive one. ours: the original does not know the option, so it is left out
    of files that the original reads. lasting: False for an option that is about this start of the
    program only; a resumed run does not go on with it. of_command: for one that is about a whole
    command; a training that is part of another one's command follows that one, and has no such
    option. formerly: the name that the field had in an earlier version; it is still understood
    wherever a name is read, and never written. also: another name that is understood so, such as a
    word that Python keeps for itself. Groups cannot be renamed.
    """
    metadata = {
        'help': help,
        'at_least': at_least,
        'above': above,
        'at_most': at_most,
        'one_of': one_of,
        'ours': ours,
        'lasting': lasting,
        'of_command': of_command,
        'formerly': formerly,
        'also': also,
    }
    return dataclasses.field(default=default, repr=not ours, metadata=metadata)


@contextlib.contextmanager
def reading(filename: str) -> Iterator[None]:
    """Within the block, what is wrong with the hyperparameters of a file is a UserError."""
    try:
        yield
    except (AttributeError, TypeError, ValueError) as e:
        raise UserError(f'{filename} does not hold the hyperparameters that it should: {e}') from e


@dataclasses.dataclass
class HParams:
    """Base of all hyperparameter classes, which are dataclasses as well.

    dropped: fields that earlier versions had, where they had no effect. Files may still hold them.
    A group knows its place, so that what it finds wrong is named as users write it: see
    option_name.
    """

    dropped: ClassVar[frozenset[str]] = frozenset()
    _group = ''  # what the names of its options begin with, such as 'rewards.online.'; no field

    def __setattr__(self, name: str, value: Any) -> None:
        """A group is named after the field that holds it, whenever it is put there."""
        super().__setattr__(name, value)
        if isinstance(value, HParams):
            value.name_group(f'{self._group}{name}.')

    def name_group(self, name: str) -> None:
        """Let the names of its options, and of those of its own groups, begin with `name`."""
        self._group = name
        for f in dataclasses.fields(self):
            value = getattr(self, f.name, None)
            if isinstance(value, HParams):
                value.name_group(f'{name}{f.name}.')

    def option_name(self, name: str) -> str:
        """The field `name`, dotted if it is one of a group, as users write it: --task.end_text."""
        return f'--{self._group}{name}'

    def setting(self, name: str) -> str:
        """The option of the field `name` with its value: --task.query_length 64."""
        return f'{self.option_name(name)} {getattr(self, name)}'

    def override_from_json_file(self, filename: str) -> None:
        """Override from a JSON file of nested objects, local or remote, and check all values.

        UserError names the file.
        """
        nested = storage.read_json(filename)
        with reading(filename):
            self.override_from_nested_dict(nested)
            self.check_values()

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
            if key in self.dropped:
                continue
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

    def to_nested_dict(self, *, original_only: bool = False) -> dict[str, Any]:
        """What override_from_nested_dict takes.

        It has the fields that the original has too, and others unless at their default.

        original_only: leave out all that the original does not have, see `additions`.
        """
        nested = {}
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.metadata.get('ours') and (original_only or value == f.default):
                continue
            if isinstance(value, HParams):
                value = value.to_nested_dict(original_only=original_only)
            nested[f.name] = value
        return nested

    def additions(self) -> dict[str, Any]:
        """{dotted name: value} of the options that the original does not have, at a default or not.

        override_from_dict takes it. A group is 'on' or 'off'.
        """
        return dict(_additions(self))

    def validate(self) -> None:
        """`check_values`, for one. Subclasses add what must hold between fields."""
        self.check_values()
        for f in dataclasses.fields(self):
            if isinstance(value := getattr(self, f.name), HParams):
                value.validate()

    def check_values(self) -> None:
        """TypeError for a value of the wrong type, ValueError for one that is not accepted."""
        for f in dataclasses.fields(self):
            name = self.option_name(f.name)
            value = getattr(self, f.name)
            if not _is_of_type(value, f.type):
                raise TypeError(f'{name} must be {describe(f.type)}, got {value!r:.80}')
            check_accepted(name, f, value)
            if isinstance(value, HParams):
                value.check_values()

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


def _additions(
    hparams: HParams, prefix: str = '', *, all_ours: bool = False
) -> Iterator[tuple[str, Any]]:
    """See HParams.additions. all_ours: whether the original does not have the group."""
    for f in dataclasses.fields(hparams):
        name, value = prefix + f.name, getattr(hparams, f.name)
        is_ours = all_ours or f.metadata.get('ours', False)
        if is_ours and group_class(f.type):
            yield name, 'off' if value is None else 'on'
        elif is_ours and not is_of_another_command(name, f):
            yield name, value
        if isinstance(value, HParams):
            yield from _additions(value, f'{name}.', all_ours=is_ours)


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
    """{other dotted name: the one that is written} of the fields below `cls`: see `option`."""
    return renamed(fields(cls, separator))


def renamed(fields: Mapping[str, dataclasses.Field]) -> dict[str, str]:
    """The same for `fields` {dotted name: field}."""
    names = {}
    for name, field in fields.items():
        for kind in ('formerly', 'also'):
            if other := field.metadata.get(kind):
                names[name.removesuffix(field.name) + other] = name
    return names


def is_of_another_command(name: str, field: dataclasses.Field) -> bool:
    """Whether `field`, of that dotted name, is about the command that its training is part of."""
    is_own = '.' not in name or name.startswith('run.')
    return field.metadata.get('of_command', False) and not is_own


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


def describe(ty: Any) -> str:
    """`ty` in words, for error messages."""
    return ' or '.join(
        'on or off' if group_class(t) else _WORDS.get(t) or t.__name__ for t in members(ty)
    )


def dump(hparams: HParams, *, name: str = 'hparams', out: TextIO | None = None) -> None:
    """Write `name:` and sorted, indented `name: value` lines to `out`, else standard output.

    That is what the original printed, so what it does not have is left out: see `dump_additions`.
    """
    nested = hparams.to_nested_dict(original_only=True)
    print(f'{name}:', *_dump_lines(nested, '  '), sep='\n', file=out)


def dump_additions(hparams: HParams, *, out: TextIO | None = None) -> None:
    """The same for the options that the original does not have, by dotted name."""
    print('more options:', *_dump_lines(hparams.additions(), '  '), sep='\n', file=out)


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
