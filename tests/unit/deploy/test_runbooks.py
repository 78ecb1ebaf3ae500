"""The runbooks: each has its parts, and what it tells to run exists: commands, flags, paths of HTTP."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from lockd import cli
from tests.support.exporter_process import Exporter, exporter
from tests.support.watch_files import RUNBOOKS, commands

PARTS = ["Look", "Usual causes", "Tune"]
OTHERS = {"cat", "dmesg", "gdb", "grep", "journalctl", "ls", "systemctl", "tail"}
"""Programs that any host has, or that whoever debugs has installed."""
SHELL = re.compile(r"[|&;<>]+.*")
ALL = [(page, command) for page in sorted(RUNBOOKS) for command in commands(RUNBOOKS[page])]


def words(command: str) -> Iterator[list[str]]:
    """Those of each program of a pipeline, but for what the shell takes."""
    for part in command.split("|") if "'" not in command else [command]:
        line = shlex.split(part.removeprefix("sudo "))
        yield list(itertools.takewhile(lambda word: not SHELL.fullmatch(word), line))


@pytest.fixture(scope="module")
def served() -> Iterator[Exporter]:
    with exporter() as running:
        yield running


@pytest.mark.parametrize("page", RUNBOOKS.values(), ids=list(RUNBOOKS))
def test_a_page_has_its_parts(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"# {page.stem}\n")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == PARTS
    assert text.index("**Is it urgent?**") < text.index("## Look")
    assert "| cause | how it looks | what ends it |" in text


@pytest.mark.parametrize("page", RUNBOOKS.values(), ids=list(RUNBOOKS))
def test_a_page_shows_what_its_commands_print(page: Path) -> None:
    """At least one of them; what journalctl says is what lockd logs."""
    blocks = re.findall(r"```console\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert any(not line.startswith("$ ") for block in blocks for line in block.splitlines())
    assert 2 <= len(commands(page)) <= 4


@pytest.mark.parametrize(("page", "command"), ALL)
def test_a_command_exists(page: str, command: str, served: Exporter) -> None:
    for program, *arguments in words(command):
        if program == "lockd":
            cli._parser(arguments).parse_args(arguments)
        elif program == "curl":
            (url,) = [word for word in arguments if word.startswith("127.0.0.1:9776")]
            parts = urlsplit(f"http://{url}")
            status, _, body = served.ask(f"{parts.path}?{parts.query}" if parts.query else parts.path)
            assert status == 200, body
        else:
            assert program in OTHERS
