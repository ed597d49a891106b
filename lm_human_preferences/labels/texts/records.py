"""The formats in which other tools keep labels as texts; each record is turned into TextLabels.

    {"query", "sample0", "sample1", .., "best"}   the fields of a label, as strings
    {"prompt", "chosen", "rejected"}              preferences
    {"data", "annotations"}                       a task in Label Studio's JSON export

A label may also have "labeller", who gave it, and "remark". Preferences are strings, or lists of
chat messages {"role", "content"}; the task is one of Label Studio's pairwise template.

A file is a JSON array of records, or has one a line if its name ends in .jsonl. Standard input may
be either.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
import re
import string
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from lm_human_preferences import storage
from lm_human_preferences.datasets.messages import are_messages, as_text
from lm_human_preferences.errors import UserError
from lm_human_preferences.label_types import LabelType, Value, is_number
from lm_human_preferences.labels.answers import LABELLER, REMARK
from lm_human_preferences.runs import run_files

PROMPTS = ('prompt', 'query', 'question')  # where a task of Label Studio may have its query
# Begins a turn of a dialogue in one string, as in the data set hh-rlhf.
ASSISTANT = '\n\nAssistant:'
STANDARD_INPUT = ('-', '/dev/stdin')  # in place of a file
TEXT_FIELDS = ('query', 'sample', 'sample0')  # hold token ids in other labels
PAIR_FIELDS = {'chosen', 'rejected', 'annotations'}  # which no other record has
KTO = {'prompt', 'completion', 'label'}  # fields of a format that is known, but not read
KNOWN = 'query and samples; prompt, chosen and rejected; or data and annotations of Label Studio'
CONVERT = "pandas.read_parquet(FILE).to_json('labels.jsonl', orient='records', lines=True)"
OTHER_FILES = {
    '.arrow': 'Arrow',
    '.csv': 'CSV',
    '.gz': 'a compressed file',
    '.parquet': 'Parquet',
    '.tsv': 'tab-separated values',
    '.xlsx': 'a spreadsheet',
    '.zip': 'a compressed file',
    '.zst': 'a compressed file',
}


@dataclasses.dataclass(frozen=True)
class TextLabel:
    """A question in words, and its answer.

    answer: as a label of its type has it; None where the record has none. labeller: who gave it,
    if the record says so. seconds: how long that took, 0 where it is not known. is_ordered: whether
    the samples are in the order in which they were shown. remark: of the labeller, '' for none.
    """

    query: str
    samples: tuple[str, ...]
    answer: Value | None
    labeller: str | None = None
    seconds: float = 0.0
    is_ordered: bool = True
    remark: str = ''


def read(path: str) -> list[tuple[str, Any]]:
    """The records of a file, each with where it is.

    path: a local or remote file, or one of STANDARD_INPUT. Empty lines are passed over. UserError
    for what is not JSON.
    """
    if path in STANDARD_INPUT:
        return _of_standard_input()
    check_kind_of_file(path)
    if path.endswith('.jsonl'):
        return storage.read_json_lines(path)
    return _of_array(storage.read_json(path), path)


def _of_standard_input() -> list[tuple[str, Any]]:
    name = 'standard input'
    try:
        text = storage.without_bom(sys.stdin.buffer.read().decode())
    except UnicodeDecodeError as e:
        raise UserError(f'{name} is not UTF-8 text: {e.reason}') from e
    if not text.lstrip().startswith('['):  # each line is an object
        return storage.parse_json_lines(text, name)
    return _of_array(storage.parse_json(text, name), name)


def _of_array(records: Any, name: str) -> list[tuple[str, Any]]:
    if not isinstance(records, list):
        raise UserError(f'{name} must hold a JSON array of labels, not a {type(records).__name__}')
    return [(f'{name}, label {index}', record) for index, record in enumerate(records)]


def check_kind_of_file(path: str) -> None:
    """Raise UserError for a file whose name says that it is of a format that is not read."""
    suffix = os.path.splitext(path)[1].lower()
    if suffix in OTHER_FILES:
        how = f'; to convert it: {CONVERT}' if suffix == '.parquet' else ''
        raise UserError(
            f'{path} is {OTHER_FILES[suffix]}, which is not read: give a .json with an array of'
            f' labels, or a .jsonl with one a line{how}; what a label has: {KNOWN}'
        )


def is_text(record: Any) -> bool:
    """Whether a record is of one of the formats above, or of another one of texts.

    Otherwise it holds token ids.
    """
    if not isinstance(record, dict):
        return False
    has_texts = any(isinstance(record.get(field), str) for field in TEXT_FIELDS)
    return has_texts or is_pair(record) or record.keys() >= KTO


def is_pair(record: Any) -> bool:
    """Whether a record is of a format of other tools, which compare two responses."""
    return isinstance(record, dict) and not PAIR_FIELDS.isdisjoint(record)


def parse(
    record: Any,
    where: str,
    label_type: LabelType,
    *,
    needs_answer: bool = True,
    type_option: str = '--labels.type',
) -> list[TextLabel]:
    """The labels in a record; none in a task of Label Studio that was skipped.

    UserError, which says `where` it is, for a record that is of no format or does not fit the label
    type, which type_option names.
    """
    if not isinstance(record, dict):
        raise UserError(f'{where} is a {type(record).__name__}, not an object')
    if 'annotations' in record:
        _check_pairs(label_type, where, type_option)
        return list(_of_label_studio(record, where, label_type))
    if 'chosen' in record or 'rejected' in record:
        _check_pairs(label_type, where, type_option)
        query, samples = preference(record, where)
        return [TextLabel(query, samples, label_type.of_preference(0), is_ordered=False)]
    if any(isinstance(record.get(field), str) for field in TEXT_FIELDS):
        return [_of_label(record, where, label_type, needs_answer)]
    if record.keys() >= KTO:
        raise UserError(
            f'{where} is of the format of KTO (prompt, completion, label), which is not read: give'
            f' {KNOWN}'
        )
    raise UserError(
        f'{where} is of no format that is known: it has the fields'
        f' {", ".join(map(str, record)):.80}, and what is read is {KNOWN}'
    )


def _check_pairs(label_type: LabelType, where: str, option: str) -> None:
    if label_type.of_preference(0) is None:
        raise UserError(
            f'{where} says which of two responses is better: give {option} best_of_2, not'
            f' {label_type.name}'
        )


def text_field(record: dict[str, Any], field: str, where: str) -> str:
    """A text of a record; UserError where there is none."""
    text = record.get(field)
    if not isinstance(text, str):
        state = f'is a {type(text).__name__}' if field in record else 'is missing'
        raise UserError(f'{where}, field {field!r} {state}: it must be a text')
    return text


def _of_label(
    record: dict[str, Any], where: str, label_type: LabelType, needs_answer: bool
) -> TextLabel:
    query = text_field(record, 'query', where)
    samples = tuple(text_field(record, name, where) for name in label_type.samples)
    answer = None
    if label_type.field in record or needs_answer:
        answer = _checked_answer(record, label_type, where)
    remark = record.get(REMARK)
    return TextLabel(
        query,
        samples,
        answer,
        labeller=_labeller(record.get(LABELLER)),
        remark=remark if isinstance(remark, str) else '',
    )


def _labeller(name: Any) -> str | None:
    """The name of a labeller as it is, where it can be one in a folder."""
    if isinstance(name, str) and run_files.LABELLER.fullmatch(name):
        return name
    return _annotator(name)


def _checked_answer(record: dict[str, Any], label_type: LabelType, where: str) -> Value:
    field = label_type.field
    if field not in record:
        raise UserError(f'{where}, field {field!r} is missing: it is the answer')
    value = record[field]
    if not label_type.is_valid(value):
        raise UserError(
            f'{where}, field {field!r} must be {label_type.expected}, not {value!r:.80}'
        )
    return value


# ---------------------------------------------------------------- preferences


def preference(record: dict[str, Any], where: str) -> tuple[str, tuple[str, str]]:
    """(query, the chosen and the rejected response) of a record; UserError if it is none."""
    chosen, rejected = record.get('chosen'), record.get('rejected')
    if isinstance(chosen, str) and isinstance(rejected, str):
        return _of_strings(record, chosen, rejected, where)
    if are_messages(chosen) and are_messages(rejected):
        return _of_messages(record, chosen, rejected, where)
    missing = [field for field in ('chosen', 'rejected') if field not in record]
    which = f'field {missing[0]!r} is missing: ' if missing else 'fields '
    raise UserError(
        f"{where}, {which}'chosen' and 'rejected' must both be texts, or lists of messages with a"
        ' role and a content'
    )


def _of_strings(
    record: dict[str, Any], chosen: str, rejected: str, where: str
) -> tuple[str, tuple[str, str]]:
    """(query, responses); without a prompt, of two dialogues that begin alike."""
    if 'prompt' in record:
        prompt = record['prompt']
        if are_messages(prompt):
            return as_text(prompt), (chosen, rejected)
        return text_field(record, 'prompt', where), (chosen, rejected)
    end = _end_of_prompt(chosen, rejected, where)
    return chosen[:end], (chosen[end:], rejected[end:])


def _end_of_prompt(chosen: str, rejected: str, where: str) -> int:
    """Where the prompt ends that two texts begin with.

    In a dialogue, that is where the turn of the assistant begins in which the texts part: later
    turns are of two different dialogues, and belong to the responses. In other texts it is after
    the last whole word that both have. A space before a word belongs to it, as in GPT-2's tokens.
    """
    alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected))
    same = chosen[: sum(1 for _ in alike)]
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
        if not are_messages(prompt):
            prompt = [{'role': 'user', 'content': text_field(record, 'prompt', where)}]
        if [message['content'] for message in prompt] != _contents(query[-len(prompt) :]):
            query = [*prompt, *query]
    if not query:
        raise UserError(f"{where}, field 'prompt' is missing: it must be a text or messages")
    return as_text(query), (as_text(chosen[shared:]), as_text(rejected[shared:]))


def _contents(messages: Sequence[dict[str, str]]) -> list[str]:
    return [message['content'] for message in messages]


# ---------------------------------------------------------------- Label Studio


def _of_label_studio(
    record: dict[str, Any], where: str, label_type: LabelType
) -> Iterator[TextLabel]:
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
                answer=label_type.of_preference(('left', 'right').index(selected)),
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
    """The name of a labeller, for the number or the record of a user of another tool.

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
