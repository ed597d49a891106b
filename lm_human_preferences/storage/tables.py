"""Tables as spreadsheets write them: CSV with commas, semicolons or tabs, and a header."""

import csv
import io
import re
import sys

from lm_human_preferences.storage.cache import read_text
from lm_human_preferences.storage.paths import StorageError

SUFFIXES = ('.csv', '.tsv')


def is_table(path: str) -> bool:
    """Return whether a file's name ends in .csv or .tsv."""
    return path.lower().endswith(SUFFIXES)


def read_table(path: str) -> list[tuple[str, dict[str, str]]]:
    """Return (place for messages, {column: text}) of each row of a local or remote file.

    Empty rows are skipped: spreadsheets write them in place of deleted ones. StorageError for a row
    that is not as wide as the header.
    """
    text = read_text(path)
    first = re.match('sep=([,;\t|])\n', text)  # line in which Excel names the separator
    lines = io.StringIO(text)
    lines.seek(first.end() if first else 0)
    begin = 2 if first else 1
    csv.field_size_limit(sys.maxsize)
    found: list[tuple[str, dict[str, str]]] = []
    names: list[str] = []
    where = f'{path}, line {begin}'
    try:
        delimiter = first[1] if first else _delimiter(text)
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        for row in reader:
            if not names:
                names = [name.strip() for name in row]
                if len(set(names)) < len(names) or '' in names:
                    raise StorageError(f'{where}: a header must give each column a name of its own')
            elif any(row):
                if len(row) != len(names):
                    raise StorageError(
                        f'{where} has {len(row)} values for {len(names)} columns: put values with'
                        ' a comma, semicolon or line break in them into quotes'
                    )
                found.append((where, dict(zip(names, row))))
            where = f'{path}, line {reader.line_num + begin}'
    except csv.Error as e:
        raise StorageError(
            f'{where} is not a row of a table: {e}; does a quotation mark have no end?'
        ) from e
    return found


def _delimiter(text: str) -> str:
    """Return the separator that is most frequent in a table's header, outside quotes."""
    unquoted = re.sub(r'(?<![^,;\t\r\n])"(?:[^"]|"")*"', '', text)
    header, _, _ = unquoted.lstrip('\r\n').partition('\n')
    return max(',;\t', key=header.count)
