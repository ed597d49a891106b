"""Reader of labels as texts, in the formats of several tools; each record gives TextLabels.

    {"query", "sample0", "sample1", .., "best"}   the fields of a label, as strings
    {"prompt", "chosen", "rejected"}              preferences
    {"data", "annotations"}                       a task in Label Studio's JSON export

A label may also have "labeller" and "remark". Preferences are strings, or lists of chat messages
{"role", "content"}; the task is one of Label Studio's pairwise template. A field "system" begins
the query. A file is a JSON array, or has a record a line if its name ends in .jsonl.
"""

import dataclasses
import hashlib
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError
from lm_human_preferences.label_types import LabelType, Value, is_number
from lm_human_preferences.labels.answers import LABELLER, REMARK
from lm_human_preferences.labels.texts.preferences import (
    SYSTEMS,
    after_system,
    preference,
    text_field,
)
from lm_human_preferences.runs import run_files

PROMPTS = ('prompt', 'query', 'question')  # where a task of Label Studio may have its query
STANDARD_INPUT = ('-', '/dev/stdin')  # in place of a file
TEXT_FIELDS = ('query', 'sample', 'sample0')  # hold token ids in other labels
PAIR_FIELDS = {'chosen', 'rejected', 'annotations'}  # which no other record has
KTO = {'prompt', 'completion', 'label'}  # fields of a format that is known, but not read
KNOWN = 'query and samples; prompt, chosen and rejected; or data and annotations of Label Studio'
CONVERT = "pandas.read_parquet(FILE).to_json('labels.jsonl', orient='records', lines=True)"
OTHER_FILES = ('.arrow', '.csv', '.gz', '.parquet', '.tsv', '.xlsx', '.zip', '.zst')


@dataclasses.dataclass(frozen=True)
class TextLabel:
    """A question in words, and its answer."""

    query: str
    samples: tuple[str, ...]
    answer: Value | None  # as a label of its type has it, if there is one
    labeller: str | None = None
    seconds: float = 0.0  # that it took; 0 if unknown
    is_ordered: bool = True  # whether samples are in the order in which they were shown
    remark: str = ''


def read(path: str) -> list[tuple[str, Any]]:
    """Return the records of a local or remote file, or of STANDARD_INPUT, with where they are."""
    if path in STANDARD_INPUT:
        return _of_standard_input()
    check_kind_of_file(path)
    return read_file(path)


def read_file(path: str) -> list[tuple[str, Any]]:
    """Return the records of a .jsonl, or of a JSON array, with where they are."""
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
            f'{path} is a {suffix} file, which is not read: give a .json with an array of'
            f' labels, or a .jsonl with one a line{how}; what a label has: {KNOWN}'
        )


def is_text(record: Any) -> bool:
    """Return whether a record is of a format of texts; otherwise it holds token ids."""
    if not isinstance(record, dict):
        return False
    has_texts = any(isinstance(record.get(field), str) for field in TEXT_FIELDS)
    return has_texts or is_pair(record) or record.keys() >= KTO


def is_pair(record: Any) -> bool:
    """Return whether a record is of a format of other tools, which compare two responses."""
    return isinstance(record, dict) and not PAIR_FIELDS.isdisjoint(record)


def parse(
    record: Any,
    where: str,
    label_type: LabelType,
    *,
    needs_answer: bool = True,
    type_option: str = '--labels.type',
) -> list[TextLabel]:
    """Return the labels in a record; UserError, which says `where`, for an unknown format."""
    if not isinstance(record, dict):
        raise UserError(f'{where} is a {type(record).__name__}, not an object')
    if is_pair(record) and label_type.of_preference(0) is None:
        raise UserError(
            f'{where} says which of two responses is better: give {type_option} best_of_2, not'
            f' {label_type.name}'
        )
    if 'annotations' in record:
        return list(_of_label_studio(record, where, label_type))
    if is_pair(record):
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


def unread(record: Any, label_type: LabelType) -> set[str]:
    """Return the names of the fields of a record that hold something and are not read."""
    if not isinstance(record, dict):
        return set()
    if 'annotations' in record:
        data = record.get('data')
        return _unread_of_label_studio(data) if isinstance(data, dict) else set()
    filled = _filled(record)
    if is_pair(record):
        of_messages = map('{} of messages'.format, _more_of_messages(record))
        return filled - {'prompt', 'chosen', 'rejected', *SYSTEMS} | set(of_messages)
    return filled - {
        'query',
        *label_type.samples,
        label_type.field,
        LABELLER,
        REMARK,
        *SYSTEMS,
    }


