"""Parser of labels as texts. A record is a label, or a preference between two responses.

    {"query", "sample0", "sample1", .., "best"}   the fields of a label, as strings
    {"prompt", "chosen", "rejected"}              see preferences.py

Both may have an "id", and a "labeller" who gave the answer. The query may have any of the names in
fields.QUERIES; a field "system" has the message before the query. A file is a JSON array, JSON
lines, or a table (.csv, .tsv) whose columns are the fields.
"""

import contextlib
import dataclasses
import hashlib
import re
import sys
from collections.abc import Mapping
from typing import Any

from lm_human_preferences import storage
from lm_human_preferences.datasets import fields
from lm_human_preferences.datasets.fields import QUERIES, SYSTEMS, after_system, text_field
from lm_human_preferences.errors import UserError
from lm_human_preferences.label_types import TIE, LabelType, Value
from lm_human_preferences.labels.answers import BAD, GIVEN_BY, ID, check_given_id
from lm_human_preferences.labels.texts.preferences import PAIR, preference
from lm_human_preferences.runs.run_files import LABELLER

STANDARD_INPUT = ('-', '/dev/stdin')  # paths that stand for standard input
TEXT_FIELDS = ('query', 'sample', 'sample0')  # str in text labels, token ids in other formats
EXAMPLES = 'examples/labels has programs that convert formats of other tools'
CONVERT = "pandas.read_parquet(FILE).to_json('labels.jsonl', orient='records', lines=True)"
Tokens = dict[str, list[int]]


@dataclasses.dataclass(frozen=True)
class TextLabel:
    """A question as texts, and its answer.

    tokens: {field: padded token ids} of query and samples, filled in by `tokenise`.
    """

    query: str
    samples: tuple[str, ...]
    answer: Value | None  # in the form of its label type; None without an answer
    is_bad: bool = False  # whether a tie means that all samples are bad
    labeller: str | None = None
    is_ordered: bool = True  # False if the order (chosen, rejected) gives the answer away
    id: int | str | None = None
    where: str = dataclasses.field(default='', compare=False)  # file and line, for messages
    tokens: Tokens = dataclasses.field(default_factory=dict, compare=False)


def read(path: str) -> list[tuple[str, Any]]:
    """Read a file as `read_file` does, or standard input if `path` stands for it."""
    if path not in STANDARD_INPUT:
        return read_file(path)
    try:
        return _parse_text(sys.stdin.buffer.read().decode('utf-8-sig'), 'standard input')
    except UnicodeDecodeError as e:
        raise UserError(f'standard input is not UTF-8 text: {e.reason}') from e


def read_file(path: str) -> list[tuple[str, Any]]:
    """Read JSON lines, a JSON array or a table: return [(place for messages, record)]."""
    if path.lower().endswith('.parquet'):
        raise UserError(f'{path} is a .parquet file, which is not read; to convert it: {CONVERT}')
    if storage.is_table(path):
        return [*storage.read_table(path)]
    return _parse_text(storage.read_text(path), path)


def _parse_text(text: str, name: str) -> list[tuple[str, Any]]:
    if text.lstrip().startswith('['):
        records = storage.parse_json(text, name, names_once=True)
        return [(f'{name}, label {index}', record) for index, record in enumerate(records)]
    try:
        return storage.parse_json_lines(text, name)
    except storage.StorageError as e:
        raise UserError(f'{e}; a file has an object a line, or one array of objects') from e


def is_text(record: Any) -> bool:
    """Return whether a record holds texts; otherwise it holds token ids."""
    if not isinstance(record, dict):
        return False
    has_texts = any(isinstance(record.get(field), str) for field in TEXT_FIELDS)
    return has_texts or is_pair(record)


def is_pair(record: Any) -> bool:
    """Return whether a record is a preference between two responses."""
    return isinstance(record, dict) and not record.keys().isdisjoint(PAIR)


