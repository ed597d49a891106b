"""Nested dataclasses of hyperparameters (the original's utils/hyperparams.py)."""

import contextlib
import dataclasses
import functools
import operator
import re
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError
from lm_human_preferences.utils import option_checks, streams

_BOOLS = {'t': True, 'true': True, 'True': True, 'f': False, 'false': False, 'False': False}

TEXTS = tuple[str, ...]  # type of a text option that may be given several times
_WORDS: dict[Any, str] = {
    bool: 'true or false',
    int: 'a whole number (int)',
    float: 'a number (float)',
    str: 'text (str)',
    types.NoneType: 'None',
    TEXTS: 'texts (str)',
}


class UnknownFieldError(AttributeError, KeyError):
    """Error: no field has this name. The original raised a KeyError or an AttributeError for it."""

    __str__ = AttributeError.__str__


class InvalidOptions(ValueError, AssertionError):
    """Error: options contradict each other. Like the original's error, it is an AssertionError."""


def option(
    default: Any,
    help: str | None,  # the argument is named as in click
    *,
    ours: bool = False,
    **marks: Any,
) -> Any:
    """Declare an option: a field of a hyperparameter class, with a line of help.

    help: None for an option that is accepted but not shown. ours: whether this port added it, so
    that files for the original leave it out. marks: at_least, at_most (inclusive limits), above (an
    exclusive limit), one_of (choices), path (True if a typed value may begin with ~).
    """
    metadata = {'help': help, 'ours': ours, **marks}
    return dataclasses.field(default=default, repr=not ours, metadata=metadata)


own_option = functools.partial(option, ours=True)


@contextlib.contextmanager
def reading(filename: str) -> Iterator[None]:
    """Within the block, turn errors about hyperparameters in a file into UserErrors."""
    try:
        yield
    except (AttributeError, TypeError, ValueError) as e:
        raise UserError(f'{filename} does not hold the hyperparameters that it should: {e}') from e


@functools.cache
def note_unknown(filename: str, names: tuple[str, ...]) -> None:
    """Print a note, once per file, on settings `names` that this program does not know."""
    if names:
        streams.note(
            f'note: {filename} has settings that this program does not know and leaves alone:'
            f' {", ".join(names)}'
        )


