"""The loads that overhead is measured with: programs of ours for single calls, and others' benchmarks."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = Path(__file__).resolve().parent / "programs"
SECONDS = 2
"""Of a load that runs for a given time."""


@dataclass(frozen=True)
class Load:
    """A command that prints one figure."""

    name: str
    command: tuple[str, ...]
    figure: str
    """What the figure is, as `ns a call`."""
    pattern: str = r"^([\d.]+)\s*$"
    """Where it stands in what the command prints."""
    is_rate: bool = False
    """Whether more is better."""

    def missing(self) -> str:
        """Why it cannot run here; empty if it can."""
        return "" if shutil.which(self.command[0]) else f"{self.command[0]} is not installed"

    def run(self) -> float:
        """The figure. Raises RuntimeError with the command's words if there is none."""
        done = subprocess.run(self.command, capture_output=True, text=True, check=False)
        found = re.search(self.pattern, done.stdout + done.stderr, re.MULTILINE)
        if done.returncode or not found:
            raise RuntimeError(f"{' '.join(self.command)}: {done.returncode}\n{done.stdout}{done.stderr}")
        return float(found[1])


def built(directory: Path) -> dict[str, str]:
    """Our programs, compiled into `directory`, by name."""
    paths = {}
    for source in PROGRAMS.glob("*.c"):
        paths[source.stem] = str(directory / source.stem)
        command = ["gcc", "-O2", "-Wall", "-Werror", "-pthread", "-o", paths[source.stem], str(source)]
        subprocess.run(command, check=True)
    return paths


def loads(directory: Path) -> list[Load]:
    """All of them; what has to be compiled is compiled into `directory`."""
    ours = built(directory)
    seconds = str(SECONDS)
    futex = ("perf", "bench", "futex")
    averaged = r"Averaged (\d+) operations/sec"
    wakes = r"in ([\d.]+) ms"
    return [
        Load("futex wake", (ours["futex_call"], "wake"), "ns a call"),
        Load("futex wait", (ours["futex_call"], "wait"), "ns a call"),
        Load("futex ping-pong", (ours["futex_pingpong"],), "ns a round trip"),
        Load("mutex, user space", (ours["uncontended"], "mutex"), "ns a pair"),
        Load("mutex, kernel (pipe)", (ours["uncontended"], "pipe"), "ns a pair"),
        Load(
            "perf bench futex hash", (*futex, "hash", "-r", seconds), "operations/s", averaged, is_rate=True
        ),
        Load("perf bench futex wake", (*futex, "wake"), "ms", wakes),
        Load("perf bench futex requeue", (*futex, "requeue"), "ms", wakes),
        Load(
            "perf bench futex lock-pi",
            (*futex, "lock-pi", "-r", seconds),
            "operations/s",
            averaged,
            is_rate=True,
        ),
        Load(
            "perf bench sched messaging",
            ("perf", "bench", "sched", "messaging", "-g", "5", "-l", "200"),
            "s",
            r"Total time: ([\d.]+)",
        ),
        Load(
            "perf bench sched pipe",
            ("perf", "bench", "sched", "pipe", "-l", "100000"),
            "s",
            r"Total time: ([\d.]+)",
        ),
        *(_stress(name) for name in ("futex", "mutex", "switch", "pipe")),
    ]


def _stress(stressor: str) -> Load:
    command = ("stress-ng", "--metrics", "--timeout", str(SECONDS), f"--{stressor}", "2")
    bogo_rate = rf"\] {stressor}(?:\s+[\d.]+){{4}}\s+([\d.]+)"
    return Load(f"stress-ng {stressor}", command, "operations/s", bogo_rate, is_rate=True)
