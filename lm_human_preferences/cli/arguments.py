"""Reads command lines as tolerantly as python-fire 0.1.3, the parser of the original, did.

`--a.b=v`, `--a.b v`, `--a-b v`, `--flag`, `--noflag` and quoted values are all good, before and
after the positionals. `read_words` tells what is given, as text; `convert` reads a value as the
type of its field says.
"""

import ast
import contextlib
import dataclasses
import difflib
import os
import re
import types
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from lm_human_preferences import shell
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
# From which likeness on one word may be meant by another: of parts of a name, and of whole names.
_ALIKE, _ALMOST = 0.66, 0.9
# What people call options that have short names.
_SPELT_OUT = {'lr': 'learning_rate', 'noptepochs': 'epochs', 'lam': 'lambda'}


def read_words(
    args: Sequence[str],
    fields: Mapping[str, dataclasses.Field],
    arguments: Mapping[str, str],
    positionals: Sequence[str] = (),
    *,
    rest: str | None = None,
    example: str = '',
    elsewhere: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, str | tuple[str, ...]]:
    """What the words after a command give, as text: {name: value} of options and arguments.

    fields: name -> dataclass field, of every option. arguments: name -> name shown, of what has to
    be given by position or as `--name`; positionals: names of options that may follow by position;
    rest: the argument that takes all words that are left, as a tuple. example: a command line to
    show where an argument is missing. elsewhere: options of other commands, and which these are,
    for the error about one. UserError says what is wrong. An option that may be given several times
    has a tuple of texts; of another the last one counts.
    Options are in the order in which they were given.
    """
    given: dict[str, str | tuple[str, ...]] = {}
    by_position = []
    words = [word for word in args if word != '--']
    bare_flag = None  # the switch right before this word, if it was given without a value
    while words:
        word = words.pop(0)
        if re.match('-[A-Za-z]', word):
            if os.path.exists(word):
                raise UserError(f'{word}: give a file whose name begins with a dash as ./{word}')
            raise UserError(f'{word}: options begin with two dashes: -{word}')
        if not word.startswith('--'):
            by_position.append((word, bare_flag))
            bare_flag = None
            continue
        name, equals, value = word[2:].partition('=')
        key, negated = _known(
            name, fields, arguments, may_negate=not equals, elsewhere=elsewhere or {}
        )
        waiting = len(words)
        if equals:
            text = value
        elif negated:
            text = 'False'
        else:
            text = _next_value(key, fields.get(key), words)
        before = given.pop(key, ())  # so that `given` is in the order of the last words
        given[key] = (*before, text) if _is_repeatable(key, fields) else text
        is_bare = not equals and len(words) == waiting
        bare_flag = key if is_bare and not negated else None
    _assign_by_position(given, by_position, fields, arguments, positionals, rest)
    missing = [shown for key, shown in arguments.items() if key not in given]
    if missing:
        advice = f'example: {shell.typed(example)}' if example else 'see --help'
        raise UserError(f'{" and ".join(missing)} missing; {advice}')
    return given


def _assign_by_position(
    given: dict[str, str | tuple[str, ...]],
    by_position: list[tuple[str, str | None]],
    fields: Mapping[str, dataclasses.Field],
    arguments: Mapping[str, str],
    positionals: Sequence[str],
    rest: str | None,
) -> None:
    """Add to `given` the words that are given by position; UserError for one too many.

    by_position: each such word, and the switch that stood right before it without a value. After a
    switch comes an argument, as in `--dry_run sentiment NAME`; where only options are left, it is a
    bad value of the switch.
    """
    keys = [key for key in (*arguments, *positionals) if key not in given]
    if rest in keys:
        place = keys.index(rest)
        words = tuple(word for word, _ in by_position[place:])
        if words:
            given[rest] = words
        keys, by_position = keys[:place], by_position[:place]
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
    elsewhere: Mapping[str, Sequence[str]],
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
    names = {**{key: key for key in fields}, **former_names}
    meant = _with_the_same_end(key, names)
    if meant is None and key in elsewhere:
        raise UserError(f'no such option: --{name}, which is one of {" and ".join(elsewhere[key])}')
    meant = meant or _spelt_alike(key, names)
    raise UserError(f'no such option: --{name}' + (f' (did you mean --{meant}?)' if meant else ''))


def did_you_mean(word: str, choices: Collection[str]) -> str:
    """A hint for an error message: the choice that is spelt like `word`, or nothing."""
    close = difflib.get_close_matches(word, sorted(choices), n=1, cutoff=_ALIKE)
    return f' (did you mean {close[0]}?)' if close else ''


def _with_the_same_end(key: str, names: Mapping[str, str]) -> str | None:
    """The option whose name ends in `key`, or in whose name `key` ends; None if there is none.

    names: {dotted name, which may be a former one: option}.
    """
    found = [name for name in names if name.endswith(f'.{key}') or key.endswith(f'.{name}')]
    return names[min(found, key=len)] if found else None


def _spelt_alike(key: str, names: Mapping[str, str]) -> str | None:
    """The option that an unknown dotted name may have meant; None if none is spelt like it.

    The last part of a name tells more than its group. names: see `_with_the_same_end`.
    """
    group, _, leaf = key.rpartition('.')
    found = []
    for name in sorted(names):
        its_group, _, its_leaf = name.rpartition('.')
        of_leaf = max(_likeness(leaf, its_leaf), _likeness(leaf, _SPELT_OUT.get(its_leaf, '')))
        of_group = _likeness(group, its_group) if group else 1.0
        of_all = _likeness(key.replace('.', '_'), name.replace('.', '_'))
        if of_leaf == 1 or min(of_leaf, of_group) >= _ALIKE or of_all >= _ALMOST:
            likeness = max(of_leaf + of_group, 2 * of_all)
            found.append((of_leaf == 1, likeness, -len(name), name))
    return names[max(found)[-1]] if found else None


def _likeness(a: str, b: str) -> float:
    """From 0 to 1, for texts that are equal."""
    return difflib.SequenceMatcher(None, a, b).ratio()


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
