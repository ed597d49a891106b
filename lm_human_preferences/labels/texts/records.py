"""The formats in which other tools keep labels as texts; each record is turned into TextLabels.

    {"query", "sample0", "sample1", .., "best"}   the fields of a label, as strings
    {"prompt", "chosen", "rejected"}              preferences
    {"data", "annotations"}                       a task in Label Studio's JSON export

Preferences are strings, or lists of chat messages {"role", "content"}; the task is one of Label
Studio's pairwise template.

A file is a JSON array of records, or has one a line if its name ends in .jsonl.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError
from lm_human_preferences.labels.answers import answer_field, is_number, sample_names

PROMPTS = ('prompt', 'query', 'question')  # where a task of Label Studio may have its query
# The last turn of a dialogue in one string, as in the data set hh-rlhf.
ASSISTANT = '\n\nAssistant:'


@dataclasses.dataclass(frozen=True)
class TextLabel:
    """A question in words, and its answer.

    answer: as a label of its type has it; None where the record has none. labeller: who gave it,
    if the record says so. seconds: how long that took, 0 where it is not known. is_ordered: whether
    the samples are in the order in which they were shown.
    """

    query: str
    samples: tuple[str, ...]
    answer: float | None
    labeller: str | None = None
    seconds: float = 0.0
    is_ordered: bool = True


def read(path: str) -> list[tuple[str, Any]]:
    """The records of a local or remote file, each with where it is.

    Empty lines are passed over. UserError for what is not JSON.
    """
    if not path.endswith('.jsonl'):
        records = storage.read_json(path)
        if not isinstance(records, list):
            raise UserError(
                f'{path} must hold a JSON array of labels, not a {type(records).__name__}'
            )
        return [(f'{path}, label {index}', record) for index, record in enumerate(records)]
    found = []
    text = storage.without_bom(storage.read_text(path))
    for number, line in enumerate(text.split('\n'), start=1):
        if not line.strip():
            continue
        where = f'{path}, line {number}'
        try:
            found.append((where, json.loads(line)))
        except (ValueError, RecursionError) as e:
            raise UserError(f'{where} is not JSON: {e}') from e
    return found


def is_text(record: Any) -> bool:
    """Whether a record is of one of the formats above, and not token ids."""
    if not isinstance(record, dict):
        return False
    return isinstance(record.get('query'), str) or not {'chosen', 'annotations'}.isdisjoint(record)


def parse(
    record: Any, where: str, label_type: str, *, needs_answer: bool = True
) -> list[TextLabel]:
    """The labels in a record; none in a task of Label Studio that was skipped.

    UserError, which says `where` it is, for a record that is of no format or does not fit the label
    type.
    """
    if not isinstance(record, dict):
        raise UserError(f'{where} is a {type(record).__name__}, not an object')
    if 'annotations' in record:
        _check_pairs(label_type, where)
        return list(_of_label_studio(record, where))
    if 'chosen' in record or 'rejected' in record:
        _check_pairs(label_type, where)
        return [preference(record, where)]
    if isinstance(record.get('query'), str):
        return [_of_label(record, where, label_type, needs_answer)]
    raise UserError(
        f'{where} holds no texts that are known: neither query and samples, nor prompt, chosen and'
        ' rejected, nor data and annotations of Label Studio'
    )


def _check_pairs(label_type: str, where: str) -> None:
    if label_type != 'best_of_2':
        raise UserError(
            f'{where} says which of two responses is better: give --labels.type best_of_2, not'
            f' {label_type}'
        )


def text_field(record: dict[str, Any], field: str, where: str) -> str:
    """A text of a record; UserError where there is none."""
    text = record.get(field)
    if not isinstance(text, str):
        state = f'is a {type(text).__name__}' if field in record else 'is missing'
        raise UserError(f'{where}, field {field!r} {state}: it must be a text')
    return text


def _of_label(record: dict[str, Any], where: str, label_type: str, needs_answer: bool) -> TextLabel:
    samples = tuple(text_field(record, name, where) for name in sample_names(label_type))
    field = answer_field(label_type)
    answer = None
    if field in record or needs_answer:
        answer = _checked_answer(record.get(field), field, len(samples), where)
    return TextLabel(record['query'], samples, answer)


def _checked_answer(value: Any, field: str, count: int, where: str) -> float:
    if field == 'best':
        if type(value) is int and 0 <= value < count:
            return value
        expected = f'a whole number from 0 to {count - 1}'
    else:
        if is_number(value):
            return value
        expected = 'a number'
    raise UserError(f'{where}, field {field!r} must be {expected}, not {value!r:.80}')


# ---------------------------------------------------------------- preferences


def preference(record: dict[str, Any], where: str) -> TextLabel:
    """The label in a record of a chosen and a rejected response; UserError if it is none."""
    chosen, rejected = record.get('chosen'), record.get('rejected')
    if isinstance(chosen, str) and isinstance(rejected, str):
        query, samples = _of_strings(record, chosen, rejected, where)
    elif _are_messages(chosen) and _are_messages(rejected):
        query, samples = _of_messages(record, chosen, rejected, where)
    else:
        raise UserError(
            f"{where}, fields 'chosen' and 'rejected' must both be texts, or lists of messages with"
            ' a role and a content'
        )
    return TextLabel(query, samples, answer=0, is_ordered=False)


def _of_strings(
    record: dict[str, Any], chosen: str, rejected: str, where: str
) -> tuple[str, tuple[str, str]]:
    """(query, responses); without a prompt, of two dialogues that begin alike."""
    if 'prompt' in record:
        prompt = record['prompt']
        if _are_messages(prompt):
            return _as_text(prompt), (chosen, rejected)
        return text_field(record, 'prompt', where), (chosen, rejected)
    same = sum(
        1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected))
    )
    turn = chosen.rfind(ASSISTANT, 0, same)
    if turn < 0:
        raise UserError(f"{where}, field 'prompt' is missing: it must be a text")
    end = turn + len(ASSISTANT)
    return chosen[:end], (chosen[end:], rejected[end:])


def _of_messages(
    record: dict[str, Any],
    chosen: list[dict[str, str]],
    rejected: list[dict[str, str]],
    where: str,
) -> tuple[str, tuple[str, str]]:
    """(query, responses): what both dialogues begin with belongs to the query."""
    most = min(len(chosen), len(rejected)) - 1  # the last message is a response
    shared = 0
    while shared < most and chosen[shared] == rejected[shared]:
        shared += 1
    query = chosen[:shared]
    if 'prompt' in record:
        prompt = record['prompt']
        if not _are_messages(prompt):
            prompt = [{'role': 'user', 'content': text_field(record, 'prompt', where)}]
        if [message['content'] for message in prompt] != _contents(query[-len(prompt) :]):
            query = [*prompt, *query]
    if not query:
        raise UserError(f"{where}, field 'prompt' is missing: it must be a text or messages")
    return _as_text(query), (_as_text(chosen[shared:]), _as_text(rejected[shared:]))


def _are_messages(value: Any) -> TypeGuard[list[dict[str, str]]]:
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


def _contents(messages: Sequence[dict[str, str]]) -> list[str]:
    return [message['content'] for message in messages]


def _as_text(messages: Sequence[dict[str, str]]) -> str:
    """One message is its content; each of several begins with its role."""
    if len(messages) == 1:
        return messages[0]['content']
    return '\n\n'.join(f'{message["role"]}: {message["content"]}' for message in messages)


# ---------------------------------------------------------------- Label Studio


def _of_label_studio(record: dict[str, Any], where: str) -> Iterator[TextLabel]:
    """Yield a label for each annotation that was not cancelled and has an answer."""
    data, annotations = record.get('data'), record['annotations']
    if not isinstance(data, dict) or not isinstance(annotations, list):
        raise UserError(
            f"{where} is no task of Label Studio: its 'data' must be an object, and 'annotations' a"
            ' list'
        )
    prompts = [data[name] for name in PROMPTS if isinstance(data.get(name), str)]
    for annotation in annotations:
        if not isinstance(annotation, dict) or annotation.get('was_cancelled'):
            continue
        for result in _pairwise_results(annotation):
            value = result.get('value')
            selected = value.get('selected') if isinstance(value, dict) else None
            if selected not in ('left', 'right'):
                raise UserError(
                    f'{where}: a pairwise result selects {selected!r:.80}, not left or right'
                )
            yield TextLabel(
                query=prompts[0] if prompts else '',
                samples=_compared(result, data, where),
                answer=('left', 'right').index(selected),
                labeller=_annotator(annotation.get('completed_by')),
                seconds=_seconds(annotation.get('lead_time')),
            )


def _pairwise_results(annotation: dict[str, Any]) -> list[dict[str, Any]]:
    results = annotation.get('result')
    if not isinstance(results, list):
        return []
    return [r for r in results if isinstance(r, dict) and r.get('type') == 'pairwise']


def _compared(result: dict[str, Any], data: dict[str, Any], where: str) -> tuple[str, str]:
    """The left and the right text of a comparison.

    The result names the two tags of the page. As a rule the data have fields of these names; if
    not, they have no other texts than these two and the prompt.
    """
    names = str(result.get('to_name', '')).split(',')
    if len(names) != 2 or not all(isinstance(data.get(name), str) for name in names):
        names = [
            name for name, value in data.items() if isinstance(value, str) and name not in PROMPTS
        ]
    if len(names) != 2:
        raise UserError(
            f'{where}: which texts were compared? The result names {result.get("to_name")!r:.80},'
            f' and the data have {", ".join(map(str, data)):.80}'
        )
    return data[names[0]], data[names[1]]


def _annotator(completed_by: Any) -> str | None:
    """The name of a labeller, for the number or the record of a user of Label Studio.

    A digest keeps those apart whose addresses would look alike.
    """
    if isinstance(completed_by, dict):
        completed_by = completed_by.get('id', completed_by.get('email'))
    if completed_by is None:
        return None
    user = str(completed_by)
    name = re.sub(r'[^A-Za-z0-9_-]', '-', user)
    if name != user or len(name) > 22:
        name = f'{name[:13]}-{hashlib.sha256(user.encode()).hexdigest()[:8]}'
    return f'annotator-{name}'


def _seconds(lead_time: Any) -> float:
    return float(lead_time) if is_number(lead_time) else 0.0
