"""Reader of labels as texts, in the formats of several tools; each record gives TextLabels.

    {"query", "sample0", "sample1", .., "best"}   the fields of a label, as strings
    {"prompt", "chosen", "rejected"}              preferences
    {"data", "annotations"}                       a task in Label Studio's JSON export

A label may also have a "labeller". Preferences are strings, or lists of chat messages
{"role", "content"}; the task is one of Label Studio's pairwise template. fields.QUERIES are the
names that a query may have; a field "system" begins it. A file is a JSON array, or has a record a
line; one called .csv or .tsv is a table, whose columns are the fields.
"""

import contextlib
import dataclasses
import os
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from lm_human_preferences import label_types, storage
from lm_human_preferences.datasets import fields
from lm_human_preferences.datasets.fields import QUERIES, SYSTEMS, after_system, text_field
from lm_human_preferences.errors import UserError
from lm_human_preferences.label_types import TIE, LabelType, Value, is_number
from lm_human_preferences.labels.texts import people
from lm_human_preferences.labels.texts.preferences import PAIR, preference

STANDARD_INPUT = ('-', '/dev/stdin')  # in place of a file
TEXT_FIELDS = ('query', 'sample', 'sample0')  # hold token ids in other labels
KNOWN = 'query and samples; prompt, chosen and rejected; or data and annotations of Label Studio'
CONVERT = "pandas.read_parquet(FILE).to_json('labels.jsonl', orient='records', lines=True)"
OTHER_FILES = ('.arrow', '.gz', '.parquet', '.xlsx', '.zip', '.zst')


@dataclasses.dataclass(frozen=True)
class TextLabel:
    """A question in words, and its answer."""

    query: str
    samples: tuple[str, ...]
    answer: Value | None  # as a label of its type has it, if there is one
    labeller: str | None = None
    seconds: float = 0.0  # that it took; 0 if unknown
    is_ordered: bool = True  # whether samples are in the order in which they were shown
    control: str = ''  # of Label Studio, by which it was given
    places: tuple[int, ...] = ()  # of the samples in the question, if in another order
    # Other fields of its record
    columns: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False)
    where: str = dataclasses.field(default='', compare=False)  # it is, for errors


def read(path: str) -> list[tuple[str, Any]]:
    """Return the records of a local or remote file, or of STANDARD_INPUT, with where they are."""
    if path in STANDARD_INPUT:
        name = 'standard input'
        try:
            return _parse_text(sys.stdin.buffer.read().decode('utf-8-sig'), name)
        except UnicodeDecodeError as e:
            raise UserError(f'{name} is not UTF-8 text: {e.reason}') from e
    check_kind_of_file(path)
    return read_file(path)


def read_file(path: str) -> list[tuple[str, Any]]:
    """Return the records of JSON lines, a JSON array, or a table, with where they are."""
    if storage.is_table(path):
        return [(where, _with_numbers(row)) for where, row in storage.read_table(path)]
    return _parse_text(storage.read_text(path), path)


def _with_numbers(row: Mapping[str, str]) -> dict[str, Any]:
    """Return a row of a table, in which all is text, with numbers as answers."""
    record: dict[str, Any] = dict(row)
    for field in {each.field for each in label_types.TYPES.values()} & row.keys():
        with contextlib.suppress(ValueError):
            number = float(row[field])
            record[field] = int(number) if number.is_integer() else number
    return record


def _parse_text(text: str, name: str) -> list[tuple[str, Any]]:
    if not text.lstrip().startswith('['):
        try:
            return storage.parse_json_lines(text, name)
        except storage.StorageError as e:
            raise UserError(f'{e}; a file has an object a line, or one array of objects') from e
    records = storage.parse_json(text, name)
    return [(f'{name}, label {index}', record) for index, record in enumerate(records)]


def check_kind_of_file(path: str) -> None:
    """Raise UserError for a file whose name says that it is of a format that is not read."""
    suffix = os.path.splitext(path)[1].lower()
    if suffix in OTHER_FILES:
        how = f'; to convert it: {CONVERT}' if suffix == '.parquet' else ''
        raise UserError(
            f'{path} is a {suffix} file, which is not read: give a .json with an array of'
            f' labels, a .jsonl with one a line, or a .csv{how}; what a label has: {KNOWN}'
        )


