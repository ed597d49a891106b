"""Parser of command lines, as tolerant as python-fire 0.1.3, the parser of the original."""

import ast
import contextlib
import os
import types
from collections.abc import Mapping, Sequence
from dataclasses import Field
from typing import Any

import click

from lm_human_preferences.errors import UserError
from lm_human_preferences.utils.hyperparams import (
    TEXTS,
    describe,
    group_class,
    members,
    parse,
)

_SWITCHES = {
    **dict.fromkeys(('on', 't', 'true'), 'on'),
    **dict.fromkeys(('off', 'f', 'false', 'none', ''), 'off'),
}
Fields = Mapping[str, Field]
Given = dict[str, str | tuple[str, ...]]


def read_words(
    args: Sequence[str],
    fields: Fields,
    arguments: Mapping[str, str],
    positionals: Sequence[str] = (),
    *,
    rest: str | None = None,
) -> Given:
    """Parse a command line to {option: text}; a repeatable option gets a tuple of all its texts.

    arguments: {name: name in messages} of required arguments, given by position or as `--name`.
    positionals: options that may follow without `--name`. rest: argument with all remaining words.
    """
    given: Given = {}
    by_position: list[str] = []
    words = list(args)
    while words:
        word = words.pop(0)
        if word == '--':
            by_position += words
            break
        if not word.startswith('--'):
            by_position.append(word)
            continue
        name, equals, text = word[2:].partition('=')
        key, negated = _known(name, fields, arguments, not equals)
        if negated:
            text = 'False'
        elif not equals:
            text = _next_value(key, fields.get(key), words)
        is_repeatable = key in fields and TEXTS in members(fields[key].type)
        given[key] = (*given.get(key, ()), text) if is_repeatable else text
    left = _assign_by_position(given, by_position, fields, arguments, positionals, rest)
    if left:
        raise UserError(
            f'unexpected argument {left[0]!r}: options are given as --name value, and a switch'
            ' takes true, false, on or off'
        )
    missing = [shown for key, shown in arguments.items() if key not in given]
    if missing:
        raise UserError(f'{" and ".join(missing)} missing; see --help')
    return given


def _assign_by_position(
    given: Given,
    by_position: list[str],
    fields: Fields,
    arguments: Mapping[str, str],
    positionals: Sequence[str],
    rest: str | None,
) -> list[str]:
    """Add positional words to `given` under the names of their arguments; return leftover words."""
    keys = [key for key in (*arguments, *positionals) if key not in given]
    if rest in keys:
        place = keys.index(rest)
        if by_position[place:]:
            given[rest] = tuple(by_position[place:])
        keys, by_position = keys[:place], by_position[:place]
    elif rest is not None and isinstance(text := given[rest], str):
        given[rest] = (text,)
    for key in keys:
        if not by_position:
            break
        if key not in arguments and not _converts(key, fields[key], by_position[0]):
            break
        given[key] = by_position.pop(0)
    return by_position


def _converts(key: str, field: Field, word: str) -> bool:
    with contextlib.suppress(UserError):
        convert(key, field, word)
        return True
    return False


def _known(
    name: str, fields: Fields, arguments: Mapping[str, str], may_negate: bool
) -> tuple[str, bool]:
    """Return (key of option or argument `name`, whether a leading 'no' in `name` negates it)."""
    key = name.replace('-', '_')
    if key in fields or key in arguments:
        return key, False
    flag = key.removeprefix('no')
    if may_negate and key != flag and flag in fields and _is_flag(fields[flag]):
        return flag, True
    known = [f'--{option}' for option in (*fields, *arguments)]
    raise click.NoSuchOption(option_name=f'--{name}', possibilities=known)


def _is_flag(field: Field) -> bool:
    return bool in members(field.type) or group_class(field.type) is not None


def _next_value(key: str, field: Field | None, words: list[str]) -> str:
    """Pop the option's value from `words`; if there is none, return 'True' or raise UserError."""
    flag = field is not None and _is_flag(field)
    if (
        words
        and not words[0].startswith('--')
        and (not flag or _unquote(words[0]).lower() in {*_SWITCHES, '0', '1'})
    ):
        return words.pop(0)
    if flag:
        return 'True'
    if not words and field is not None and {int, float} & set(members(field.type)):
        return 'True'
    raise UserError(f'--{key} needs a value')


def convert(key: str, field: Field, text: str | tuple[str, ...]) -> Any:
    """Convert the text or texts of option `key` to the option's type; UserError for wrong text."""
    # Only boolean options that this port added accept 'on' and 'off'.
    if field.metadata.get('ours') and bool in members(field.type) and isinstance(text, str):
        text = {'on': 'true', 'off': 'false'}.get(text, text)
    try:
        value = _read(field.type, text) if isinstance(text, str) else text
        if isinstance(value, str | tuple):
            ''.join(value).encode()  # raises a ValueError if the text is not valid UTF-8
    except (ValueError, OverflowError):
        raise UserError(f'--{key} must be {describe(field.type)}, got {text!r}') from None
    return expanded(value) if field.metadata.get('path') else value


def expanded(path: str | tuple[str, ...] | None) -> Any:
    """Expand `~` in one or several typed paths, as in `--save_dir=~/runs`.

    Shells expand `~` only at the beginning of a word.
    """
    if isinstance(path, tuple):
        return tuple(map(os.path.expanduser, path))
    return path and os.path.expanduser(path)


def _read(ty: Any, text: str) -> Any:
    """Parse `text` as hyperparams.parse does, but accept any case, quotes, and 1e3 as an int."""
    allowed = members(ty)
    plain = _unquote(text)
    if str in allowed:
        if text == 'None' and types.NoneType not in allowed:
            raise ValueError('None was given for an option that must have a value')
        return None if text == 'None' else plain
    if group_class(ty):
        return parse(ty, _SWITCHES.get(plain.lower(), text))
    try:
        return parse(ty, plain.lower())
    except ValueError:
        number = _literal(plain)
        if (
            bool in allowed
            or not isinstance(number, (int, float))
            or (int in allowed and number % 1 != 0)
        ):
            raise
        return parse(ty, int(number) if int in allowed else number)


def _unquote(text: str) -> str:
    """Strip quotes, which the original's parser needed to read 'off' or '5' as a string."""
    literal = _literal(text) if text[:1] in ('"', "'") else None
    return literal if isinstance(literal, str) else text


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
