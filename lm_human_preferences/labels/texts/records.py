"""Parser of labels as texts. A record is a label, or a preference between two responses.

    {"query", "sample0", "sample1", .., "best"}   the fields of a label, as strings
    {"prompt", "chosen", "rejected"}              see preferences.py

Both may have an "id", and a "labeller" who gave the answer. The query may have any of the names in
messages.QUERIES; a field "system" has the message before the query. A file is a JSON array, JSON
lines, or a table (.csv, .tsv) whose columns are the fields.
"""

import contextlib
import dataclasses
import hashlib
import re
from collections.abc import Mapping
from typing import Any

from lm_human_preferences import storage
from lm_human_preferences.datasets import messages
from lm_human_preferences.datasets.messages import (
    QUERIES,
    SYSTEMS,
    UnusableError,
    after_system,
    text_field,
)
from lm_human_preferences.errors import UserError
from lm_human_preferences.label_types import TIE, LabelType, Value
from lm_human_preferences.labels.answers import BAD, GIVEN_BY, GIVEN_IDS, ID
from lm_human_preferences.labels.json_lines import as_object
from lm_human_preferences.labels.texts.preferences import PAIR, preference
from lm_human_preferences.runs.run_files import LABELLER
from lm_human_preferences.storage.schema import matches_schema

TEXT_FIELDS = ('query', 'sample', 'sample0')  # fields whose type tells texts from token ids
EXAMPLES = 'examples/labels has programs that convert formats of other tools'
Tokens = dict[str, list[int]]


@dataclasses.dataclass(frozen=True)
class TextLabel:
    """A question as texts, and its answer.

    tokens: {field: padded token ids} of query and samples, filled in by `tokenise`.
    """

    query: str
    samples: tuple[str, ...]
    answer: Value | None  # answer as the label type defines it; None without an answer
    is_bad: bool = False  # whether a tie means that all samples are bad
    labeller: str | None = None
    is_pair: bool = False  # whether the record had a chosen and a rejected response
    id: int | str | None = None
    where: str = dataclasses.field(default='', compare=False)  # file and line, for error messages
    tokens: Tokens = dataclasses.field(default_factory=dict, compare=False)


def read(path: str) -> list[tuple[str, dict[str, Any]]]:
    """Read JSON lines, a JSON array or a table; return [(place to name in errors, record)].

    path: '-' stands for standard input.
    """
    if path.lower().endswith('.parquet'):
        raise UserError(f'{path} is Parquet, which is not read: convert it to JSON lines or CSV')
    if storage.is_table(path):
        return [*storage.read_table(path)]
    text = storage.read_text(path)
    if text.lstrip().startswith('['):
        records = storage.parse_json(text, path)
        found = [(f'{path}, label {index}', record) for index, record in enumerate(records)]
    else:
        found = storage.parse_json_lines(text, path)
    return [(where, as_object(record, where)) for where, record in found]


def is_text(record: Mapping[str, Any]) -> bool:
    """Return whether a record holds texts; otherwise it holds token ids."""
    return is_pair(record) or any(isinstance(record.get(field), str) for field in TEXT_FIELDS)


def is_pair(record: Mapping[str, Any]) -> bool:
    """Return whether a record is a preference between two responses."""
    return not record.keys().isdisjoint(PAIR)


def parse(
    record: Mapping[str, Any], where: str, label_type: LabelType, needs_answer: bool = True
) -> TextLabel:
    """Parse a record as a label; UserError, which names `where`, for an unknown format."""
    id = None if messages.is_empty(record.get(ID)) else record[ID]
    if not matches_schema(id, GIVEN_IDS):
        raise UserError(f'{where}, field {ID!r} must be a whole number or a text, not {id!r:.80}')
    about = {'labeller': _labeller(record.get(GIVEN_BY)), 'id': id, 'where': where}
    if is_pair(record):
        if label_type.name != 'best_of_2':
            raise UserError(
                f'{where} says which of two responses is better: its label type is best_of_2, not'
                f' {label_type.name}'
            )
        query, pair = preference(record, where)
        # Samples get a random but fixed order; otherwise the first would always be the best.
        best = hashlib.sha256(repr((query, pair)).encode()).digest()[0] % 2
        return TextLabel(query, pair[::-1] if best else pair, best, is_pair=True, **about)
    if record.keys().isdisjoint(TEXT_FIELDS):
        own = ', '.join(('query', *label_type.samples))
        raise UserError(
            f'{where} is not of a known format: it has the fields'
            f' {", ".join(map(str, record)):.80}, but needs {own} and {label_type.field}, or'
            f' else prompt, chosen and rejected, all in lower case; {EXAMPLES}'
        )
    name = messages.query_field(record, where) or 'query'
    query = after_system(record, text_field(record, name, where), where)
    samples = tuple(text_field(record, name, where) for name in label_type.samples)
    answer = _answer(record, where, label_type, needs_answer)
    is_bad = answer == TIE and str(record.get(BAD)).lower() == 'true'  # tables hold texts only
    return TextLabel(query, samples, answer, is_bad=is_bad, **about)


def unread(record: Mapping[str, Any], label_type: LabelType) -> set[str]:
    """Return the names of the non-empty fields that this program ignores."""
    texts = PAIR if is_pair(record) else (*label_type.samples, label_type.field)
    known = {*QUERIES, *SYSTEMS, ID, GIVEN_BY, *texts}
    if label_type.can_tie:
        known.add(BAD)
    return {str(name) for name in record.keys() - known if not messages.is_empty(record[name])}


def _answer(
    record: Mapping[str, Any], where: str, label_type: LabelType, is_needed: bool
) -> Value | None:
    field = label_type.field
    given = value = record.get(field, '')
    if messages.is_empty(given) and not is_needed:
        return None
    if messages.is_empty(given) and field in record:  # a table may have empty cells
        raise UnusableError(f'{where} has no answer')
    with contextlib.suppress(ValueError):
        if isinstance(given, str):
            value = float(given)  # tables hold texts only
    answer = label_type.read(value)
    if answer is None:
        fix = '; for ties, give --ties on' if given == TIE and label_type.can_tie else ''
        raise UserError(
            f'{where}, field {field!r} must be {label_type.expected}, not {given!r:.80}{fix}'
        )
    return answer


def _labeller(value: Any) -> str | None:
    """Return the name of a labeller, the same for 1, 1.0, '1' and '1.0'; None if it is empty.

    A value that cannot be a name, such as an e-mail address, becomes a name with its digest.
    """
    if messages.is_empty(value):
        return None
    name = re.sub(r'^(\d+)\.0$', r'\1', str(value).strip())  # tables may write 1 as 1.0
    if LABELLER.fullmatch(name):
        return name
    digest = hashlib.sha256(name.encode(errors='replace')).hexdigest()
    return f'{re.sub("[^A-Za-z0-9_-]", "-", name)[:23]}-{digest[:8]}'
