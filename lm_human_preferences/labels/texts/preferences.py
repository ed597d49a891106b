"""Parses records with 'chosen' and 'rejected' into a query and two responses."""

import itertools
import re
import string
from collections.abc import Sequence
from typing import Any

from lm_human_preferences.datasets import fields
from lm_human_preferences.datasets.messages import USER, Message, as_plain, as_text
from lm_human_preferences.datasets.messages import is_dialogue as begins_with_role
from lm_human_preferences.errors import UserError
from lm_human_preferences.labels.texts import people

# Begin a turn of a dialogue in one string, as in the data set hh-rlhf.
HUMAN, ASSISTANT = '\n\nHuman:', '\n\nAssistant:'
PAIR = ('chosen', 'rejected')


class OtherQueryError(UserError):
    """Two dialogues that differ before their answers do, so that they answer different queries."""


def preference(record: dict[str, Any], where: str) -> tuple[str, tuple[str, str]]:
    """Return (query, the chosen and the rejected response); UserError if the record has none."""
    chosen, rejected = record.get('chosen'), record.get('rejected')
    if isinstance(chosen, str) and isinstance(rejected, str):
        return _parse_strings(record, chosen, rejected, where)
    dialogues = as_plain(chosen, where), as_plain(rejected, where)
    if dialogues[0] is not None and dialogues[1] is not None:
        return _parse_messages(record, dialogues[0], dialogues[1], where)
    missing = [field for field in PAIR if field not in record]
    which = f'field {missing[0]!r} is missing: ' if missing else 'fields '
    raise UserError(
        f"{where}, {which}'chosen' and 'rejected' must both be texts, or lists of messages with a"
        ' role and a content'
    )


def _parse_strings(
    record: dict[str, Any], chosen: str, rejected: str, where: str
) -> tuple[str, tuple[str, str]]:
    """Return (query, responses); without a prompt, of two dialogues that begin alike."""
    field, text = fields.query_field(record, where), ''
    if field is not None:
        prompt = as_plain(record[field], where)
        if prompt is not None:
            return as_text(_with_system(record, prompt)), (chosen, rejected)
        text = fields.text_field(record, field, where)
    for repeated in (text, text.strip()):
        if _begins_with(chosen, repeated) and _begins_with(rejected, repeated):
            responses = chosen[len(repeated) :], rejected[len(repeated) :]
            return fields.after_system(record, text), responses
    if field is not None and not (_is_dialogue(chosen) and _is_dialogue(rejected)):
        return fields.after_system(record, text), (chosen, rejected)
    end = _end_of_prompt(record, chosen, rejected, where)
    if text.strip() not in chosen[:end]:
        raise UserError(
            f'{where}: both dialogues begin with another query than the field {field!r}: leave that'
            ' out, or all of them but the answers'
        )
    return fields.after_system(record, chosen[:end]), (chosen[end:], rejected[end:])


def is_dialogue(text: str) -> bool:
    """Return whether a text is several messages, or a transcript as those of hh-rlhf."""
    return begins_with_role(text) or _is_dialogue(text)


def _is_dialogue(text: str) -> bool:
    return text.lstrip().startswith(HUMAN.strip()) and ASSISTANT in text


def _begins_with(response: str, prompt: str) -> bool:
    """Return whether a response begins with the whole prompt, and not within a word."""
    is_within_word = prompt[-1:].isalnum() and response[len(prompt) :][:1].isalnum()
    return bool(prompt.strip()) and response.startswith(prompt) and not is_within_word


def _end_of_prompt(record: dict[str, Any], chosen: str, rejected: str, where: str) -> int:
    """Return where a shared prompt ends: at the assistant's turn, or after a whole word."""
    same = chosen[: _common_prefix_length(chosen, rejected)]
    turn = same.rfind(ASSISTANT)
    if turn > same.rfind(HUMAN):
        return turn + len(ASSISTANT)
    if ASSISTANT in chosen or ASSISTANT in rejected:
        raise OtherQueryError(
            f"{where}, field 'prompt' is missing: 'chosen' and 'rejected' differ before the first"
            ' turn of the assistant, or first in a later turn of the human'
        )
    fields.check_other_names(record, (*PAIR, *people.FIELDS), where)
    end = max(same.rfind(character) for character in string.whitespace)
    if end >= 0 and same[end] != ' ':
        end += 1
    if not same[: max(end, 0)].strip():
        raise UserError(
            f"{where}, field 'prompt' is missing: it must be a text, or what 'chosen' and"
            " 'rejected' both begin with"
        )
    return end


def _parse_messages(
    record: dict[str, Any], chosen: list[Message], rejected: list[Message], where: str
) -> tuple[str, tuple[str, str]]:
    """Return (query, responses): what both dialogues begin with belongs to the query."""
    shared = _common_prefix_length(_comparable(chosen[:-1]), _comparable(rejected[:-1]))
    for dialogue in (chosen, rejected):
        if len(dialogue) > 1 and dialogue[shared]['role'] == USER:
            raise OtherQueryError(f'{where}: both dialogues differ first in a turn of the user')
    query = chosen[:shared]
    field = fields.query_field(record, where)
    if field is not None and not fields.is_empty(record[field]):
        prompt = as_plain(record[field], where)
        if prompt is None:
            prompt = [{'role': USER, 'content': fields.text_field(record, field, where)}]
        if _comparable(query[-len(prompt) :]) != _comparable(prompt):
            more = query[_overlap_length(prompt, query) :]
            if more and more[0]['role'] == prompt[-1]['role'] == USER:
                raise UserError(
                    f'{where}: both dialogues begin with another query than the field {field!r}:'
                    ' leave one of them out'
                )
            query = [*prompt, *more]
    if not query:
        raise UserError(f"{where}, field 'prompt' is missing: it must be a text or messages")
    query = _with_system(record, query)
    return as_text(query), (as_text(chosen[shared:]), as_text(rejected[shared:]))


def _comparable(messages: Sequence[Message]) -> list[tuple[str, str]]:
    """Return messages as they are compared: white space around them makes no difference."""
    return [(message['role'], message['content'].strip()) for message in messages]


def _common_prefix_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return how many items two sequences both begin with."""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second))
    return sum(1 for _ in same)


def _overlap_length(prompt: Sequence[Message], query: Sequence[Message]) -> int:
    """Return how many messages `query` begins with that `prompt` ends with."""
    for count in range(min(len(prompt), len(query)), 0, -1):
        if _comparable(prompt[-count:]) == _comparable(query[:count]):
            return count
    return 0


def _with_system(record: dict[str, Any], query: list[Message]) -> list[Message]:
    """Return messages with that of the system before them, unless they begin with it."""
    system = fields.system_message(record)
    is_there = _comparable(query[: len(system)]) == _comparable(system)
    return query if is_there else [*system, *query]


def has_human_turn(response: str) -> bool:
    """Return whether a response goes on with a turn of the human."""
    return re.search(rf'\n\n(Human:|{USER}: )', response) is not None
