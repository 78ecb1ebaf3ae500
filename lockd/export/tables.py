"""A snapshot's detail tables as JSON, filtered as the query asks."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
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
    values = single_values(arguments, ("limit", *_FILTERS))
    limit = values.pop("limit", str(_DEFAULT_ROWS))
    if not (limit.isascii() and limit.isdigit() and len(limit) < 9 and 1 <= int(limit) <= MOST_ROWS):
        raise QueryError(f'parameter limit: "{limit[:40]}"; rule: a whole number from 1 to {MOST_ROWS}')
    return Query(int(limit), values)


def single_values(arguments: Mapping[str, list[bytes]], names: tuple[str, ...]) -> dict[str, str]:
    """Those of the parameters `names` that are given. Raises QueryError if one is given twice."""
    values: dict[str, str] = {}
    for name in names:
        several = arguments.get(name, [])
        if not several:
            continue
        if len(several) > 1:
            raise QueryError(f"parameter {name}: given {len(several)} times; rule: once")
        try:
            values[name] = several[0].decode()
        except UnicodeDecodeError:
            raise QueryError(f"parameter {name}: {several[0]!r}; rule: UTF-8") from None
    return values


def rows_of(name: str, head: Mapping[str, Any], arrays: Mapping[str, memoryview]) -> Iterator[dict[str, Any]]:
    """The rows of one table of the block, by column.

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
    for values in zip(*columns.values(), strict=True):
        yield dict(zip(columns, values, strict=True))


def render_table(name: str, head: Mapping[str, Any], arrays: Mapping[str, memoryview], query: Query) -> bytes:
    """One table of the block: {"time": seconds, NAME: [{column: value, ...}, ...]}."""
    for column in query.filters:
        if column not in head["tables"][name]["text"]:
            raise QueryError(f"parameter {column}: {name} have no such column; rule: leave it out")
    wanted = query.filters.items()
    rows = (row for row in rows_of(name, head, arrays) if all(row[key] == value for key, value in wanted))
    answer = {"time": head["time"], name: list(itertools.islice(rows, query.limit))}
    return json.dumps(answer, separators=(",", ":"), allow_nan=False).encode() + b"\n"
