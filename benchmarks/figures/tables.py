"""Rows of tables: grouped, and as CSV."""

import csv
import io
from collections.abc import Iterable
from typing import Any

from lm_human_preferences import storage

Rows = list[dict[str, Any]]


def groups(rows: Iterable[dict[str, Any]], *keys: str) -> dict[tuple[Any, ...], Rows]:
    """Return {values of `keys`: the rows that have them}, in the order of their first rows."""
    by_values: dict[tuple[Any, ...], Rows] = {}
    for row in rows:
        values = tuple(row[key] for key in keys)
        by_values.setdefault(values, []).append(row)
    return by_values


def write_table(path: str, rows: Rows) -> None:
    """Write rows of the same keys as CSV; all of it appears, or nothing."""
    text = io.StringIO(newline='')
    table = csv.DictWriter(text, rows[0], lineterminator='\n')
    table.writeheader()
    table.writerows(rows)
    storage.write_bytes(path, text.getvalue().encode())
