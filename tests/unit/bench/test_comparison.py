"""Tests of what benchmarks conclude from figures: ratios of neighbouring runs, effects of chance, targets."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.chart import draw
from bench.comparison import Comparison
from bench.targets import TARGETS, over_floor, table
from tests.needs import need

CALL, RATE, MUTEX = "futex wake", "perf bench futex hash", "mutex, kernel (pipe)"


@pytest.fixture
def found() -> Comparison:
    """Return a comparison of three rounds. In the second round the host is half as fast."""
    one = Comparison([(CALL, "ns a call", False, False), (RATE, "operations/s", True, False),
                      (MUTEX, "ns a pair", False, True)])  # fmt: skip
    for pace in (1.0, 2.0, 1.0):
        untraced = {CALL: 100 * pace, RATE: 1000 / pace, MUTEX: 50 * pace}
        for variant, factor, mutex in (
            ("untraced", 1.0, 1.02), ("floor", 1.2, 1.0), ("lockd", 1.5, 1.01),
            ("floor, every call", 2.0, 1.0), ("lockd, every call", 2.5, 1.01), ("locktrace-like", 4.0, 1.0),
            ("lockd: kernel_locks", 1.0, 1.3),
        ):  # fmt: skip
            traced = {CALL: 100 * pace * factor, RATE: 1000 / pace / factor, MUTEX: 50 * pace * mutex}
            one.add(variant, traced, untraced)
    return one


def test_ratios_are_made_of_neighbours(found: Comparison) -> None:
    assert found.each_slower("lockd", CALL) == [1.5, 1.5, 1.5]


def test_a_lower_rate_is_slower(found: Comparison) -> None:
    assert found.slower("lockd", RATE).median == pytest.approx(1.5)


def test_what_is_added_is_compared_with_what_the_floor_adds(found: Comparison) -> None:
    assert over_floor(found, CALL) == pytest.approx(1.5)
    assert found.over_floor("lockd", CALL) == pytest.approx(2.5)
    assert found.over_floor("locktrace-like", CALL) == pytest.approx(3.0)


def test_a_floor_that_chance_could_have_made_divides_nothing(found: Comparison) -> None:
    assert found.over_floor("lockd", MUTEX) is None


def test_no_measurable_cost_is_what_untraced_runs_have_as_well(found: Comparison) -> None:
    assert found.is_free("lockd", MUTEX)
    assert not found.is_free("lockd: kernel_locks", MUTEX)
    line = next(line for line in found.markdown("", {}, "").splitlines() if line.startswith("No measurable"))
    assert line.endswith("): lockd; lockd, every call. A measurable cost: lockd: kernel_locks.")


def test_a_load_that_failed_in_one_of_two_neighbours_has_no_ratio(found: Comparison) -> None:
    found.add("lockd", {CALL: 1.0}, {})
    assert len(found.each_slower("lockd", CALL)) == 3


def test_the_report_is_made_of_what_the_file_says(found: Comparison) -> None:
    found.missing["bcc klockstat"] = "Traceback\nException: no kprobes"
    again = Comparison.from_json(found.as_json())
    assert again.markdown("Title", {"kernel": "6"}, "c.svg") == found.markdown(
        "Title", {"kernel": "6"}, "c.svg"
    )
    assert "- bcc klockstat: Exception: no kprobes\n" in again.markdown("", {}, "")


def test_targets_are_told_by_the_worst_load(found: Comparison) -> None:
    found.loads = [*found.loads, ("futex wait", "ns a call", False, False)]
    for variant, figure in (("floor, every call", 2.0), ("lockd, every call", 3.0), ("lockd", 1.0)):
        found.add(variant, {"futex wait": figure}, {"futex wait": 1.0})
    rows = [row for row in table(found).splitlines() if "futex call" in row]
    assert rows == [
        "| futex call that does not block ÷ untraced | ≤ 1.02 | 1.50 | **no** |",
        "| every call: cost added to a futex call that does not block ÷ the floor's | ≤ 1.4 | 2.00 "
        "| **no** |",
    ]


def test_a_target_that_was_not_measured_is_said_to_be(found: Comparison) -> None:
    assert len(table(found).splitlines()) == 2 + len(TARGETS)
    assert "ping-pong round trip ÷ untraced | ≤ 1.3 | not measured" in table(found)


def test_the_chart_is_a_picture_with_a_panel_for_each_load(found: Comparison, tmp_path: Path) -> None:
    need("python3:matplotlib")
    draw(found, tmp_path / "c.svg")
    texts = {
        node.text for node in ElementTree.parse(tmp_path / "c.svg").iter("{http://www.w3.org/2000/svg}text")
    }
    assert {CALL, RATE, MUTEX, "lockd: kernel_locks", "1.50"} <= texts
