"""Measure what lockd takes of a processor and of memory on a host where hardly anything happens.

`sudo .venv/bin/python -m bench.idle` writes bench/build/idle.json and .md. The daemon runs with its default
configuration, and nobody scrapes it. It is measured some seconds after its start, when most that happens is
new to it, and again five minutes after its start. CPU times come from the scheduler, in nanoseconds, because
a tick is shorter than the unit of /proc/PID/stat. The report also says how much else ran on the host.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bench import results
from bench.cost import pids_of
from bench.startup import PROCESSES, memory_of
from tests.support.lockd_process import Lockd

ROUND_SECONDS, ROUNDS = 10.0, 4


@dataclass
class Phase:
    """A phase of the measurement: its beginning, its targets, and what the daemon's processes took in it."""

    name: str
    begin: float
    """Seconds after the start of the daemon."""
    cpu_target: float
    """The share of one processor that all processes together may take."""
    pss_target: float
    """The memory that all processes together may have, as proportional set size (PSS) in bytes."""
    shares: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in PROCESSES})
    """The shares of one processor that each process took, one for each round, by the name of the process."""
    others: list[float] = field(default_factory=list)
    """The shares of one processor that everything else on the host took, one for each round."""
    pss: dict[str, int] = field(default_factory=dict)
    """The PSS in bytes of each process that there is at the end of the phase, by the name of the process."""

    def measure(self, daemon: Lockd, rounds: int, seconds: float) -> None:
        for _ in range(rounds):
            began, before, busy_before = time.monotonic(), taken_by_processes(daemon), busy()
            time.sleep(seconds)
            passed, after = time.monotonic() - began, taken_by_processes(daemon)
            mine = 0.0
            for name in PROCESSES:
                share = sum(ns - before[name].get(pid, 0) for pid, ns in after[name].items()) / 1e9 / passed
                self.shares[name].append(share)
                mine += share
            self.others.append(max((busy() - busy_before) / passed - mine, 0.0))
        self.pss = {name: memory.share for name, memory in memory_of(daemon).items()}

    def report(self) -> Iterator[str]:
        yield f"## {self.name.capitalize()}\n\n| process | of one processor | least to most | memory (PSS) |"
        yield "|---|---:|---:|---:|"
        for name, shares in self.shares.items():
            yield _row(name, shares, f"{self.pss[name] / 1e6:.1f} MB" if name in self.pss else "none")
        every = [sum(each) for each in zip(*self.shares.values(), strict=True)]
        yield _row("all", every, f"{sum(self.pss.values()) / 1e6:.1f} MB")
        yield _row("target", [self.cpu_target], f"{self.pss_target / 1e6:.0f} MB")
        yield (
            f"\nEverything else on the host took {statistics.median(self.others):.1%} of one processor in the"
            " meantime; what it does is counted, and costs.\n"
        )


def _row(name: str, shares: list[float], memory: str) -> str:
    spread = f"{min(shares):.2%} to {max(shares):.2%}" if len(shares) > 1 else ""
    return f"| {name} | {statistics.median(shares):.2%} | {spread} | {memory} |"


def taken_by_processes(daemon: Lockd) -> dict[str, dict[int, int]]:
    """The CPU time of each process in nanoseconds, by its name and its present process id."""
    pids = pids_of(daemon.process.pid)
    return {name: {pids[name]: taken(pids[name])} if name in pids else {} for name in PROCESSES}


def taken(pid: int) -> int:
    """The CPU time of a process in nanoseconds, without that of threads that have ended."""
    total = 0
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                total += int((task / "schedstat").read_text().split()[0])
    return total


def busy() -> float:
    """The seconds in which processors of the host were busy since it booted, added up over all processors."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    idle = fields[3] + fields[4]
    return (sum(fields[:8]) - idle) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="shorter rounds, and only those after the start")
    parser.add_argument("--quiet-after", type=float, default=300.0, metavar="SECONDS")
    arguments = parser.parse_args()
    host = results.host()
    phases = [Phase("in the first minute", 5.0, 0.01, 60e6)]
    if not arguments.quick:
        phases.append(Phase("on a quiet host", arguments.quiet_after, 0.005, 40e6))
    rounds, seconds = (2, 3.0) if arguments.quick else (ROUNDS, ROUND_SECONDS)
    with tempfile.TemporaryDirectory() as directory:
        daemon = Lockd(Path(directory))
        started = time.monotonic()
        try:
            for phase in phases:
                time.sleep(max(started + phase.begin - time.monotonic(), 0.0))
                phase.measure(daemon, rounds, seconds)
        finally:
            daemon.stop()
    text = "# What lockd takes of an idle host\n\n" + "\n".join(
        line for phase in phases for line in phase.report()
    )
    results.write("idle", {"host": host, "phases": [vars(phase) for phase in phases]}, text)
    print(text)


if __name__ == "__main__":
    main()
