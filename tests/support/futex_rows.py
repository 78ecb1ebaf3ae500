"""The CSV of `lockd trace futex`, read by Python's csv module."""

from __future__ import annotations

import csv
import io
from typing import Any

Row = dict[str, Any]


def read(text: str) -> list[Row]:
    """Return the rows of the CSV, with numbers as integers."""
    rows: list[Row] = list(csv.DictReader(io.StringIO(text), strict=True))
    for row in rows:
        assert None not in row and None not in row.values(), row
        for name, value in row.items():
            if name not in ("addr", "stack", "kind", "lock"):
                row[name] = int(value)
    return rows


def total(rows: list[Row], column: str, **wanted: Any) -> int:
    return sum(row[column] for row in rows if all(row[name] == value for name, value in wanted.items()))