@dataclasses.dataclass
class HParams:
    """Base of all hyperparameter classes; `unknown` holds a file's settings that match no field."""

    _group = ''  # prefix of option names, such as 'rewards.online.' (not a dataclass field)
    unknown = {}  # settings {name: value} that match no field; replace the dict, never change it

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, HParams):
            value.name_group(f'{self._group}{name}.')

    def name_group(self, name: str) -> None:
        """Set the prefix of option names to `name`, such as 'task.', here and in nested groups."""
        self._group = name
        for f in dataclasses.fields(self):
            value = getattr(self, f.name, None)
            if isinstance(value, HParams):
                value.name_group(f'{name}{f.name}.')

    def option_name(self, name: str) -> str:
        """Return the option of a field, such as --task.end_text. name: may be dotted."""
        return f'--{self._group}{name}'

    def setting(self, name: str) -> str:
        """Return the option of a field with its value, such as --task.query_length 64."""
        return f'{self.option_name(name)} {operator.attrgetter(name)(self)}'

    def override_from_json_file(self, filename: str) -> None:
        """Override fields from a JSON file (path or URL); UserError if the file is not valid."""
        nested = storage.read_json(filename)
        with reading(filename):
            self.override_from_nested_dict(nested, keep_unknown=True)
            self.check_values()
        note_unknown(filename, tuple(self.unknown_names()))

    def override_from_str(self, hparam_str: str) -> None:
        """Override fields from a text like 'x.y=1,name=text'; values cannot contain commas."""
        parsed = {}
        for setting in hparam_str.split(','):
            key, is_setting, text = setting.partition('=')
            if not is_setting:
                raise ValueError(f'the setting {setting!r} is not NAME=VALUE')
            parsed[key] = parse(self._field(key).type, text)
        self.override_from_dict(parsed)

    def override_from_dict(self, flat_dict: dict[str, Any]) -> None:
        """Override fields from a dict such as {'x.y': 1, 'z': 'on'}.

        'on' switches the group z on. The group x must be on, unless a group in x is switched on.
        """
        groups = {key: group_class(self._field(key).type) for key in flat_dict}
        inner: dict[str, dict[str, Any]] = {}
        for key, value in flat_dict.items():
            name, nested, rest = key.partition('.')
            if nested:
                inner.setdefault(name, {})[rest] = value
                continue
            group = groups[key]
            if group and value in ('on', 'off'):
                value = group() if value == 'on' else None
            setattr(self, name, value)
        for name, values in inner.items():
            is_switched_on = any(
                groups[f'{name}.{key}'] and value not in ('off', None)
                for key, value in values.items()
            )
            if is_switched_on and name not in flat_dict and getattr(self, name) is None:
                group = group_class(self._field(name).type)
                assert group is not None  # the part before a dot names a group
                setattr(self, name, group())
            if getattr(self, name) is None:
                raise AttributeError(f'{name} is None: it has no field {next(iter(values))!r}')
            getattr(self, name).override_from_dict(values)

    def override_from_nested_dict(
        self, nested_dict: dict[str, Any], *, keep_unknown: bool = False
    ) -> None:
        """Override fields from a nested dict: {'x': {'y': 1}} switches on the group x, and sets y.

        keep_unknown: whether to put settings without a field into `unknown`, or raise an error.
        """
        for name, value in nested_dict.items():
            if keep_unknown and not self.has(name):
                self.unknown = {**self.unknown, name: value}
                continue
            group = group_class(self._field(name).type)
            if not isinstance(value, dict):
                setattr(self, name, value)
                continue
            if not group:
                raise UnknownFieldError(
                    f'{name!r} of {type(self).__name__} is not a group with fields {sorted(value)}'
                )
            if getattr(self, name) is None:
                setattr(self, name, group())
            getattr(self, name).override_from_nested_dict(value, keep_unknown=keep_unknown)

    def unknown_names(self) -> Iterator[str]:
        """Yield the dotted names of `unknown` settings, including those of nested groups."""
        yield from self.unknown
        for name, _, value in settings(self):
            if isinstance(value, HParams):
                yield from (f'{name}.{key}' for key in value.unknown)

    def keep_unknown_of(self, other: 'HParams') -> None:
        """Copy the `unknown` settings of another object and of its groups."""
        self.unknown = other.unknown
        for name, value in vars(self).items():
            theirs = getattr(other, name, None)
            if isinstance(value, HParams) and isinstance(theirs, HParams):
                value.keep_unknown_of(theirs)

    def to_nested_dict(
        self, *, original_only: bool = False, with_unknown: bool = False
    ) -> dict[str, Any]:
        """Return all options as a nested dict, without unchanged options that this port added.

        original_only: leave out all options of this port. with_unknown: include `unknown`.
        """
        nested = dict(self.unknown) if with_unknown else {}
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.metadata.get('ours') and (original_only or value == f.default):
                continue
            if isinstance(value, HParams):
                value = value.to_nested_dict(original_only=original_only, with_unknown=with_unknown)
            nested[f.name] = value
        return nested

    def additions(self) -> dict[str, Any]:
        """Return {dotted name: value} of options that this port added; a group is 'on' or 'off'."""
        found = {}
        of_ours: tuple[str, ...] = ()  # prefixes of option groups that the original lacks
        for name, f, value in settings(self):
            if not f.metadata.get('ours') and not name.startswith(of_ours):
                continue
            if group_class(f.type):
                found[name] = 'off' if value is None else 'on'
                of_ours += (f'{name}.',)
            else:
                found[name] = value
        return found

    def problems(self) -> Iterator[tuple[object, str]]:
        """Yield pairs: whether a problem exists, and the message about it.

        In a message, {x} stands for the option --x, and {x=} for the option with its value.
        """
        yield from ()

    def validate(self, *, prefix: str = '') -> None:
        """Check all values of options; raise InvalidOptions for the first problem found.

        prefix: prefix of option names, see name_group.
        """
        if prefix:
            self.name_group(prefix)
        self.check_values()
        for f in dataclasses.fields(self):
            if isinstance(value := getattr(self, f.name), HParams):
                value.validate()
        for applies, message in self.problems():
            if applies:
                message_with_options = re.sub(r'\{([\w.]+)(=?)\}', self._named, message)
                raise InvalidOptions(message_with_options)

    def _named(self, match: re.Match[str]) -> str:
        return self.setting(match[1]) if match[2] else self.option_name(match[1])

    def check_values(self) -> None:
        """Raise TypeError for a value of the wrong type, ValueError for a value out of range."""
        for f in dataclasses.fields(self):
            name = self.option_name(f.name)
            value = getattr(self, f.name)
            if value is None and f.default is None and not _is_of_type(None, f.type):
                help = f.metadata.get('help') or describe(f.type)
                raise TypeError(f'{name} must be given: {help}')
            if not _is_of_type(value, f.type):
                raise TypeError(f'{name} must be {describe(f.type)}, got {value!r:.80}')
            option_checks.check_accepted(name, f.metadata, value)
            if isinstance(value, HParams):
                value.check_values()

    def has(self, key: str) -> bool:
        """Return whether a setting or group has this dotted name."""
        return key in fields(type(self))

    def _field(self, key: str) -> dataclasses.Field:
        try:
            return fields(type(self))[key]
        except KeyError:
            raise UnknownFieldError(
                f'{type(self).__module__}.{type(self).__name__} has no field {key!r}'
            ) from None


