"""Preferences between two responses: query and answers of a record."""

import string
from collections.abc import Sequence
from typing import Any

from lm_human_preferences.datasets.messages import USER, Message, as_plain, as_text
from lm_human_preferences.errors import UserError

SYSTEMS = ('system', 'system_prompt')  # fields with the message of the system, which begins a query
# Begins a turn of a dialogue in one string, as in the data set hh-rlhf.
ASSISTANT = '\n\nAssistant:'


def text_field(record: dict[str, Any], field: str, where: str) -> str:
    """Return a text of a record; UserError if there is none."""
    text = record.get(field)
    if not isinstance(text, str):
        state = f'is a {type(text).__name__}' if field in record else 'is missing'
        raise UserError(f'{where}, field {field!r} {state}: it must be a text')
    return text


def _system(record: dict[str, Any]) -> list[Message]:
    """Return the message of the system that a record has in a field of its own; [] for none."""
    for name in SYSTEMS:
        content = record.get(name)
        if isinstance(content, str) and content.strip():
            return [{'role': 'system', 'content': content}]
    return []


def after_system(record: dict[str, Any], query: str) -> str:
    """Return a query that is a text, with the message of the system before it."""
    system = _system(record)
    return as_text([*system, {'role': USER, 'content': query}]) if system else query


def preference(record: dict[str, Any], where: str) -> tuple[str, tuple[str, str]]:
    """Return (query, the chosen and the rejected response); UserError if the record has none."""
    chosen, rejected = record.get('chosen'), record.get('rejected')
    if isinstance(chosen, str) and isinstance(rejected, str):
        return _of_strings(record, chosen, rejected, where)
    dialogues = as_plain(chosen, where), as_plain(rejected, where)
    if dialogues[0] is not None and dialogues[1] is not None:
        return _of_messages(record, dialogues[0], dialogues[1], where)
    missing = [field for field in ('chosen', 'rejected') if field not in record]
    which = f'field {missing[0]!r} is missing: ' if missing else 'fields '
    raise UserError(
        f"{where}, {which}'chosen' and 'rejected' must both be texts, or lists of messages with a"
        ' role and a content'
    )


def _of_strings(
    record: dict[str, Any], chosen: str, rejected: str, where: str
) -> tuple[str, tuple[str, str]]:
    """Return (query, responses); without a prompt, of two dialogues that begin alike."""
    if record.get('prompt') is None:
        end = _end_of_prompt(chosen, rejected, where)
        return after_system(record, chosen[:end]), (chosen[end:], rejected[end:])
    prompt = as_plain(record['prompt'], where)
    if prompt is not None:
        return as_text(_with_system(record, prompt)), (chosen, rejected)
    text = text_field(record, 'prompt', where)
    if _repeats(chosen, text) and _repeats(rejected, text):
        chosen, rejected = chosen[len(text) :], rejected[len(text) :]
    return after_system(record, text), (chosen, rejected)


def _repeats(response: str, prompt: str) -> bool:
    """Return whether a response begins with the whole prompt, and not within a word."""
    is_within_word = prompt[-1:].isalnum() and response[len(prompt) :][:1].isalnum()
    return bool(prompt.strip()) and response.startswith(prompt) and not is_within_word


def _end_of_prompt(chosen: str, rejected: str, where: str) -> int:
    """Return where a shared prompt ends: at the assistant's turn, or after a whole word."""
    same = chosen[: _shared(chosen, rejected)]
    turn = same.rfind(ASSISTANT)
    if turn >= 0:
        return turn + len(ASSISTANT)
    if ASSISTANT in chosen or ASSISTANT in rejected:
        raise UserError(
            f"{where}, field 'prompt' is missing: 'chosen' and 'rejected' differ before the first"
            ' turn of the assistant'
        )
    end = max(same.rfind(character) for character in string.whitespace)
    if end >= 0 and same[end] != ' ':
        end += 1
    if not same[: max(end, 0)].strip():
        raise UserError(
            f"{where}, field 'prompt' is missing: it must be a text, or what 'chosen' and"
            " 'rejected' both begin with"
        )
    return end


def _of_messages(
    record: dict[str, Any],
    chosen: list[Message],
    rejected: list[Message],
    where: str,
) -> tuple[str, tuple[str, str]]:
    """Return (query, responses): what both dialogues begin with belongs to the query."""
    shared = _shared(chosen[:-1], rejected[:-1])
    query = chosen[:shared]
    if record.get('prompt') is not None:
        prompt = as_plain(record['prompt'], where)
        if prompt is None:
            prompt = [{'role': USER, 'content': text_field(record, 'prompt', where)}]
        if query[-len(prompt) :] != prompt:
            query = [*prompt, *query[_repeated(prompt, query) :]]
    if not query:
        raise UserError(f"{where}, field 'prompt' is missing: it must be a text or messages")
    query = _with_system(record, query)
    return as_text(query), (as_text(chosen[shared:]), as_text(rejected[shared:]))


def _shared(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return how many items two sequences both begin with."""
    count = 0
    for one, other in zip(first, second):
        if one != other:
            break
        count += 1
    return count


def _repeated(prompt: Sequence[Message], query: Sequence[Message]) -> int:
    """Return how many messages `query` begins with that `prompt` ends with."""
    for count in range(min(len(prompt), len(query)), 0, -1):
        if prompt[-count:] == query[:count]:
            return count
    return 0


def _with_system(record: dict[str, Any], query: list[Message]) -> list[Message]:
    """Return messages with that of the system before them, unless they begin with it."""
    system = _system(record)
    return query if query[: len(system)] == system else [*system, *query]
