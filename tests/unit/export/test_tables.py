"""The detail tables as JSON: filters, limits, order of the columns."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lockd.export.detail import Query, QueryError, parse_query, render_table
from lockd.messages import pack, unpack
from tests.support.exporter_process import detail_block


def render(block: bytes, name: str, **arguments: str) -> dict[str, Any]:
    query = parse_query({key: [value.encode()] for key, value in arguments.items()})
    found: dict[str, Any] = json.loads(render_table(name, *unpack(memoryview(block)), query=query))
    return found


def test_defaults_and_limits() -> None:
    assert parse_query({}) == Query(100, {})
    assert parse_query({"limit": [b"1000"], "foo": [b"1", b"2"]}).limit == 1000
    block = detail_block(1000)
    assert len(render(block, "threads")["threads"]) == 100
    assert len(render(block, "threads", limit="1000")["threads"]) == 1000


def test_filters_come_before_the_limit() -> None:
    rows = render(detail_block(1000), "locks", kind="lock", limit="3")["locks"]
    assert [row["tid"] for row in rows] == [1, 3, 5]
    rows = render(detail_block(1000), "locks", comm="comm-999", unit="unit-1")["locks"]
    assert [row["blocked_us"] for row in rows] == [999.5]
    assert render(detail_block(), "locks", unit="")["locks"] == []


def test_a_filter_on_a_column_that_the_table_lacks() -> None:
    tables = {"locks": {"text": {"lock": ["a"]}, "numbers": [], "lists": {}}}
    block = pack({"tables": tables, "time": 1, "monotonic": 2}, {})
    assert render(block, "locks") == {"time": 1, "monotonic": 2, "locks": [{"lock": "a"}]}
    with pytest.raises(QueryError, match="parameter comm: locks have no such column"):
        render(block, "locks", comm="a")


def test_an_empty_table() -> None:
    assert render(detail_block(0), "threads")["threads"] == []