def is_text(record: Any) -> bool:
    """Return whether a record is of a format of texts; otherwise it holds token ids."""
    if not isinstance(record, dict):
        return False
    has_texts = any(isinstance(record.get(field), str) for field in TEXT_FIELDS)
    return has_texts or is_pair(record)


def is_pair(record: Any) -> bool:
    """Return whether a record is of a format of other tools, which compare two responses."""
    is_preference = isinstance(record, dict) and not record.keys().isdisjoint(PAIR)
    return is_preference or is_task(record)


def is_task(record: Any) -> bool:
    """Return whether a record is a task of Label Studio; others may have annotations, too."""
    if not isinstance(record, dict) or 'annotations' not in record:
        return False
    return record.keys().isdisjoint([*PAIR, *TEXT_FIELDS])


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
    if is_pair(record) and label_type.value_of_choice(0) is None:
        raise UserError(
            f'{where} says which of two responses is better: give {type_option} best_of_2, not'
            f' {label_type.name}'
        )
    if is_task(record):
        return list(_parse_label_studio(record, where, label_type))
    if is_pair(record):
        texts = preference(record, where)
        answer, given = label_type.value_of_choice(0), _given(record, label_type)
        return [TextLabel(*texts, answer, is_ordered=False, **given)]
    if any(isinstance(record.get(field), str) for field in TEXT_FIELDS):
        return [_parse_label(record, where, label_type, needs_answer)]
    if any(isinstance(record.get(field), list) for field in TEXT_FIELDS):
        raise UserError(
            f'{where} holds token ids, which are trained on as they are (--labels.source); here,'
            ' give texts: labels FOLDER --export FILE --export_as text writes them'
        )
    raise UserError(
        f'{where} is not of a known format: it has the fields'
        f' {", ".join(map(str, record)):.80}, and needs {KNOWN}'
    )


def unread(record: Any, label_type: LabelType) -> set[str]:
    """Return the names of the fields of a record that hold something and are not read."""
    if not isinstance(record, dict):
        return set()
    if is_task(record):
        return _unread_of_label_studio(record)
    of_messages: set[str] = set()
    if is_pair(record):
        of_messages = set(map('{} of messages'.format, _more_of_messages(record)))
    return columns(record, label_type).keys() | of_messages


def columns(record: Mapping[str, Any], label_type: LabelType) -> dict[str, Any]:
    """Return what a record holds besides texts, answer and labeller."""
    texts = PAIR if is_pair(record) else (*label_type.samples, label_type.field)
    found = fields.columns(record, (*people.FIELDS, *texts))
    return {name: found[name] for name in _filled(found)}


def _filled(record: Mapping[str, Any]) -> set[str]:
    """Return the names of the fields of a record that hold something."""
    return {str(name) for name, value in record.items() if not fields.is_empty(value)}


def _more_of_messages(record: dict[str, Any]) -> set[str]:
    """Return the fields of messages of a preference besides a role and a content."""
    keys = set()
    for field in (*QUERIES, *PAIR):
        messages = record.get(field)
        if not isinstance(messages, list):
            messages = [messages]
        for message in messages:
            if isinstance(message, dict):
                keys |= _filled(message)
    return keys - {'role', 'content'}


def _unread_of_label_studio(record: dict[str, Any]) -> set[str]:
    """Return the fields of a task's data that are neither query nor compared texts."""
    compared: set[str] = set()
    for _, result in _results(record['annotations']):
        compared.update(_names_compared(result))
    if not compared:  # nothing of a task without an answer is read
        return compared
    return set(map('data.{}'.format, _filled(record['data']) - {*QUERIES, *SYSTEMS} - compared))


