"""The summary of `make test`: how many tests passed, failed and were skipped, and which were tried again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.run import TIERS, Result, result_of, summary

ROOT = Path(__file__).resolve().parents[2]
REPORT = """<testsuites><testsuite>
<testcase classname="tests.kernel.test_a" name="test_one"/>
<testcase classname="tests.kernel.test_a" name="test_two[x]">
  <properties><property name="tries" value="3"/><property name="other" value="1"/>
  <property name="lost machine" value="build/6.1.lost"/></properties>
</testcase>
<testcase classname="tests.kernel.test_a" name="test_three"><failure message="off">...</failure></testcase>
<testcase classname="tests.kernel.test_a" name="test_four"><error message="off">...</error></testcase>
<testcase classname="tests.kernel.test_b" name="test_five"><skipped message="host: no disk"/></testcase>
<testcase classname="tests.kernel.test_b" name="test_six"><skipped message="host: no disk&#10;.."/></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def result(tmp_path: Path) -> Result:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    return result_of("kernel", 1, 2.5, report)


def test_a_report_is_read(result: Result) -> None:
    assert result.outcomes == {"passed": 2, "failed": 2, "skipped": 2}
    assert result.skipped == {"host: no disk": 2}
    assert result.tries == {"test_a::test_two[x]": [3]}
    assert result.lost == {"test_a::test_two[x]": "build/6.1.lost"}


def test_the_summary(result: Result, tmp_path: Path) -> None:
    ended = result_of("vm", -9, 0.5, tmp_path / "none.xml")
    lines = summary([result, ended], 3.0).splitlines()
    assert lines[1].split() == ["kernel", "2", "2", "2", "2.5"]
    assert lines[2].split() == ["vm", "0", "1", "0", "0.5"], "a tier that did not end is a failure"
    assert "skipped    2: host: no disk" in lines
    assert "further tries 2: kernel: test_a::test_two[x]" in lines
    assert "lost machine: kernel: test_a::test_two[x]: see build/6.1.lost" in lines
    assert "further tries in kernel: 2, of 1 tests; 3 may be" in lines
    assert lines[-2:] == ["3.0 minutes in all", "2 passed, 3 failed, 2 skipped"]


def test_every_directory_of_tests_is_a_tier() -> None:
    """No directory of tests can be forgotten in the tiers or in `testpaths`."""
    found = {path.parent.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").rglob("test_*.py")}
    assert found == {tier.directory for tier in TIERS}
    listed = re.search(r"^testpaths = (.*)$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert listed
    assert {path.removeprefix("tests/") for path in re.findall(r'"(.*?)"', listed[1])} == found


@pytest.mark.parametrize("gate", [True, False])
def test_no_tier_may_skip_what_is_not_the_hosts_fault(gate: bool) -> None:
    """Runs by hand are as strict as CI, because otherwise nobody would notice a missing tool."""
    for tier in TIERS:
        assert "--no-skips-allowed" in tier.command(gate)
