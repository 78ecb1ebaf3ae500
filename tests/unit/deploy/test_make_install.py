"""Tests of `make install` and `make uninstall` that install nothing (tests/kernel/test_installed.py does)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("end", ["", " b", " ", "\tb", "\n"])
@pytest.mark.parametrize("variable", ["DESTDIR", "PREFIX", "SYSCONFDIR"])
@pytest.mark.parametrize("target", ["install", "uninstall"])
def test_no_path_has_a_blank(target: str, variable: str, end: str, tmp_path: Path) -> None:
    """The shell divides such a path in two, and `rm -rf` would remove the first part."""
    path = f"{tmp_path / 'a'}{end}"
    words = {"DESTDIR": str(tmp_path / "root"), variable: path}
    given = [f"{name}={value}" for name, value in words.items()]
    command = ["make", "--no-print-directory", "-n", target, *given]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    if not end:
        assert done.returncode == 0, done.stderr
        assert f"rm -rf {words['DESTDIR']}" in done.stdout
    else:
        assert (done.returncode, done.stdout) == (2, "")
        assert f'*** {variable}: "{path}" has a blank; rule: a path without blanks.' in done.stderr


def test_what_lies_at_the_first_part_of_such_a_path_stays(tmp_path: Path) -> None:
    file = tmp_path / "a" / "file"
    file.parent.mkdir()
    file.touch()
    command = ["make", "-s", "uninstall", f"DESTDIR={file.parent} b"]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert (done.returncode, file.exists()) == (2, True), done.stderr