def _filled(fields: dict[str, Any]) -> set[str]:
    """Return the names of fields that hold something; tables write None, '' and [] for nothing."""
    filled = set()
    for name, value in fields.items():
        if value is not None and value not in ('', [], {}):
            filled.add(str(name))
    return filled


def _more_of_messages(record: dict[str, Any]) -> set[str]:
    """Return the fields of messages of a preference besides a role and a content."""
    keys = set()
    for field in ('prompt', 'chosen', 'rejected'):
        messages = record.get(field)
        if not isinstance(messages, list):
            messages = [messages]
        for message in messages:
            if isinstance(message, dict):
                keys |= _filled(message)
    return keys - {'role', 'content'}


def _unread_of_label_studio(data: dict[str, Any]) -> set[str]:
    """Return the fields of a task's data that are neither query nor compared texts."""
    texts = {name for name, value in data.items() if isinstance(value, str)}
    if len(texts - {*PROMPTS, *SYSTEMS}) > 2:
        texts = {*PROMPTS, *SYSTEMS}
    return set(map('data.{}'.format, _filled(data) - texts))


def _of_label(
    record: dict[str, Any], where: str, label_type: LabelType, needs_answer: bool
) -> TextLabel:
    query = after_system(record, text_field(record, 'query', where))
    samples = tuple(text_field(record, name, where) for name in label_type.samples)
    field = label_type.field
    if field not in record and needs_answer:
        raise UserError(f'{where}, field {field!r} is missing: it is the answer')
    if field in record and not label_type.is_valid(record[field]):
        raise UserError(
            f'{where}, field {field!r} must be {label_type.expected}, not {record[field]!r:.80}'
        )
    labeller, remark = record.get(LABELLER), record.get(REMARK)
    if not isinstance(labeller, str) or not run_files.LABELLER.fullmatch(labeller):
        labeller = _annotator(labeller)
    return TextLabel(
        query,
        samples,
        answer=record.get(field),
        labeller=labeller,
        remark=remark if isinstance(remark, str) else '',
    )


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
        results = annotation.get('result')
        for result in results if isinstance(results, list) else ():
            if not isinstance(result, dict) or result.get('type') != 'pairwise':
                continue
            value = result.get('value')
            selected = value.get('selected') if isinstance(value, dict) else None
            if selected not in ('left', 'right'):
                raise UserError(
                    f'{where}: a pairwise result selects {selected!r:.80}, not left or right'
                )
            lead_time: Any = annotation.get('lead_time')
            yield TextLabel(
                query=after_system(data, prompts[0] if prompts else ''),
                samples=_compared(result, data, where),
                answer=label_type.of_preference(('left', 'right').index(selected)),
                labeller=_annotator(annotation.get('completed_by')),
                seconds=float(lead_time) if is_number(lead_time) else 0.0,
            )


def _compared(result: dict[str, Any], data: dict[str, Any], where: str) -> tuple[str, str]:
    """Return left and right text: those that the result names, or all besides the prompt."""
    names = str(result.get('to_name', '')).split(',')
    if len(names) != 2 or not all(isinstance(data.get(name), str) for name in names):
        names = [
            name
            for name, value in data.items()
            if isinstance(value, str) and name not in (*PROMPTS, *SYSTEMS)
        ]
    if len(names) != 2:
        raise UserError(
            f'{where}: which texts were compared? The result names {result.get("to_name")!r:.80},'
            f' and the data have {", ".join(map(str, data)):.80}'
        )
    return data[names[0]], data[names[1]]


def _annotator(completed_by: Any) -> str | None:
    """Return a name for a user of another tool; a digest keeps similar addresses apart."""
    if isinstance(completed_by, dict):
        completed_by = completed_by.get('id', completed_by.get('email'))
    if completed_by is None:
        return None
    user = str(completed_by)
    name = re.sub(r'[^A-Za-z0-9_-]', '-', user)
    if name != user or len(name) > 22:
        name = f'{name[:13]}-{hashlib.sha256(user.encode()).hexdigest()[:8]}'
    return f'annotator-{name}'
