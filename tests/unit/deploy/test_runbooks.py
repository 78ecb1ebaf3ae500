"""Tests of the runbooks: each has its parts, and the commands, flags and HTTP paths in it exist."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from lockd import cli
from lockd.export.detail import FILTERS
from tests.support.exporter_process import Exporter, exporter
from tests.support.watch_files import RUNBOOKS, commands

PARTS = ["Look", "Usual causes", "Tune"]
OTHERS = {"cat", "dmesg", "gdb", "grep", "journalctl", "python3", "sort", "systemctl", "tail"}
"""The other programs in commands: any host has them, or they are usually installed for debugging."""
PARAMETERS = {"by", "limit", "program", *FILTERS}
ALL = [(page, command) for page in sorted(RUNBOOKS) for command in commands(RUNBOOKS[page])]


def programs(command: str) -> Iterator[list[str]]:
    """The command line of each program in a pipeline, as words."""
    line = shlex.shlex(command.removeprefix("sudo "), posix=True, punctuation_chars="|>")
    line.whitespace_split = True
    for is_pipe, words in itertools.groupby(line, lambda word: word == "|"):
        if not is_pipe:
            yield list(itertools.takewhile(lambda word: word != ">", words))


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
    """At least one command is shown with its output. For journalctl it is the log of lockd."""
    blocks = re.findall(r"```console\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert any(not line.startswith("$ ") for block in blocks for line in block.splitlines())
    assert len(commands(page)) == 3


@pytest.mark.parametrize(("page", "command"), ALL)
def test_a_command_exists(page: str, command: str, served: Exporter) -> None:
    for program, *arguments in programs(command):
        if program == "lockd":
            cli._parser(arguments).parse_args(arguments)
        elif program == "curl":
            (url,) = [word for word in arguments if word.startswith("127.0.0.1:9776")]
            parts = urlsplit(f"http://{url}")
            assert parse_qs(parts.query).keys() <= PARAMETERS  # the server ignores unknown parameters
            status, _, body = served.ask(url.removeprefix("127.0.0.1:9776"))
            assert status == 200, body
        else:
            assert program in OTHERS
