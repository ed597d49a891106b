"""Dialogues as lists of chat messages {"role", "content"}, and as the texts that people read.

    user: Which film is good?

    assistant: This one.

A message without others is its content alone.
"""

import re
from collections.abc import Sequence
from typing import Any, TypeGuard

from lm_human_preferences.errors import UserError

Message = dict[str, str]
USER = 'user'
ROLES = ('system', 'developer', USER, 'assistant', 'tool')
_TURN = re.compile(rf'(?:\A|\n\n)({"|".join(ROLES)}): ')


def are_messages(value: Any) -> TypeGuard[list[Message]]:
    """Whether `value`, which was read from JSON, is a list of messages with at least one."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(message, dict)
            and isinstance(message.get('role'), str)
            and isinstance(message.get('content'), str)
            for message in value
        )
    )


def as_text(messages: Sequence[Message]) -> str:
    """One message is its content; each of several begins with its role."""
    if len(messages) == 1:
        return messages[0]['content']
    return '\n\n'.join(f'{message["role"]}: {message["content"]}' for message in messages)


def is_dialogue(text: str) -> bool:
    """Whether a text begins with the role of a message."""
    return re.match(_TURN, text) is not None


def as_messages(text: str) -> list[Message]:
    """The messages of a dialogue; any other text is one message of the user."""
    if not is_dialogue(text):
        return [{'role': USER, 'content': text}]
    _, *parts = _TURN.split(text)
    return [{'role': role, 'content': content} for role, content in zip(parts[::2], parts[1::2])]


def query_text(messages: Sequence[Message], where: str) -> str:
    """The text of messages that are a query; UserError where it could not be read as them again."""
    text = as_text(messages)
    same = [{'role': message['role'], 'content': message['content']} for message in messages]
    if as_messages(text) != same:
        raise UserError(
            f'{where}: these messages cannot be told apart as a text. A message without others must'
            f' be of the user, roles must be {", ".join(ROLES)}, and no content may hold an empty'
            " line before 'user: ' or another role"
        )
    return text