def settings(hparams: HParams, prefix: str = '') -> Iterator[tuple[str, dataclasses.Field, Any]]:
    """Yield (dotted name, field, value) for all settings and groups, a group before its fields."""
    for f in dataclasses.fields(hparams):
        name, value = prefix + f.name, getattr(hparams, f.name)
        yield name, f, value
        if isinstance(value, HParams):
            yield from settings(value, f'{name}.')


def value_of(hparams: Any, key: str) -> Any:
    """Return the value of the setting with a dotted name; None if its group is off."""
    for part in key.split('.'):
        hparams = getattr(hparams, part, None)
    return hparams


@functools.cache
def fields(cls: type[HParams]) -> dict[str, dataclasses.Field]:
    """Return {dotted name: field} for all fields of `cls` and its nested groups."""
    by_name = {}
    for f in dataclasses.fields(cls):
        by_name[f.name] = f
        group = group_class(f.type)
        if group:
            for key, field in fields(group).items():
                by_name[f'{f.name}.{key}'] = field
    return by_name


def members(ty: Any) -> tuple[Any, ...]:
    """Return the types that `ty` allows: the members of a Union, or `ty` alone."""
    is_union = typing.get_origin(ty) in (typing.Union, types.UnionType)
    return typing.get_args(ty) if is_union else (ty,)


def group_class(ty: Any) -> type[HParams] | None:
    """Return the HParams class in the type `ty`, which may be Optional; None if `ty` has none."""
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
    return ' or '.join(
        'on or off' if group_class(t) else _WORDS.get(t) or t.__name__ for t in members(ty)
    )


def dump(hparams: HParams, *, name: str = 'hparams') -> None:
    """Print `name:`, then sorted, indented lines `option: value`, as the original does."""
    nested = hparams.to_nested_dict(original_only=True)
    print(f'{name}:', *_dump_lines(nested, '  '), sep='\n')


def dump_additions(hparams: HParams) -> None:
    """Print the options that this port added, under their dotted names."""
    print('more options:', *_dump_lines(hparams.additions(), '  '), sep='\n')


def _dump_lines(nested: Mapping[str, Any], indent: str) -> Iterator[str]:
    for key, value in sorted(nested.items()):
        if isinstance(value, dict):
            yield f'{indent}{key}:'
            yield from _dump_lines(value, indent + '  ')
        else:
            yield f'{indent}{key}: {value}'


def parse(ty: Any, s: str | float) -> Any:
    """Return `s` converted to the type `ty`, which may be Optional; ValueError if impossible."""
    (kind,) = [t for t in members(ty) if t is not types.NoneType]
    words_for_none = ('None',) if kind is str else ('None', 'none', '')
    if types.NoneType in members(ty) and s in words_for_none:
        return None
    if kind is str:
        return s
    if kind in (int, float):
        return kind(s)
    values: dict[Any, Any] = {}
    if kind is bool:
        values = _BOOLS
    elif group_class(kind):
        values = {'on': 'on', 'off': 'off'}
    if s not in values:
        raise ValueError(f'{s!r} is not {describe(kind)}')
    return values[s]
