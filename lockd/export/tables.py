"""A snapshot's detail tables as JSON, filtered as the query asks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockd.errors import LockdError

MOST_ROWS = 1000
_DEFAULT_ROWS = 100
_FILTERS = ("unit", "comm", "kind")


class QueryError(LockdError):
    """A parameter of the query has a value that breaks its rule."""


@dataclass(frozen=True)
class Query:
    """How many rows, and the value that each filtered column must have."""

    limit: int
    filters: Mapping[str, str]


def parse_query(arguments: Mapping[str, list[bytes]]) -> Query:
    """The parameters lockd knows; others are ignored."""
    given = {name: arguments[name] for name in ("limit", *_FILTERS) if name in arguments}
    values: dict[str, str] = {}
    for name, several in given.items():
        if len(several) > 1:
            raise QueryError(f"parameter {name}: given {len(several)} times; rule: once")
        try:
            values[name] = several[0].decode()
        except UnicodeDecodeError:
            raise QueryError(f"parameter {name}: {several[0]!r}; rule: UTF-8") from None
    limit = values.pop("limit", str(_DEFAULT_ROWS))
    if not (limit.isascii() and limit.isdigit() and len(limit) < 9 and 1 <= int(limit) <= MOST_ROWS):
        raise QueryError(f'parameter limit: "{limit[:40]}"; rule: a whole number from 1 to {MOST_ROWS}')
    return Query(int(limit), values)


def render_table(name: str, head: Mapping[str, Any], arrays: Mapping[str, memoryview], query: Query) -> bytes:
    """One table of the block: {"time": seconds, NAME: [{column: value, ...}, ...]}.

    The head is {"time": ..., "tables": {NAME: {"text": {column: [value, ...]},
    "numbers": [column, ...], "lists": {column: [[value, ...], ...]}}}}; the numbers of a column
    are in the array NAME.COLUMN.
    """
    table = head["tables"][name]
    columns: dict[str, Any] = {
        **table["text"],
        **{column: arrays[f"{name}.{column}"] for column in table["numbers"]},
        **table["lists"],
    }
    for column in query.filters:
        if column not in table["text"]:
            raise QueryError(f"parameter {column}: {name} have no such column; rule: leave it out")
    wanted = query.filters.items()
    rows: list[dict[str, Any]] = []
    for values in zip(*columns.values(), strict=True):
        row = dict(zip(columns, values, strict=True))
        if all(row[column] == value for column, value in wanted):
            rows.append(row)
            if len(rows) == query.limit:
                break
    answer = {"time": head["time"], name: rows}
    return json.dumps(answer, separators=(",", ":"), allow_nan=False).encode() + b"\n"
