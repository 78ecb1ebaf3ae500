"""Rules for all tiers (tests/conftest.py): tries are counted and limited, and `thorough` needs a reason."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tries import ALWAYS, allowance

ROOT = Path(__file__).resolve().parents[2]
RETRYING = """
from tests.tries import tries
import pytest

@pytest.fixture
def tried():
    assert list(tries(2)) == [0, 1]

@pytest.mark.parametrize("most", {numbers})
def test_one(tried, most):
    assert list(tries(most)) == list(range(most))
"""
MARKED = """
import pytest

@pytest.mark.thorough({why})
def test_thorough():
    pass

def test_other():
    pass
"""


def run(directory: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a test module with the text `text` in a pytest process of its own."""
    (directory / "test_it.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-c", ROOT / "pyproject.toml"]
    return subprocess.run(
        [*command, "-p", "no:cacheprovider", f"--rootdir={directory}", *options, directory / "test_it.py"],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip


@pytest.mark.parametrize("further", [ALWAYS, ALWAYS + 1])
def test_as_many_tries_as_may_be_and_one_more(tmp_path: Path, further: int) -> None:
    """Each of two tests has one further try in its fixture; the second test has all the others."""
    done = run(tmp_path, RETRYING.format(numbers=[1, further - 1]), f"--junitxml={tmp_path}/report.xml")
    assert "2 passed" in done.stdout
    assert "further tries: 1: test_it.py::test_one[1]" in done.stdout
    assert f"further tries: {further - 1}: test_it.py::test_one[" in done.stdout
    assert f"further tries: {further}, of 2 tests; {ALWAYS} may be" in done.stdout
    assert ("FAILED: further tries" in done.stdout) == (further > ALWAYS)
    assert done.returncode == (further > ALWAYS)
    assert f'name="tries" value="{further}"' in (tmp_path / "report.xml").read_text()


def test_one_in_ten_may_try_again() -> None:
    assert [allowance(tests) for tests in (0, 1, 39, 40, 155)] == [3, 3, 3, 4, 15]


@pytest.mark.parametrize(("options", "says"), [(["--gate"], "1 passed, 1 deselected"), ([], "2 passed")])
def test_the_gate_leaves_out_what_is_thorough(tmp_path: Path, options: list[str], says: str) -> None:
    done = run(tmp_path, MARKED.format(why="'it takes long'"), *options)
    assert says in done.stdout
    assert done.returncode == 0


@pytest.mark.parametrize("why", ["", "''", "7"])
def test_a_marker_without_a_reason_is_an_error(tmp_path: Path, why: str) -> None:
    done = run(tmp_path, MARKED.format(why=why))
    assert "thorough says why, as its one argument" in done.stdout + done.stderr
    assert done.returncode != 0
