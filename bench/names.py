"""Measure whether finding the names of locks delays sampling.

`sudo .venv/bin/python -m bench.names` writes bench/build/names.json and .md.

Beside one daemon there are, by turns, 2,000 new processes a minute for some seconds and none for some
seconds. Each of them blocks once on a mutex of its own, whose name lockd has to find
(tests/programs/names_churn.c). How late ticks began is lockd's own metric. The turns alternate so that what
else the host does is in both.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from bench import results
from bench.cost import FINE, Lockd, Metrics, Workload, quantile, since

ROOT = Path(__file__).resolve().parents[1]
CHURN = ROOT / "tests/programs/build/names_churn"
LATE = "lockd_tick_late_seconds"
SHARES = (0.5, 0.9, 0.99, 1.0)
NAMED = "names_churn:churned_mutex"


class Lateness:
    """How late ticks began, in several turns together."""

    def __init__(self) -> None:
        self._counts: dict[float, float] = {}
        self.ticks = 0.0

    def add(self, before: Metrics, after: Metrics) -> None:
        for labels in after.labels(f"{LATE}_bucket"):
            edge = float(labels["le"])
            counted = since(before, after, f"{LATE}_bucket", le=labels["le"])
            self._counts[edge] = self._counts.get(edge, 0.0) + counted
        self.ticks += since(before, after, f"{LATE}_count")

    def quantile(self, share: float) -> float:
        """The lateness in seconds that this share of the ticks did not exceed."""
        edges = sorted(self._counts)
        return quantile(edges, [self._counts[edge] for edge in edges], share)


def measure(turns: int, seconds: int, per_minute: int, threads: int) -> tuple[str, dict[str, Any]]:
    """Run the turns, and return a table and its figures."""
    quiet, churned = Lateness(), Lateness()
    processes = 0
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as ends:
        daemon = Lockd(Path(directory), FINE)
        ends.callback(daemon.stop)
        if threads:
            load = Workload("load", 2 * turns * seconds + 30, threads, 2000, comm="load")
            ends.callback(load.kill)
            load.go()
        for _ in range(turns):
            before = daemon.metrics()
            subprocess.run(["sleep", str(seconds)], check=True)
            between = daemon.metrics()
            churn = [CHURN, str(per_minute), str(seconds)]
            processes += json.loads(subprocess.check_output(churn))["processes"]
            quiet.add(before, between)
            churned.add(between, daemon.metrics())
        end = daemon.metrics()
    counted = end.sum("lockd_futex_blocked_seconds_count", comm="names_churn", kind="lock")
    named = end.sum("lockd_futex_lock_blocked_total", comm="names_churn", lock=NAMED)
    rows = [
        "# Whether naming delays sampling\n",
        "| ticks | " + " | ".join(f"{share:.0%} late" for share in SHARES) + " |",
        "|---|---|---|---|---|",
    ]
    turns_of = {"without": quiet, "with new processes": churned}
    for what, one in turns_of.items():
        late = " | ".join(f"{one.quantile(share) * 1000:.2f} ms" for share in SHARES)
        rows.append(f"| {what}: {one.ticks:.0f} | {late} |")
    rows.append(
        f"\n{processes} processes, {per_minute} a minute; {counted:.0f} waits counted, {named:.0f} as {NAMED}"
    )
    cpu = end.labels("lockd_cpu_seconds_total")
    used = {row["process"]: end.sum("lockd_cpu_seconds_total", process=row["process"]) for row in cpu}
    rows.append("CPU seconds: " + ", ".join(f"{name} {seconds:.1f}" for name, seconds in used.items()))
    late_seconds = {what: {share: one.quantile(share) for share in SHARES} for what, one in turns_of.items()}
    data = {"late_seconds": late_seconds, "cpu_seconds": used, "counted": counted, "named": named}
    return "\n".join(rows) + "\n", data


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one short turn")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--seconds", type=int, default=10, help="of a turn, with and again without")
    parser.add_argument("--per-minute", type=int, default=2000, help="new processes")
    parser.add_argument("--threads", type=int, default=0, help="threads of tests/workloads/load besides")
    given = parser.parse_args()
    for directory in ("workloads", "programs"):
        subprocess.run(["make", "-s", "-C", ROOT / "tests" / directory], check=True)
    host = results.host()
    turns, seconds = (1, 5) if given.quick else (given.turns, given.seconds)
    text, data = measure(turns, seconds, given.per_minute, given.threads)
    results.write("names", {"host": host, **data}, text)


if __name__ == "__main__":
    main()
