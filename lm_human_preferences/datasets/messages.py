"""Queries and dialogues in records of JSON, and their conversion to and from plain texts.

People read a list of chat messages {"role", "content"} as

    user: Which film is good?

    assistant: This one.

A single message is written as its content alone.
"""

import re
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from lm_human_preferences.errors import UserError

Message = dict[str, str]
USER, ASSISTANT = 'user', 'assistant'
ROLES = ('system', 'developer', USER, ASSISTANT, 'tool')
OTHER_ROLES = {'human': USER, 'gpt': ASSISTANT}  # ShareGPT's names of the roles user and assistant
QUERIES = ('prompt', 'query', 'question', 'instruction', 'input')  # fields that may hold the query
SYSTEMS = ('system', 'system_prompt')  # fields of a record that may hold its system message
# This expression matches a list of messages that was written as text, as in a table's cell.
WRITTEN_MESSAGES = re.compile(
    r"""\s*(\{\s*["']messages["']:\s*)?\[\s*\{\s*["'](role|content)["']:"""
)
INVISIBLE = {'Cc', 'Cf', 'Zl', 'Zp', 'Zs'}  # Unicode categories of invisible characters
_TURN = re.compile(rf'(?:\A|\n\n)({"|".join(ROLES)}): ')


class UnusableError(UserError):
    """Error: a message is not text, or two answers belong to different queries."""


def as_plain(value: Any, where: str) -> list[Message] | None:
    """Return the chat messages in a JSON `value`, contents as text; None if there are no messages.

    A content that is a list of parts is joined; UnusableError if a part is not text.
    """
    messages = [value] if isinstance(value, dict) else value
    if not isinstance(messages, list) or not messages:
        return None
    plain = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get('role'), str):
            return None
        if message.get('tool_calls') or message.get('function_call'):
            raise UnusableError(f'{where}: a message has a tool call, which is not text')
        content = message.get('content')
        if isinstance(content, list):
            content = ''.join(_text_of_part(part, where) for part in content)
        if not isinstance(content, str):
            return None
        plain.append({'role': _role(message['role'], where), 'content': content})
    return plain


def _role(name: str, where: str) -> str:
    role = OTHER_ROLES.get(name.lower(), name.lower())
    if role not in ROLES:
        known = ', '.join((*ROLES, *OTHER_ROLES))
        raise UserError(
            f'{where}: a message has the role {name!r:.40}, which is not one of {known}'
        )
    return role


def _text_of_part(part: Any, where: str) -> str:
    text = part.get('text') if isinstance(part, dict) else part
    is_text = not isinstance(part, dict) or part.get('type', 'text') == 'text'
    if not is_text or not isinstance(text, str):
        raise UnusableError(f'{where}: a message has a part that is not text')
    return text


def as_text(messages: Sequence[Message]) -> str:
    """Return messages as one text: a single message's content, or each content after its role."""
    if len(messages) == 1:
        return messages[0]['content']
    return '\n\n'.join(_with_role(message) for message in messages)


def response_text(messages: Sequence[Message]) -> str:
    """Return one text: a response without its role, then the messages after it with their roles."""
    first, *others = messages
    return '\n\n'.join([first['content'], *map(_with_role, others)])


def _with_role(message: Message) -> str:
    return f'{message["role"]}: {message["content"]}'


def is_dialogue(text: str) -> bool:
    """Return whether a text begins with a message's role, such as 'user: '."""
    return re.match(_TURN, text) is not None


def as_messages(text: str) -> list[Message]:
    """Return the messages in a dialogue's text; any other text is one message of the user."""
    if not is_dialogue(text):
        return [{'role': USER, 'content': text}]
    _, *parts = _TURN.split(text)
    return [{'role': role, 'content': content} for role, content in zip(parts[::2], parts[1::2])]


def query_text(messages: Sequence[Message], where: str) -> str:
    """Return a query's messages as one text; UserError if as_messages cannot restore them."""
    text = as_text(messages)
    same = [{'role': message['role'], 'content': message['content']} for message in messages]
    if as_messages(text) != same:
        raise UserError(
            f'{where}: the messages of the query cannot be joined to a text and split again.'
            f" A single message must be the user's, roles must be {', '.join(ROLES)}, and no"
            " content may hold an empty line before 'user: ' or another role"
        )
    return text


def query_field(record: Mapping[str, Any], where: str) -> str | None:
    """Return the name of a record's query field, or None; UserError if two such fields differ."""
    found = None
    for name in QUERIES:
        value = record.get(name)
        if value is None or (found is not None and is_empty(value)):
            continue
        if found is not None and not is_empty(record[found]) and value != record[found]:
            raise UserError(
                f'{where} has two fields that may be the query, {found!r} and {name!r}: put the'
                ' whole query into one, and rename or leave out the other'
            )
        found = name
    return found


def columns(record: Mapping[str, Any], known: Collection[str] = ()) -> dict[str, Any]:
    """Return a record's fields other than the query, the system message and `known` fields."""
    read = (*QUERIES, *SYSTEMS, *known)
    return {name: value for name, value in record.items() if name not in read}


def is_empty(value: Any) -> bool:
    """Return whether a field is empty: None, NaN, [], {}, or a text without visible characters."""
    if isinstance(value, str):
        return {unicodedata.category(letter) for letter in value} <= INVISIBLE
    return value is None or value in ([], {}) or value != value


def text_field(record: Mapping[str, Any], field: str, where: str) -> str:
    """Return the text in a record's `field`; UserError unless the field holds a plain text."""
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
    """Return [system message] of a record, or [] if it has none; UserError if it has two."""
    names = [name for name in SYSTEMS if not is_empty(record.get(name))]
    given = {text_field(record, name, where) for name in names}
    if len(given) > 1:
        raise UserError(f'{where} has two system messages, in {" and ".join(names)}')
    return [{'role': 'system', 'content': text} for text in given]


def after_system(record: Mapping[str, Any], query: str, where: str) -> str:
    """Return the text of a query, preceded by the record's system message if it has one."""
    system = system_message(record, where)
    return query_text([*system, {'role': USER, 'content': query}], where) if system else query
