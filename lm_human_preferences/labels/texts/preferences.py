"""Parser of preferences: records with a chosen and a rejected response to the same query.

The query has its own field, or is the common beginning of two dialogues. A dialogue is a list of
messages, or a transcript as in the data set hh-rlhf.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from lm_human_preferences.datasets import messages
from lm_human_preferences.datasets.messages import (
    USER,
    Message,
    UnusableError,
    as_plain,
    query_text,
    response_text,
)
from lm_human_preferences.errors import UserError

HUMAN, ASSISTANT = '\n\nHuman:', '\n\nAssistant:'  # strings that begin a turn of a transcript
PAIR = ('chosen', 'rejected')


def preference(record: Mapping[str, Any], where: str) -> tuple[str, tuple[str, str]]:
    """Return (query, (chosen, rejected response)) of a record; UserError if it lacks a pair."""
    if all(isinstance(record.get(name), str) for name in PAIR):
        chosen, rejected = (messages.text_field(record, name, where) for name in PAIR)
        if _is_transcript(chosen) and _is_transcript(rejected):
            return _split_transcripts(record, chosen, rejected, where)
        return _query(record, [], where), (chosen, rejected)
    chosen, rejected = (as_plain(record.get(name), where) for name in PAIR)
    if chosen is None or rejected is None:
        raise UserError(
            f"{where}: 'chosen' and 'rejected' must both be texts, or lists of messages with a role"
            ' and a content'
        )
    # The messages with which both dialogues begin belong to the query.
    shared = _common_length(_comparable(chosen[:-1]), _comparable(rejected[:-1]))
    for dialogue in (chosen, rejected):
        if len(dialogue) > 1 and dialogue[shared]['role'] == USER:
            raise UnusableError(f'{where}: the two answers reply to different user messages')
        if len(dialogue) > 1 and dialogue[-1]['role'] == USER:
            raise UserError(f'{where}: a dialogue ends with a turn of the user, which is no answer')
    query = _query(record, chosen[:shared], where)
    return query, (response_text(chosen[shared:]), response_text(rejected[shared:]))


def is_dialogue(text: str) -> bool:
    """Return whether a text is a dialogue: messages with their roles, or a transcript."""
    return messages.is_dialogue(text) or _is_transcript(text)


def _is_transcript(text: str) -> bool:
    return text.lstrip().startswith(HUMAN.strip()) and ASSISTANT in text


def _split_transcripts(
    record: Mapping[str, Any], chosen: str, rejected: str, where: str
) -> tuple[str, tuple[str, str]]:
    """Return (query, responses); responses begin with the first assistant turn that differs."""
    field = messages.query_field(record, where)
    if field is not None and not messages.is_empty(record[field]):
        raise UserError(
            f"{where}: 'chosen' and 'rejected' are whole transcripts, which hold the query: remove"
            f' the field {field!r}, or leave only the answers in the transcripts'
        )
    same = chosen[: _common_length(chosen, rejected)]
    turn = same.rfind(ASSISTANT)
    if turn <= same.rfind(HUMAN):
        raise UnusableError(f'{where}: the two answers reply to different Human turns')
    end = turn + len(ASSISTANT)
    return messages.after_system(record, chosen[:end], where), (chosen[end:], rejected[end:])


def _query(record: Mapping[str, Any], shared: list[Message], where: str) -> str:
    """Return the query of a record as text. shared: messages that begin both dialogues, if any."""
    field = messages.query_field(record, where) or 'prompt'
    prompt = as_plain(record.get(field), where)
    if prompt is None and not (shared and messages.is_empty(record.get(field))):
        text = messages.text_field(record, field, where)
        if not shared:
            return messages.after_system(record, text, where)
        prompt = [{'role': USER, 'content': text}]
    # The longer list may begin with additional messages, such as a system message.
    fewer, query = sorted((shared, prompt or []), key=len)
    if _comparable(query[len(query) - len(fewer) :]) != _comparable(fewer):
        raise UserError(
            f'{where}: both dialogues begin with a query that differs from the field {field!r}:'
            ' remove this field, or leave only the answers in the dialogues'
        )
    system = messages.system_message(record, where)
    if _comparable(query[: len(system)]) != _comparable(system):
        query = [*system, *query]
    return query_text(query, where)


def _common_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return the length of the common beginning of two sequences."""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second))
    return sum(1 for _ in same)


def _comparable(dialogue: Sequence[Message]) -> list[tuple[str, str]]:
    """Return [(role, stripped content)] of the messages, for comparing dialogues."""
    return [(message['role'], message['content'].strip()) for message in dialogue]
