"""Names and numbers of system calls, compared with the C library's headers and with the list of reasons."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lockd.names.labels import reasons
from lockd.names.labels.system_calls import names

HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/aarch64-linux-gnu/asm/unistd_64.h"),
}


def test_the_reasons_name_only_calls_that_are_there() -> None:
    listed = [name for text in reasons.CALLS.values() for name in text.split()]
    assert len(listed) == len(set(listed)), "a call has two reasons"
    assert set(listed) <= {*names("x86_64").values(), *names("aarch64").values()}


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_no_name_is_there_twice(machine: str) -> None:
    assert len(set(names(machine).values())) == len(names(machine))


def test_they_are_those_of_the_headers() -> None:
    machine, header = next((machine, path) for machine, path in HEADERS.items() if path.exists())
    listed = re.findall(r"^#define __NR_(\w+) (\d+)", header.read_text(), re.MULTILINE)
    assert len(listed) > 250
    known = names(machine)
    assert [(name, nr, known.get(int(nr))) for name, nr in listed if known.get(int(nr)) != name] == []
