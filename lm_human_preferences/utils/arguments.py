"""Reads command lines as tolerantly as python-fire 0.1.3, the parser of the original, did.

`--a.b=v`, `--a.b v`, `--a-b v`, `--flag`, `--noflag` and quoted values are all good, before and
after the positionals. `read_words` tells what is given, as text; `convert` reads a value as the
type of its field says.
"""

import ast
import contextlib
import dataclasses
import difflib
import re
import types
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from lm_human_preferences.errors import UserError
from lm_human_preferences.utils.hyperparams import (
    TEXTS,
    describe,
    group_class,
    members,
    parse,
    renamed,
)

_SWITCHES = {
    'on': 'on',
    't': 'on',
    'true': 'on',
    'off': 'off',
    'f': 'off',
    'false': 'off',
    'none': 'off',
    '': 'off',
}


def read_words(
    args: Sequence[str],
    fields: Mapping[str, dataclasses.Field],
    arguments: Mapping[str, str],
    positionals: Sequence[str] = (),
    *,
    example: str = '',
) -> dict[str, str | tuple[str, ...]]:
    """What the words after a command give, as text: {name: value} of options and arguments.

    fields: name -> dataclass field, of every option. arguments: name -> name shown, of what has to
    be given by position or as `--name`; positionals: names of options that may follow by position;
    example: a command line to show where an argument is missing. UserError says what is wrong. An
    option that may be given several times has a tuple of texts; of another the last one counts.
    """
    given: dict[str, str | tuple[str, ...]] = {}
    by_position = []
    words = [word for word in args if word != '--']
    bare_flag = None  # the switch right before this word, if it was given without a value
    while words:
        word = words.pop(0)
        if re.match('-[A-Za-z]', word):
            raise UserError(f'{word}: options begin with two dashes: -{word}')
        if not word.startswith('--'):
            by_position.append((word, bare_flag))
            bare_flag = None
            continue
        name, equals, value = word[2:].partition('=')
        key, negated = _known(name, fields, arguments, may_negate=not equals)
        waiting = len(words)
        if equals:
            text = value
        elif negated:
            text = 'False'
        else:
            text = _next_value(key, fields.get(key), words)
        given[key] = (*given.get(key, ()), text) if _is_repeatable(key, fields) else text
        is_bare = not equals and len(words) == waiting
        bare_flag = key if is_bare and not negated else None
    _assign_by_position(given, by_position, fields, arguments, positionals)
    missing = [shown for key, shown in arguments.items() if key not in given]
    if missing:
        raise UserError(
            f'{" and ".join(missing)} missing; {f"example: {example}" if example else "see --help"}'
        )
    return given


def _assign_by_position(
    given: dict[str, str | tuple[str, ...]],
    by_position: list[tuple[str, str | None]],
    fields: Mapping[str, dataclasses.Field],
    arguments: Mapping[str, str],
    positionals: Sequence[str],
) -> None:
    """Add to `given` the words that are given by position; UserError for one too many.

    by_position: each such word, and the switch that stood right before it without a value. After a
    switch comes an argument, as in `--dry_run sentiment NAME`; where only options are left, it is a
    bad value of the switch.
    """
    keys = [key for key in (*arguments, *positionals) if key not in given]
    for key, (word, bare_flag) in zip(keys, by_position):
        if key in arguments:
            given[key] = word
            continue
        if bare_flag is not None:
            break
        with contextlib.suppress(UserError):  # a word that does not convert is reported below
            convert(key, fields[key], word)
            given[key] = word
            continue
        break
    used = sum(key in given for key in keys)
    for word, bare_flag in by_position[used:]:
        if bare_flag is not None:
            raise UserError(
                f'--{bare_flag} must be {describe(fields[bare_flag].type)}, got {word!r}'
            )
        raise UserError(f'unexpected argument {word!r}: options are given as --name value')


def _known(
    name: str,
    fields: Mapping[str, dataclasses.Field],
    arguments: Mapping[str, str],
    may_negate: bool,
) -> tuple[str, bool]:
    """The option that `name` means, and whether a `no` before it switches it off."""
    key = name.replace('-', '_')
    former_names = renamed(fields)
    current = former_names.get(key, key)
    if current in fields or current in arguments:
        return current, False
    if may_negate and key.startswith('no'):
        flag = key.removeprefix('no')
        flag = former_names.get(flag, flag)
        if flag in fields and _is_flag(fields[flag]):
            return flag, True
    raise UserError(
        f'no such option: --{name}' + did_you_mean(f'--{name}', [f'--{key}' for key in fields])
    )


def did_you_mean(word: str, choices: Collection[str]) -> str:
    """A hint for an error message: the choice that `word` may have meant, or nothing.

    It ends in `.word` or is spelt like `word`.
    """
    close = sorted(
        (choice for choice in choices if choice.endswith(word.replace('--', '.'))), key=len
    ) or difflib.get_close_matches(word, sorted(choices), n=1, cutoff=0.7)
    return f' (did you mean {close[0]}?)' if close else ''


def _is_repeatable(key: str, fields: Mapping[str, dataclasses.Field]) -> bool:
    return key in fields and TEXTS in members(fields[key].type)


def _is_flag(field: dataclasses.Field) -> bool:
    return bool in members(field.type) or group_class(field.type) is not None


def _next_value(key: str, field: dataclasses.Field | None, words: list[str]) -> str:
    """Take the option's value from `words`, those after the option.

    A flag without a value is on. A number without one is 1 at the end of a command line, which is
    recorded of the original; before another option, the value was forgotten: UserError.
    """
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


def convert(key: str, field: dataclasses.Field, text: str | tuple[str, ...]) -> Any:
    """The value of option `key` given as `text`.

    UserError names the option, the text and the expected type.

    text: of an option that may be given several times, a tuple of texts, which are taken as they
    are.
    """
    if TEXTS in members(field.type):
        return tuple(_checked_text(key, one) for one in text)
    assert isinstance(text, str)
    # Of the options of the original, a bool cannot be on or off.
    if field.metadata.get('ours') and bool in members(field.type):
        text = {'on': 'true', 'off': 'false'}.get(text, text)
    try:
        return _read(field.type, text)
    except (ValueError, OverflowError):
        raise UserError(f'--{key} must be {describe(field.type)}, got {text!r}') from None


def _checked_text(key: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(
            f'--{key} {text!a} is not text in the encoding of this terminal; is the locale '
            'right, such as LC_ALL=C.UTF-8?'
        ) from None
    return text


def _read(ty: Any, text: str) -> Any:
    """What hyperparams.parse makes of `text`, but any case, quotes, and 1e3 as an int will do."""
    allowed = members(ty)
    plain = _unquote(text)
    if str in allowed:
        plain.encode()  # UnicodeEncodeError, a ValueError, for what is not text
        if text == 'None' and types.NoneType not in allowed:
            raise ValueError(text)
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
    """`text` without quotes around it: they were needed to keep 'off' or '5' a string."""
    literal = _literal(text) if text[:1] in ('"', "'") else None
    return literal if isinstance(literal, str) else text


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
