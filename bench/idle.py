"""Measure what lockd takes of a processor and of memory on a host where hardly anything happens.

`sudo .venv/bin/python -m bench.idle` writes bench/build/idle.json and .md. The daemon runs with its default
configuration, and nobody scrapes it. It is measured some seconds after its start, when most that happens is
new to it, and again five minutes after its start. CPU times come from the scheduler, in nanoseconds, because
a tick is shorter than the unit of /proc/PID/stat. The report also says how much else ran on the host.

With `--kernel 6.12` all this happens in an emulated machine (bench/emulated.py), which is quiet whatever this
host does. A nanosecond passes there with each instruction, so that 1% of a processor is ten million
instructions a second.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bench import results
from bench.cost import pids_of
from bench.emulated import make_checkout
from bench.startup import PROCESSES, memory_of
from tests.machine.base import base, make_image
from tests.support.lockd_process import Lockd
from tests.vm import compiled, guests, kernels
from tests.vm.inside import ENVIRONMENT

ROUND_SECONDS, ROUNDS = 10.0, 4
FOUND = "/tmp/found"
PERIOD = "50ms"
"""The period of a host with the default configuration. Tests in emulated machines have a longer one."""


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


def measured(is_quick: bool, quiet_after: float) -> list[Phase]:
    """Measure a daemon on this host; with `is_quick` only after its start, and in shorter rounds."""
    phases = [Phase("in the first minute", 5.0, 0.01, 60e6)]
    if not is_quick:
        phases.append(Phase("on a quiet host", quiet_after, 0.005, 40e6))
    rounds, seconds = (2, 3.0) if is_quick else (ROUNDS, ROUND_SECONDS)
    with tempfile.TemporaryDirectory() as directory:
        daemon = Lockd(Path(directory), {"period": PERIOD})
        started = time.monotonic()
        try:
            for phase in phases:
                time.sleep(max(started + phase.begin - time.monotonic(), 0.0))
                phase.measure(daemon, rounds, seconds)
        finally:
            daemon.stop()
    return phases


def measured_in_machine(series: str, is_quick: bool, quiet_after: float) -> list[Phase]:
    """Measure a daemon in an emulated machine with a kernel of this series (tests/vm/kernels.py)."""
    options = ["--json", FOUND, "--quiet-after", quiet_after, *(["--quick"] if is_quick else [])]
    with tempfile.TemporaryDirectory(prefix="lockd-bench-", dir="/var/tmp") as name:
        root, disk = Path(name, "root"), Path(name, "disk")
        make_checkout(root)
        make_image(root, disk, "512M")
        with guests.booted(kernels.kernel_of(series), disk) as machine:
            compiled.give(machine, base() / "root", ((compiled.PROGRAMS, {}, ("auto",), {}),))
            command = ["/usr/bin/python3", "-m", "bench.idle", *options]
            done = machine.run(*command, seconds=3600.0, cwd=guests.WORK, env=ENVIRONMENT)
            if done.code:
                raise RuntimeError(f"bench.idle in the machine: exit code {done.code}:\n{done.out}")
            return [Phase(**phase) for phase in json.loads(machine.run("cat", FOUND).out)["phases"]]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="shorter rounds, and only those after the start")
    parser.add_argument("--quiet-after", type=float, default=300.0, metavar="SECONDS")
    parser.add_argument("--kernel", metavar="SERIES", help="measure in an emulated machine with this kernel")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, and no report")
    args = parser.parse_args()
    host = results.host()
    if args.kernel:
        phases = measured_in_machine(args.kernel, args.quick, args.quiet_after)
    else:
        phases = measured(args.quick, args.quiet_after)
    data = {"host": host, "phases": [vars(phase) for phase in phases]}
    if args.json:
        args.json.write_text(json.dumps(data))
        return 0
    text = "# What lockd takes of an idle host\n\n" + "\n".join(
        line for phase in phases for line in phase.report()
    )
    results.write("idle", data, text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
