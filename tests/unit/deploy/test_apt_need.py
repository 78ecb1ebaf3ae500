"""Tests of deploy/apt-need with programs in place of apt's and dpkg's."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

APT_NEED = Path(__file__).parents[3] / "deploy" / "apt-need"

PROGRAMS = {
    "dpkg-query": """
        case $4 in
        one) times=1 ;;
        of-two-architectures) times='1 2' ;;
        removed) printf "$(printf %s "$3" | sed 's/${db:Status-Status}/config-files/')" && exit ;;
        *) exit 1 ;;
        esac
        for time in $times; do printf "$(printf %s "$3" | sed 's/${db:Status-Status}/installed/')"; done
    """,
    # apt's own words are those of the language.
    "apt-cache": """
        [ "$2" != absent ] && version=1.0 || version='(none)'
        [ "${LC_ALL-}" = C ] && word=Candidate || word=Installationskandidat
        printf '%s:\\n  %s: %s\\n' "$2" "$word" "$version"
    """,
    "apt-get": 'echo "$@" >>"$ASKED"',
}
"""The scripts that answer for the programs."""


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file to which apt-get's arguments go, on a host whose language is German."""
    for name, script in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in ("LANG", "LC_ALL", "LANGUAGE"):
        monkeypatch.setenv(name, "de_DE.UTF-8")
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    return tmp_path / "asked"


def apt_need(*packages: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([APT_NEED, *packages], check=False, capture_output=True, text=True)


@pytest.mark.parametrize("package", ["one", "of-two-architectures", "absent|one"])
def test_nothing_is_asked_for_what_is_installed(package: str, asked: Path) -> None:
    assert apt_need(package).returncode == 0
    assert not asked.exists()


@pytest.mark.parametrize(
    ("package", "chosen"), [("new", "new"), ("removed", "removed"), ("absent|new", "new")]
)
def test_what_is_missing_is_installed_in_any_language(package: str, chosen: str, asked: Path) -> None:
    done = apt_need("one", package)
    assert (done.returncode, done.stderr) == (0, "")
    update, install = asked.read_text().splitlines()
    assert update.startswith("update ")
    assert install.split()[0] == "install"
    assert install.split()[-2:] == ["Dpkg::Use-Pty=0", chosen]


def test_what_the_release_has_not_is_named(asked: Path) -> None:
    done = apt_need("absent")
    assert done.returncode != 0
    assert done.stderr == "apt-need: this release has no package absent\n"
    assert "install" not in asked.read_text()