def _parse_label(
    record: dict[str, Any], where: str, label_type: LabelType, needs_answer: bool
) -> TextLabel:
    name = fields.query_field(record, where) or 'query'
    query = after_system(record, text_field(record, name, where))
    samples = tuple(text_field(record, name, where) for name in label_type.samples)
    field = label_type.field
    given = record.get(field)
    is_given = field in record and given != ''  # as an empty cell of a table
    answer = label_type.read(_number_of_letter(given) if field == 'best' else given)
    if not is_given and needs_answer:
        raise UserError(f'{where}, field {field!r} is missing: it is the answer')
    if is_given and answer is None:
        fix = '; for ties, give --ties on' if given == TIE and label_type.can_tie else ''
        if is_number(given) and label_type.is_numeric:
            fix = ', which is more than 32 bits hold'
        raise UserError(
            f'{where}, field {field!r} must be {label_type.expected}, not {given!r:.80}{fix}'
        )
    return TextLabel(query, samples, answer, **_given(record, label_type))


def _number_of_letter(given: Any) -> Any:
    """Return the number of the sample that is called A, B and so on; other values as they are."""
    is_letter = isinstance(given, str) and re.fullmatch('[A-Za-z]', given.strip())
    return ord(given.strip().upper()) - ord('A') if is_letter else given


def _given(record: dict[str, Any], label_type: LabelType) -> dict[str, Any]:
    """Return the fields of a TextLabel that say who gave it, and what else its record holds."""
    return {'labeller': people.labeller(record), 'columns': columns(record, label_type)}


# ---------------------------------------------------------------- Label Studio


def _parse_label_studio(
    record: dict[str, Any], where: str, label_type: LabelType
) -> Iterator[TextLabel]:
    """Yield a label for each annotation that was not cancelled and has an answer."""
    data, annotations = record.get('data'), record['annotations']
    if not isinstance(data, dict) or not isinstance(annotations, list):
        raise UserError(
            f"{where} is not a task of Label Studio: its 'data' must be an object, and"
            " 'annotations' a list"
        )
    for annotation, result in _results(annotations):
        value = result.get('value')
        selected = value.get('selected') if isinstance(value, dict) else None
        if selected not in ('left', 'right'):
            raise UserError(
                f'{where}: a pairwise result selects {selected!r:.80}, not left or right'
            )
        lead_time: Any = annotation.get('lead_time')
        names = _names_compared(result)
        yield TextLabel(
            query=_query_of_task(data, names, where),
            samples=_compared(names, data, where),
            answer=label_type.value_of_choice(('left', 'right').index(selected)),
            labeller=people.annotator(annotation.get('completed_by')),
            seconds=float(lead_time) if is_number(lead_time) else 0.0,
            control=str(result.get('from_name', '')),
        )


def _results(annotations: Any) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield each annotation that was not cancelled with its pairwise results, the newest last."""
    known = filter(lambda each: isinstance(each, dict), annotations)
    for annotation in sorted(known, key=lambda each: str(each.get('updated_at') or '')):
        results = annotation.get('result')
        if annotation.get('was_cancelled') or not isinstance(results, list):
            continue
        for result in results:
            if isinstance(result, dict) and result.get('type') == 'pairwise':
                yield annotation, result


def _names_compared(result: dict[str, Any]) -> list[str]:
    return str(result.get('to_name', '')).split(',')


def _query_of_task(data: dict[str, Any], compared: list[str], where: str) -> str:
    others = {name: value for name, value in data.items() if name not in compared}
    name = fields.query_field(others, where)
    if name is None:
        fields.check_other_names(others, (), where)
    return after_system(others, '' if name is None else text_field(others, name, where))


def _compared(names: list[str], data: dict[str, Any], where: str) -> tuple[str, str]:
    """Return left and right text, which the result names."""
    texts = [data.get(name) for name in names]
    if len(texts) == 2 and isinstance(texts[0], str) and isinstance(texts[1], str):
        return texts[0], texts[1]
    raise UserError(
        f'{where}: which text was on the left? The result compares {",".join(names)!r:.80}, and the'
        f' data have {", ".join(map(str, data)):.80}: give the fields of the data the names that'
        ' are compared, left and right'
    )