def parse(
    record: Any,
    where: str,
    label_type: LabelType,
    needs_answer: bool = True,
    type_option: str = '--labels.type',
) -> TextLabel:
    """Parse a record as a label; UserError, which names `where`, for an unknown format."""
    if not isinstance(record, dict):
        raise UserError(f'{where} is a {type(record).__name__}, not an object')
    if is_pair(record):
        if label_type.name != 'best_of_2':
            raise UserError(
                f'{where} says which of two responses is better: give {type_option} best_of_2, not'
                f' {label_type.name}'
            )
        query, samples = preference(record, where)
        return TextLabel(query, samples, 0, is_ordered=False, **_given(record, where))
    if record.keys().isdisjoint(TEXT_FIELDS):
        own = ', '.join(('query', *label_type.samples))
        raise UserError(
            f'{where} is not of a known format: it has the fields'
            f' {", ".join(map(str, record)):.80}, and needs {own} and {label_type.field}, or'
            f' prompt, chosen and rejected; {EXAMPLES}'
        )
    return _parse_label(record, where, label_type, needs_answer)


def unread(record: Mapping[str, Any], label_type: LabelType) -> set[str]:
    """Return the names of the non-empty fields that this program ignores."""
    texts = PAIR if is_pair(record) else (*label_type.samples, label_type.field)
    known = {*QUERIES, *SYSTEMS, ID, GIVEN_BY, *texts}
    if label_type.can_tie:
        known.add(BAD)
    return {str(name) for name in record.keys() - known if not fields.is_empty(record[name])}


def _parse_label(
    record: dict[str, Any], where: str, label_type: LabelType, needs_answer: bool
) -> TextLabel:
    name = fields.query_field(record, where) or 'query'
    query = after_system(record, text_field(record, name, where), where)
    samples = tuple(text_field(record, name, where) for name in label_type.samples)
    field = label_type.field
    given = record.get(field)
    is_given = field in record and given != ''  # an empty cell of a table is no answer
    answer = label_type.read(_as_number(given, field == 'best'))
    if not is_given and needs_answer:
        raise UserError(f'{where}, field {field!r} is missing: it is the answer')
    if is_given and answer is None:
        fix = '; for ties, give --ties on' if given == TIE and label_type.can_tie else ''
        raise UserError(
            f'{where}, field {field!r} must be {label_type.expected}, not {given!r:.80}{fix}'
        )
    is_bad = answer == TIE and str(record.get(BAD)).lower() == 'true'  # a table has texts
    return TextLabel(query, samples, answer, is_bad=is_bad, **_given(record, where))


def _as_number(given: Any, may_be_letter: bool) -> Any:
    """Convert a text, such as a cell of a table, to a number if possible; letters: A is 0."""
    if isinstance(given, str) and may_be_letter and re.fullmatch('[A-Za-z]', given.strip()):
        return ord(given.strip().upper()) - ord('A')
    with contextlib.suppress(ValueError):
        if isinstance(given, str):
            return float(given)
    return given


def _given(record: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the labeller and the id of a record, as fields of TextLabel."""
    id = None if fields.is_empty(record.get(ID)) else record[ID]
    try:
        check_given_id(id)
    except TypeError as e:
        raise UserError(f'{where}, field {e}') from e
    return {'labeller': _labeller(record.get(GIVEN_BY)), 'id': id}


def _labeller(value: Any) -> str | None:
    """Return the name of a labeller, the same for 1, 1.0, '1' and '1.0'; None if it is empty.

    A value that cannot be a name, such as an e-mail address, becomes a name with its digest.
    """
    if fields.is_empty(value):
        return None
    name = re.sub(r'^(\d+)\.0$', r'\1', str(value).strip())  # tables write numbers so
    if LABELLER.fullmatch(name):
        return name
    digest = hashlib.sha256(name.encode(errors='replace')).hexdigest()
    return f'{re.sub("[^A-Za-z0-9_-]", "-", name)[:23]}-{digest[:8]}'
