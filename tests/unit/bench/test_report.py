"""Tests of the report that joins all benchmarks, and of the anatomy of a call, which leaves code out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench import all as everything
from bench import anatomy, results

ROOT = Path(__file__).resolve().parents[3]
CLOCK, PID = 5, 14
EXIT = bytes.fromhex("9500000000000000")


def call(helper: int) -> bytes:
    return bytes((anatomy.CALL, 0, 0, 0)) + helper.to_bytes(4, "little")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory with `bench`, for programs, and with `build` in place of bench/build."""
    monkeypatch.setattr(everything, "ROOT", tmp_path)
    (tmp_path / "bench").mkdir()
    monkeypatch.setattr(results, "BUILD", tmp_path / "build")
    (tmp_path / "build").mkdir()
    return tmp_path


def program(here: Path, name: str, figure: int, code: int = 0) -> everything.Part:
    """Make a part whose program writes its arguments and `figure`, or exits with `code` if that is not 0."""
    (here / f"bench/{name}.py").write_text(
        f"import sys, pathlib\nif {code}: sys.exit({code})\nbuild = pathlib.Path({str(here)!r}) / 'build'\n"
        f"(build / '{name}.json').write_text('{{\"figure\": {figure}}}')\n"
        f"(build / '{name}.md').write_text('# {name}\\n\\n## Part\\n' + ' '.join(sys.argv[1:]) + '\\n')\n"
    )
    return everything.Part(name, 1, 1)


def test_the_report_has_every_part_and_says_which_failed(here: Path) -> None:
    parts = [program(here, "one", 1), program(here, "two", 2, code=3), program(here, "three", 3)]
    (here / "build/two.json").write_text('{"figure": "of another run"}')
    failed = everything.run(parts, True, {"three": ["--rounds", "2"]})
    everything.join(parts, {"kernel": "6"}, failed, 1.0)
    text = (here / "build/report.md").read_text()
    assert "\n## one\n\n### Part\n--quick\n" in text
    assert "\n### Part\n--quick --rounds 2\n" in text
    assert "- two: exit code 3" in text
    data = json.loads((here / "build/report.json").read_text())
    assert data["parts"] == {"one": {"figure": 1}, "three": {"figure": 3}}
    assert list(data["failed"]) == ["two"]


def test_every_part_is_a_program_that_is_there() -> None:
    for part in everything.PARTS:
        command = [sys.executable, "-m", f"bench.{part.name}", "--help"]
        assert "--quick" in subprocess.check_output(command, cwd=ROOT, text=True), part.name


def test_calls_of_one_helper_become_a_constant() -> None:
    code = call(CLOCK) + call(PID) + call(CLOCK) + EXIT
    assert anatomy.without(CLOCK, "", code) == anatomy.ONE + call(PID) + anatomy.ONE + EXIT


def test_a_call_of_a_function_of_the_program_is_no_helper() -> None:
    code = bytes((anatomy.CALL, 0x10, 0, 0)) + CLOCK.to_bytes(4, "little") + EXIT
    assert anatomy.without(CLOCK, "", code) == code


def test_parts_of_a_call_are_differences() -> None:
    found = {
        anatomy.UNTRACED: 200.0, anatomy.EMPTY: 400.0, anatomy.ALL: 500.0, "only futex_enter": 440.0,
        "without clock reads": 430.0, "without thread ids": 490.0,
    }  # fmt: skip
    counts = {"futex_enter": {"clock reads": 1, "thread ids": 0}}
    text = anatomy.table(anatomy.ACCOUNTS[0], found, counts)
    for row in (
        "| + hooks: empty programs | 200 |",
        "| + what they do | 100 |",
        "| by `futex_enter` (1 clock reads in its code) | 40 |",
        "| clock reads | 70 |",
        "| all but these | 20 |",
        "Added ÷ added by empty programs: 1.50.",
    ):
        assert row in text.splitlines()
