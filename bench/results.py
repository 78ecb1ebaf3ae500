"""The files in which benchmarks leave their figures, and the facts about the host on which they ran."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

BUILD = Path(__file__).resolve().parent / "build"
VERSIONS = (
    ("bpftrace", "bpftrace", "--version"),
    ("perf", "perf", "--version"),
    ("stress-ng", "stress-ng", "--version"),
    ("MariaDB", "/usr/sbin/mariadbd", "--no-defaults", "--version"),
)
"""The programs of others whose versions are noted: a name, and the command that prints the version."""
LOAD_BEFORE, TRACED_BEFORE = "load average before", "BPF programs that traced before"
TRACING = ("kprobe", "tracepoint", "raw_tracepoint", "raw_tracepoint_writable", "perf_event", "tracing")
"""The types of BPF programs that trace, as bpftool calls them."""


def write(name: str, data: dict[str, Any], text: str) -> None:
    """Leave `data`, and `text`, Markdown that begins with a heading, in bench/build/NAME.{json,md}."""
    BUILD.mkdir(exist_ok=True)
    (BUILD / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")
    (BUILD / f"{name}.md").write_text(text)


def table(head: str, rows: Iterable[Iterable[object]]) -> str:
    """A table as Markdown. `head` has the titles of the columns, with `|` in between."""
    line = "|" + "---|" * (head.count("|") + 1)
    return "\n".join([f"| {head} |", line, *(f"| {' | '.join(map(str, row))} |" for row in rows)]) + "\n"


def host() -> dict[str, str]:
    """The facts about the host on which figures depend, besides what is measured, in words."""
    clock = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    jit = Path("/proc/sys/net/core/bpf_jit_enable")
    found = {
        "date": time.strftime("%Y-%m-%d"),
        "kernel": platform.release(),
        "processors": f"{os.cpu_count()}, {_processor()}",
        "clock source": _text(clock),
        "BPF JIT compiler": {"0": "off", "1": "on"}.get(_text(jit), _text(jit)),
        LOAD_BEFORE: f"{os.getloadavg()[0]:.2f}",
    }
    if others := _tracing_programs():
        found[TRACED_BEFORE] = str(others)
    with contextlib.suppress(ImportError):
        import bcc  # type: ignore[import-untyped,unused-ignore]

        found["bcc"] = bcc.__version__
    for name, *command in VERSIONS:
        with contextlib.suppress(OSError):
            printed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
            if version := re.search(r"\d+\.\d+(\.\d+)*", printed):
                found[name] = version[0]
    return {name: value for name, value in found.items() if value}


def _tracing_programs() -> int:
    """The number of tracing programs of others. They may be attached, and make untraced runs slow."""
    try:
        shown = subprocess.run(["bpftool", "-j", "prog", "show"], capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return 0
    return sum(program["type"] in TRACING for program in json.loads(shown))


def _processor() -> str:
    named = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return named[1] if named else platform.machine()


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
