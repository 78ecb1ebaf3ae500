"""docs/lock-names.md: as the tests last saw it, and nothing in it that was not right."""

from __future__ import annotations

import pytest

from tests.programs import table
from tests.programs.expected import SCENARIOS, agrees


def test_the_document_is_as_made_from_the_results() -> None:
    assert table.document(table.results()) == table.DOCUMENT.read_text()


@pytest.mark.parametrize("one", SCENARIOS, ids=lambda one: one.comm)
def test_every_program_was_run_and_was_as_expected(one: table.Scenario) -> None:
    said = table.results()["names"][one.comm]
    assert not said["missing"]
    assert table.right(one, said)


def test_a_star_stands_for_anything() -> None:
    assert agrees("libx.so:a<*>::b", "libx.so:a<int, long>::b")
    assert agrees("[jit]:f", "[jit]:f")
    assert not agrees("libx.so:a", "libx.so:ab")
    assert not agrees("a.b", "axb")
