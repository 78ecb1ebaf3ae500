"""`make test` installs every program that tests ask for, so that a fresh machine lacks nothing."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import needs
from tests.needs import MADE, PACKAGES, absence, need

ROOT = Path(__file__).resolve().parents[2]
ESSENTIAL = {
    "bash", "cat", "cp", "dpkg", "dpkg-query", "getconf", "id", "ldd", "mount", "nsenter", "printf",
    "setpriv", "sh", "sleep", "sync", "true", "umount", "unshare", "apt-cache", "apt-config", "apt-get",
}  # fmt: skip
"""Programs that every Debian and Ubuntu has, however small the installation is."""
OF_A_MACHINE = {"bpftool", "insmod", "rmmod", "systemctl"}
"""Programs that run in the emulated machines, where tests/machine/base.py installs them."""
STARTS = {"run", "Popen", "check_output", "check_call"}


def installed() -> set[str]:
    """The packages that `make test` asks for."""
    printed = subprocess.check_output(["make", "-n", "test"], cwd=ROOT, text=True)
    (line,) = re.findall(r"^deploy/apt-need (.*)$", printed, re.MULTILINE)
    return {word.partition("|")[0] for word in shlex.split(line)}


def test_every_package_is_installed_by_make_test() -> None:
    assert set(PACKAGES.values()) <= installed()


def test_the_set_up_begins_with_what_targets_without_root_need() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    commands = re.findall(r"^\$ ((?:sudo )?make [a-z-]+)", text, re.MULTILINE)
    assert commands[0] == "sudo make ready"
    assert "python3-venv" in installed()  # for .venv
    listed = subprocess.check_output(["make", "help"], cwd=ROOT, text=True)
    assert {command.removeprefix("sudo ") for command in commands} <= set(re.findall(r"make [a-z-]+", listed))


def test_servers_are_unpacked_where_only_others_were(tmp_path: Path) -> None:
    """The list of servers may grow: the marks of an older list on a machine must not hide what it lacks."""
    (tmp_path / "servers").mkdir()
    for of_another_list in ("made", "memcached.made"):
        (tmp_path / "servers" / of_another_list).touch()
    printed = subprocess.check_output(
        ["make", "-n", "test"], cwd=ROOT, text=True, env={**os.environ, "LOCKD_CACHE": str(tmp_path)}
    )
    (asked,) = re.findall(rf"^tests/unpack {tmp_path}/servers (.*)$", printed, re.MULTILINE)
    assert {"memcached", "nginx", "postgresql", "prometheus"} <= set(asked.split())


def programs(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each program that a module starts by a literal name, or looks up with
    shutil.which()."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
            continue
        first = node.args[0]
        if node.func.attr in STARTS and isinstance(first, ast.List) and first.elts:
            first = first.elts[0]
        elif node.func.attr != "which":
            continue
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            yield node.lineno, first.value


def test_every_program_that_tests_start_is_of_such_a_package() -> None:
    unknown = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for line, name in programs(ast.parse(path.read_text()))
        if not name.startswith("/") and name not in {*PACKAGES, *MADE, *ESSENTIAL, *OF_A_MACHINE}
    ]
    assert not unknown


def test_no_skip_for_a_missing_program_but_by_needs() -> None:
    """Such a skip would be excused as the host's fault, and nobody would see what is not installed."""
    written = [
        f"{path.relative_to(ROOT)}: {text}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if path.name not in ("needs.py", "test_needs.py")
        for text in re.findall(r"\bskip.*(?:not installed|which\().*", path.read_text())
    ]
    assert not written


@pytest.mark.parametrize("program", [*PACKAGES, *MADE])
def test_every_program_is_there(program: str) -> None:
    """`make test` installs every program and allows no skip for a missing one. Without `make test` the skip
    says what is missing."""
    need(program)


def test_what_is_absent_is_named_with_what_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "found", lambda program: "" if program in ("go", "nginx") else "/usr/bin/it")
    assert absence("gcc", "go", "nginx") == (
        "not installed: go, nginx (of golang-go, tests/unpack); `make test` installs it"
    )
    assert absence("gcc") == ""
    with pytest.raises(pytest.skip.Exception, match=r"^not installed: go"):
        need("gcc", "go")
