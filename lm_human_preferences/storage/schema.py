"""Check of JSON values from files against schemas, as a file may hold anything."""

from typing import Any

COUNT = range(2**63)


def matches_schema(value: Any, schema: Any) -> bool:
    """Return whether a JSON `value` fits `schema`, which is a type, range, list, tuple or dict."""
    if isinstance(schema, dict):
        return isinstance(value, dict) and all(
            name in value and matches_schema(value[name], part) for name, part in schema.items()
        )
    if isinstance(schema, list):
        is_list = isinstance(value, list) and len(value) > 0
        return is_list and all(matches_schema(part, schema[0]) for part in value)
    if isinstance(schema, tuple):
        is_list = isinstance(value, list) and len(value) == len(schema)
        return is_list and all(map(matches_schema, value, schema))
    if isinstance(schema, range):
        return type(value) is int and value in schema
    # In Python, True is an integer; in JSON, it is not.
    return isinstance(value, schema) and (schema is bool or not isinstance(value, bool))
