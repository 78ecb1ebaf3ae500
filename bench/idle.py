"""What lockd takes of a processor where hardly anything happens: `sudo .venv/bin/python -m bench.idle`
writes bench/build/idle.json and .md.

The daemon runs with its default configuration, and nobody scrapes. Figures are of the scheduler, in
nanoseconds: a tick is shorter than what /proc/PID/stat counts in. How much else ran stands beside them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from pathlib import Path

from bench import results
from bench.cost import wait_for_children
from tests.support.lockd_process import Lockd

SETTLE_SECONDS = 5.0
SECONDS, ROUNDS = 10.0, 4
TARGET = 0.005


def taken(pid: int) -> int:
    """Nanoseconds that all threads of a process have run, less of those that have ended."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            total += int((task / "schedstat").read_text().split()[0])
    return total


def busy() -> float:
    """Seconds in which processors of the host did anything, all together."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    idle = fields[3] + fields[4]
    return (sum(fields[:8]) - idle) / os.sysconf("SC_CLK_TCK")


def measure(rounds: int, seconds: float) -> tuple[dict[str, list[float]], list[float]]:
    """Shares of one processor by process, one for each round, and of what else ran on the host."""
    with tempfile.TemporaryDirectory() as directory:
        daemon = Lockd(Path(directory))
        try:
            time.sleep(SETTLE_SECONDS)
            pids = {"sampler": daemon.process.pid, **wait_for_children(daemon.process.pid)}
            shares: dict[str, list[float]] = {name: [] for name in pids}
            others = []
            for _ in range(rounds):
                began, before, busy_before = time.monotonic(), [taken(pid) for pid in pids.values()], busy()
                time.sleep(seconds)
                passed = time.monotonic() - began
                for (name, pid), earlier in zip(pids.items(), before, strict=True):
                    shares[name].append((taken(pid) - earlier) / 1e9 / passed)
                mine = sum(each[-1] for each in shares.values())
                others.append(max((busy() - busy_before) / passed - mine, 0.0))
        finally:
            daemon.stop()
    return shares, others


def row(name: str, shares: list[float]) -> str:
    return f"| {name} | {statistics.median(shares):.2%} | {min(shares):.2%} to {max(shares):.2%} |\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the time")
    quick = parser.parse_args().quick
    host = results.host()
    shares, others = measure(2 if quick else ROUNDS, 3.0 if quick else SECONDS)
    every = [sum(each) for each in zip(*shares.values(), strict=True)]
    text = "# What lockd takes of an idle host\n\nOf one processor.\n\n| process | median | least to most |\n"
    text += "|---|---:|---:|\n" + "".join(row(name, each) for name, each in shares.items())
    text += row("all", every)
    text += (
        f"\nTarget: {TARGET:.1%} for all. Everything else on the host took {statistics.median(others):.0%}"
    )
    text += " of one processor in the meantime; what it does is counted, and costs.\n"
    results.write("idle", {"host": host, "shares": shares, "others": others}, text)
    print(text)


if __name__ == "__main__":
    main()
