"""Fields of a record, found by common names for queries and system messages."""

import re
import unicodedata
from collections.abc import Collection, Mapping
from typing import Any

from lm_human_preferences.datasets.messages import USER, Message, query_text
from lm_human_preferences.errors import UserError

QUERIES = ('prompt', 'query', 'question', 'instruction', 'input')  # names of the query's field
SYSTEMS = ('system', 'system_prompt')  # names of the system message's field
# Matches a list of messages written as a text, such as in a cell of a table
WRITTEN_MESSAGES = re.compile(
    r"""\s*(\{\s*["']messages["']:\s*)?\[\s*\{\s*["'](role|content)["']:"""
)
INVISIBLE = {'Cc', 'Cf', 'Zl', 'Zp', 'Zs'}  # Unicode categories: controls and white space


def query_field(record: Mapping[str, Any], where: str) -> str | None:
    """Return the name of the field that holds the query; UserError if several differ."""
    found = None
    for name in QUERIES:
        value = record.get(name)
        if value is None or (found is not None and is_empty(value)):
            continue
        if found is not None and not is_empty(record[found]) and value != record[found]:
            raise UserError(
                f'{where} has two fields that may be the query, {found!r} and {name!r}: put all of'
                ' it into one, and rename or leave out the other'
            )
        found = name
    return found


def columns(record: Mapping[str, Any], known: Collection[str] = ()) -> dict[str, Any]:
    """Return the fields of a record besides its query, system message and `known` ones."""
    read = (*QUERIES, *SYSTEMS, *known)
    return {name: value for name, value in record.items() if name not in read}


def is_empty(value: Any) -> bool:
    """Return whether a field is empty: None, NaN, [], {}, or a text without visible characters."""
    if isinstance(value, str):
        return {unicodedata.category(letter) for letter in value} <= INVISIBLE
    return value is None or value in ([], {}) or value != value


def text_field(record: Mapping[str, Any], field: str, where: str) -> str:
    """Return a text of a record; UserError if it is missing, or a list of messages as text."""
    text = record.get(field)
    if not isinstance(text, str):
        state = f'is a {type(text).__name__}' if field in record else 'is missing'
        raise UserError(f'{where}, field {field!r} {state}: it must be a text')
    if WRITTEN_MESSAGES.match(text):
        raise UserError(
            f'{where}, field {field!r} is a list of messages that was written as a text: give JSON'
            ' lines with the list itself'
        )
    return text


def system_message(record: Mapping[str, Any], where: str) -> list[Message]:
    """Return a list with the system message that a record has in a field of its own, or [].

    UserError for several, or if it is not a text.
    """
    given = [record[name] for name in SYSTEMS if not is_empty(record.get(name))]
    if not given:
        return []
    if not isinstance(given[0], str) or given.count(given[0]) < len(given):
        names = ' or '.join(map(repr, SYSTEMS))
        raise UserError(f'{where}: the message of the system must be one text, in a field {names}')
    return [{'role': 'system', 'content': given[0]}]


def after_system(record: Mapping[str, Any], query: str, where: str) -> str:
    """Return the text of a query, preceded by the record's system message if it has one."""
    system = system_message(record, where)
    return query_text([*system, {'role': USER, 'content': query}], where) if system else query
