"""The loads for measuring overhead: programs of ours for single calls, and benchmarks of others."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from bench.database import SERVER, database

PROGRAMS = Path(__file__).resolve().parent / "programs"
SECONDS = 60
"""The seconds that a load may take. One that takes longer has failed."""


class Failed(Exception):
    """A load gave no figure. The message has what it printed."""


@dataclass(frozen=True)
class Load:
    """A command that prints one figure."""

    name: str
    command: tuple[str, ...]
    figure: str
    """What the figure is, for example `ns a call`."""
    pattern: str = r"^([\d.]+)\s*$"
    """A pattern for the figure in what the command prints."""
    is_rate: bool = False
    """Whether more is better."""
    is_free: bool = False
    """Whether nothing that lockd traces happens in it, so that it should cost nothing."""
    needs: tuple[str, ...] = ()
    """The programs that the load needs besides that of its command."""
    beside: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    """A context in which the server that the command talks to is running."""

    def missing(self) -> str:
        """The reason why the load cannot run here; empty if it can."""
        absent = [name for name in (self.command[0], *self.needs) if not shutil.which(name)]
        return f"{absent[0]} is not installed" if absent else ""

    def run(self) -> float:
        """Run the command, and return its figure. Raises Failed."""
        words = " ".join(self.command)
        try:
            done = subprocess.run(self.command, capture_output=True, text=True, check=False, timeout=SECONDS)
        except subprocess.TimeoutExpired as error:
            raise Failed(f"{words}: not done in {SECONDS} s") from error
        found = re.search(self.pattern, done.stdout + done.stderr, re.MULTILINE)
        if done.returncode or not found:
            raise Failed(f"{words}: exit code {done.returncode}: {(done.stdout + done.stderr)[-500:]}")
        return float(found[1])


def built(directory: Path, *flags: str) -> None:
    """Compile our programs into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    for source in PROGRAMS.glob("*.c"):
        command = [
            "gcc",
            "-O2",
            "-Wall",
            "-Werror",
            "-pthread",
            *flags,
            "-o",
            directory / source.stem,
            source,
        ]
        subprocess.run(command, check=True)


def ours(directory: Path, runs: int = 0) -> list[Load]:
    """Our programs, which built() has put into `directory`. The figure of each is the median of its usual
    number of short runs, or of `runs`."""
    more = (str(runs),) if runs else ()

    def load(name: str, program: str, what: str, figure: str, is_free: bool = False) -> Load:
        return Load(name, (str(directory / program), what, *more), figure, is_free=is_free)

    return [
        load("futex wake", "futex_call", "wake", "ns a call"),
        load("futex wait", "futex_call", "wait", "ns a call"),
        load("another system call", "futex_call", "other", "ns a call"),
        load("futex ping-pong", "pingpong", "futex", "ns a round trip"),
        load("pipe ping-pong", "pingpong", "pipe", "ns a round trip"),
        load("mutex, user space", "uncontended", "mutex", "ns a pair", is_free=True),
        load("mutex, kernel (pipe)", "uncontended", "pipe", "ns a pair", is_free=True),
        load("mutex, contended", "contended", "mutex", "ns a pair"),
    ]


def others(directory: Path) -> list[Load]:
    """Benchmarks that others wrote; what they need is put into `directory` while they run."""
    return [
        _perf_rate("futex", "hash", "-r", "1"),
        _perf_time("futex", "wake", "-t", "64"),
        _perf_time("futex", "requeue", "-t", "64"),
        _perf_rate("futex", "lock-pi", "-r", "1"),
        _perf_time("sched", "messaging", "-g", "5", "-l", "200"),
        _perf_time("sched", "pipe", "-l", "50000"),
        *(_stress(name) for name in ("futex", "mutex", "sem")),
        _database(directory),
    ]


def _perf_rate(*words: str) -> Load:
    name = " ".join(("perf bench", *words[:2]))
    pattern = r"Averaged (\d+) operations/sec"
    return Load(name, ("perf", "bench", *words), "operations/s", pattern, is_rate=True)


def _perf_time(*words: str) -> Load:
    name = " ".join(("perf bench", *words[:2]))
    unit, pattern = ("ms", r"in ([\d.]+) ms \(") if words[0] == "futex" else ("s", r"Total time: ([\d.]+)")
    return Load(name, ("perf", "bench", *words), unit, pattern)


def _stress(stressor: str) -> Load:
    command = ("stress-ng", "--metrics", "--timeout", "1", f"--{stressor}", "2")
    bogo_rate = rf"\] {stressor}(?:\s+[\d.]+){{4}}\s+([\d.]+)"
    return Load(f"stress-ng {stressor}", command, "operations/s", bogo_rate, is_rate=True)


def _database(directory: Path) -> Load:
    socket = directory / "mariadb.socket"
    command = (
        "mariadb-slap", "--no-defaults", f"--socket={socket}", "--auto-generate-sql",
        "--auto-generate-sql-add-autoincrement", "--auto-generate-sql-load-type=mixed",
        "--concurrency=8", "--number-of-queries=8000",
    )  # fmt: skip
    pattern = r"Average number of seconds to run all queries: ([\d.]+)"
    return Load(
        "MariaDB, mariadb-slap", command, "s", pattern, needs=(SERVER,), beside=lambda: database(socket)
    )
