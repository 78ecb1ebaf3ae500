"""Tests of docs/lock-names.md: it has the names that the tests of programs last found."""

from __future__ import annotations

from tests.programs import table
from tests.programs.expected import SCENARIOS, agrees


def test_the_document_is_as_made_from_the_results() -> None:
    assert table.document(table.results()) == table.DOCUMENT.read_text()


def test_every_program_has_been_run() -> None:
    said = table.results()["names"]
    assert not [one.comm for one in SCENARIOS if one.comm not in said or said[one.comm]["missing"]]


def test_a_star_stands_for_anything() -> None:
    assert agrees("libx.so:a<*>::b", "libx.so:a<int, long>::b")
    assert agrees("[jit]:f", "[jit]:f")
    assert not agrees("libx.so:a", "libx.so:ab")
    assert not agrees("a.b", "axb")
