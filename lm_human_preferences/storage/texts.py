"""Reading of local and remote text files: JSON, lines of JSON, and tables.

Tables are as spreadsheets write them: CSV with commas, semicolons or tabs, and a header.
"""

import csv
import io
import json
import re
import sys
from typing import Any

from lm_human_preferences.errors import os_errors_as
from lm_human_preferences.storage.blobs import cached_path
from lm_human_preferences.storage.paths import StorageError

STANDARD_INPUT = '-'  # path that stands for standard input
TABLES = ('.csv', '.tsv')  # extensions of files that hold tables


def read_text(path: str) -> str:
    """Return the text of a local or remote UTF-8 file, with every line end as \\n.

    A byte order mark, as programs on Windows write it, is left out: JSON does not allow it.
    path: '-' stands for standard input.
    """
    text = _decoded(_read(path), path)
    return text.replace('\r\n', '\n').replace('\r', '\n')


def read_whole_lines(path: str) -> str:
    """Return a UTF-8 file's whole lines; a killed writer may have torn the last one."""
    data = _read(path)
    return _decoded(data[: data.rfind(b'\n') + 1], path)


def _read(path: str) -> bytes:
    source = 0 if path == STANDARD_INPUT else cached_path(path)
    error = os_errors_as(f'{path} cannot be read', kind=StorageError)
    with error, open(source, 'rb', closefd=source != 0) as file:
        return file.read()


def _decoded(data: bytes, path: str) -> str:
    try:
        if 0 in data[:2]:  # the text is UTF-16 without a byte order mark
            found_nul = UnicodeDecodeError('utf-8', data, 0, 2, 'a NUL')
            raise found_nul
        return data.decode('utf-8-sig')
    except UnicodeDecodeError as e:
        raise StorageError(
            f'{path} cannot be read as UTF-8 text: {e}; convert a file from Windows by'
            ' `iconv -t UTF-8 -f CP1252` or `iconv -t UTF-8 -f UTF-16`'
        ) from e


def read_json(path: str) -> Any:
    """Return the value in a JSON file, local or remote."""
    return parse_json(read_text(path), path)


def read_json_lines(path: str) -> list[tuple[str, Any]]:
    """Return (where, value) for each line of a JSON lines file; `where` names file and line."""
    return parse_json_lines(read_text(path), path)


def parse_json_lines(text: str, name: str) -> list[tuple[str, Any]]:
    """Return (where, value) for each line that is not empty; `where` names file and line."""
    found = []
    for number, line in enumerate(text.split('\n'), start=1):
        if line.strip():
            where = f'{name}, line {number}'
            found.append((where, parse_json(line, where)))
    return found


def parse_json(text: str | bytes, where: str) -> Any:
    """Return the value of a JSON text; StorageError if it is not JSON, or repeats a field.

    where: name of the text in messages.
    """
    try:
        return json.loads(text, object_pairs_hook=_each_name_once)
    except (ValueError, RecursionError) as e:  # very long numbers also raise ValueError
        raise StorageError(f'{where} is not JSON: {e}') from e


def _each_name_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f'an object has the field {name!r:.80} twice')
        found[name] = value
    return found


def is_table(path: str) -> bool:
    """Return whether a file's name ends in .csv or .tsv."""
    return path.lower().endswith(TABLES)


def read_table(path: str) -> list[tuple[str, dict[str, str]]]:
    """Return (where, {column: text}) for each row of a table; `where` names file and line.

    Empty rows are skipped: spreadsheets write them in place of deleted ones. A column without a
    name, such as pandas' row numbers, is called 'column 1'. StorageError for a row that is not as
    wide as the header.
    """
    text = read_text(path)
    csv.field_size_limit(sys.maxsize)
    found: list[tuple[str, dict[str, str]]] = []
    names: list[str] = []
    where = f'{path}, line 1'
    if text.startswith('sep='):
        raise StorageError(f'{where} is no header but names the separator: delete this line')
    reader = csv.reader(io.StringIO(text), delimiter=_delimiter(text), strict=True)
    try:
        for row in reader:
            if not names:
                names = [name.strip() or f'column {i}' for i, name in enumerate(row, 1)]
                if len(set(names)) < len(names):
                    raise StorageError(f'{where}: a header must give each column a name of its own')
            elif any(row):
                if len(row) != len(names):
                    raise StorageError(
                        f'{where} has {len(row)} values for {len(names)} columns: put values with'
                        ' a comma, semicolon or line break in them into quotes'
                    )
                found.append((where, dict(zip(names, row))))
            where = f'{path}, line {reader.line_num + 1}'
    except csv.Error as e:
        raise StorageError(
            f'{where} is not a row of a table: {e}; is a closing quotation mark missing?'
        ) from e
    return found


def _delimiter(text: str) -> str:
    """Return the separator that occurs most often in a table's header, outside quotes."""
    unquoted = re.sub(r'(?<![^,;\t\r\n])"(?:[^"]|"")*"', '', text)
    header, _, _ = unquoted.lstrip('\r\n').partition('\n')
    return max(',;\t', key=header.count)
