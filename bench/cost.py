"""Measure what lockd costs on this host under a mixed load.

`sudo .venv/bin/python -m bench.cost` writes bench/build/cost.json and .md, a table.

The figures are lockd's own metrics, and beside them what /proc says about its processes. The load is
tests/workloads/load.c: threads that share a contended mutex, play ping-pong on condition variables and
through pipes, and sleep, each with a pause between its operations. Run it on an otherwise idle host.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench import results
from tests.support.lockd_process import REPEATED_SECONDS, Lockd, Metrics
from tests.support.workload import Workload

ROOT = Path(__file__).resolve().parents[1]

FINE = {"histogram": {"buckets_us": [2**power for power in range(27)]}}
"""A bucket for every slot, so that quantiles are twice as fine as with the default buckets."""
CHILDREN = {"lockd.export": "exporter", "lockd.names": "namer"}
"""The name of each child of the sampler in lockd's metrics, by a part of its command line."""
CHILDREN_SECONDS = 30.0
FORBIDDEN = ("libclang", "libbcc", "libLLVM")
"""Libraries that the loader alone may have in memory."""
TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Memory:
    """The memory of a process in bytes, by /proc/PID/smaps_rollup."""

    resident: int
    share: int
    """The proportional set size (PSS), in which shared pages count in part."""
    anonymous: int
    """The part of `share` that belongs to no file."""


@dataclass
class Process:
    """One process of lockd: its own figures and the kernel's."""

    name: str
    """The name of the process, as in the label `process`."""
    pid: int
    cpu_told: float = 0.0
    cpu_stat: tuple[float, float] = (0.0, 0.0)
    """CPU seconds under load: by lockd's metrics, and the least and the most that /proc/PID/stat allows."""
    resident_told: float = 0.0
    resident_smaps: float = 0.0
    pss: float = 0.0
    """Memory in bytes: resident by lockd's metrics, and resident and PSS by /proc/PID/smaps_rollup."""
    forbidden: list[str] = field(default_factory=list)
    """Mapped libraries that it should not have."""


@dataclass
class Figures:
    """One measurement under load."""

    seconds: float
    ticks: float
    late: dict[float, float]
    work: dict[float, float]
    """Seconds by quantile: how late ticks began, how long their work took."""
    scrapes: list[float]
    """The seconds that each scrape took."""
    lines: int
    events: dict[str, float]
    """The number of events counted per second, by program."""
    dropped: float
    overflowed: float
    load: dict[str, Any]
    processes: list[Process]
    children: dict[int, str]
    """Every child of the daemon and its command line."""


def measure(seconds: float, threads: int, pause_us: int, scrape_every: float) -> Figures:
    """Measure a daemon under load. Its configuration is the default one but for finer buckets."""
    with tempfile.TemporaryDirectory() as directory:
        daemon = Lockd(Path(directory), FINE)
        try:
            load = Workload("load", int(seconds), threads, pause_us, comm="load")
            try:
                return _measure(daemon, load, scrape_every)
            finally:
                load.kill()
        finally:
            if (code := daemon.stop()) != 0:
                raise RuntimeError(f"lockd ended with code {code}:\n" + "".join(daemon.log))


def _measure(daemon: Lockd, load: Workload, scrape_every: float) -> Figures:
    told: list[dict[str, Any]] = []
    running = threading.Thread(target=lambda: told.append(load.run()))
    processes = [Process("sampler", daemon.process.pid)]
    processes += [Process(name, pid) for name, pid in wait_for_children(daemon.process.pid).items()]
    before, used_before = look(daemon, processes)
    began = time.monotonic()
    running.start()
    scrapes: list[float] = []
    while running.is_alive():
        running.join(scrape_every)
        start = time.monotonic()
        lines = daemon.get("/metrics").splitlines()
        scrapes.append(time.monotonic() - start)
    seconds = time.monotonic() - began
    after, used_after = look(daemon, processes)
    for one, (low, high), (low_after, high_after) in zip(processes, used_before, used_after, strict=True):
        one.cpu_stat = low_after - high, high_after - low
        one.cpu_told = since(before, after, "lockd_cpu_seconds_total", process=one.name)
        one.resident_told = after.sum("lockd_resident_bytes", process=one.name)
        taken = memory(one.pid)
        one.resident_smaps, one.pss = taken.resident, taken.share
        one.forbidden = forbidden_libraries(one.pid)
    return Figures(
        seconds=seconds,
        ticks=since(before, after, "lockd_ticks_total"),
        late=quantiles(before, after, "lockd_tick_late_seconds"),
        work=quantiles(before, after, "lockd_tick_seconds"),
        scrapes=scrapes,
        lines=sum(not line.startswith(b"#") for line in lines),
        events={
            program: sum(since(before, after, name) for name in names) / seconds
            for program, names in {
                "futex": ("lockd_futex_blocked_seconds_count",),
                "offcpu": ("lockd_offcpu_blocked_seconds_count",),
                "kernel_locks": ("lockd_kernel_lock_wait_seconds_count",),
            }.items()
        },
        dropped=since(before, after, "lockd_dropped_events_total"),
        overflowed=since(before, after, "lockd_overflow_events_total"),
        load=told[0],
        processes=processes,
        children=children_of(daemon.process.pid),
    )


def look(daemon: Lockd, processes: list[Process]) -> tuple[Metrics, list[tuple[float, float]]]:
    """A scrape, and the CPU seconds of each process right before and after it."""
    time.sleep(REPEATED_SECONDS)  # otherwise the exporter could repeat an answer from before
    low = [cpu_seconds(one.pid) for one in processes]
    text = daemon.get("/metrics").decode()
    high = [cpu_seconds(one.pid) for one in processes]
    return Metrics(text), list(zip(low, high, strict=True))


def since(before: Metrics, after: Metrics, name: str, **labels: str) -> float:
    return after.sum(name, **labels) - before.sum(name, **labels)


def quantiles(before: Metrics, after: Metrics, name: str) -> dict[float, float]:
    """Quantiles of what a histogram counted between two scrapes, by linear interpolation within a bucket."""
    edges = sorted(float(labels["le"]) for labels in after.labels(f"{name}_bucket"))
    counts = {float(labels["le"]): labels["le"] for labels in after.labels(f"{name}_bucket")}
    cumulative = [since(before, after, f"{name}_bucket", le=counts[edge]) for edge in edges]
    return {share: quantile(edges, cumulative, share) for share in (0.5, 0.99, 1.0)}


def quantile(edges: list[float], cumulative: list[float], share: float) -> float:
    """The value below which `share` of all lie. In the last bucket, which has no end, it is its beginning."""
    wanted = share * cumulative[-1]
    low, below = 0.0, 0.0
    for edge, count in zip(edges, cumulative, strict=True):
        if count >= wanted and count > below:
            return low if edge == float("inf") else low + (edge - low) * (wanted - below) / (count - below)
        low, below = edge, count
    return low


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def memory(pid: int) -> Memory:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    kilobytes = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
    return Memory(*(kilobytes[name] * 1024 for name in ("Rss", "Pss", "Pss_Anon")))


def forbidden_libraries(pid: int) -> list[str]:
    maps = Path(f"/proc/{pid}/maps").read_text()
    return [name for name in FORBIDDEN if name in maps]


def pids_of(sampler: int) -> dict[str, int]:
    """The process ids of the sampler and of its named_children(), by name."""
    return {"sampler": sampler, **named_children(sampler)}


def named_children(sampler: int) -> dict[str, int]:
    """The process ids of the exporter and the namer of a sampler, by name, as far as they run now.

    A child has the command line of its parent until it calls exec, and is left out until then.
    """
    return {
        name: pid
        for pid, command in children_of(sampler).items()
        for module, name in CHILDREN.items()
        if module in command
    }


def wait_for_children(sampler: int) -> dict[str, int]:
    """Wait until the exporter and the namer run, and return named_children().

    The namer may start after lockd has said "serving on". Raises RuntimeError after 30 s.
    """
    deadline = time.monotonic() + CHILDREN_SECONDS
    while len(found := named_children(sampler)) < len(CHILDREN):
        if time.monotonic() > deadline:
            raise RuntimeError(f"of {sampler} run after {CHILDREN_SECONDS:g} s only {children_of(sampler)}")
        time.sleep(0.02)
    return found


def children_of(parent: int) -> dict[int, str]:
    """The live children of a process and their command lines."""
    found: dict[int, str] = {}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            fields = (directory / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if int(fields[1]) == parent:
                found[int(directory.name)] = (directory / "cmdline").read_text().replace("\0", " ").strip()
        except OSError:  # it has just ended
            continue
    return found


def table(figures: Figures) -> Iterator[str]:
    """The figures as a Markdown table."""

    def row(what: str, value: str, check: str = "") -> str:
        return f"| {what} | {value} | {check} |"

    def times(by_share: dict[float, float]) -> str:
        return " / ".join(f"{seconds * 1000:.2f}" for seconds in by_share.values()) + " ms"

    yield row("", "lockd says", "/proc says")
    yield "|---|---|---|"
    host = (
        f"Linux {os.uname().release}, {os.cpu_count()} CPUs, {figures.seconds:.0f} s, {figures.lines} lines"
    )
    yield row("host, time, lines of /metrics", host)
    events = ", ".join(f"{name} {rate:,.0f}/s" for name, rate in figures.events.items())
    yield row("events counted", events)
    yield row("events dropped; counted as `other` because a map was full",
              f"{figures.dropped:.0f}; {figures.overflowed:.0f}")  # fmt: skip
    yield row("ticks", f"{figures.ticks:.0f}", f"{figures.seconds / 0.05:.0f} periods of 50 ms")
    yield row("tick lateness, median / p99 / max", times(figures.late))
    yield row("tick work, median / p99 / max", times(figures.work))
    scrapes = sorted(figures.scrapes)
    yield row(
        "a scrape, median / max", f"{scrapes[len(scrapes) // 2] * 1000:.0f} / {scrapes[-1] * 1000:.0f} ms"
    )
    for one in figures.processes:
        share = one.cpu_told / figures.seconds
        yield row(
            f"CPU of the {one.name}",
            f"{one.cpu_told:.2f} s ({share:.2%} of one CPU)",
            " to ".join(f"{seconds:.2f}" for seconds in one.cpu_stat) + " s",
        )
    for one in figures.processes:
        yield row(
            f"memory of the {one.name}",
            f"{one.resident_told / 1e6:.1f} MB",
            f"{one.resident_smaps / 1e6:.1f} MB, its share of shared pages {one.pss / 1e6:.1f} MB (PSS)",
        )
    loaders = [command for command in figures.children.values() if "lockd.load" in command]
    yield row("loader", "", f"still there: {', '.join(loaders)}" if loaders else "gone")
    mapped = {one.name: one.forbidden for one in figures.processes if one.forbidden}
    yield row(f"{', '.join(FORBIDDEN)} mapped", "", str(mapped) if mapped else "in no process")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a quarter of the time")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--threads", type=int, default=16, help="threads of the load")
    parser.add_argument("--pause-us", type=int, default=200, help="pause of each thread between operations")
    parser.add_argument("--scrape-every", type=float, default=15.0, help="seconds between two scrapes")
    given = parser.parse_args()
    subprocess.run(["make", "-s", "-C", ROOT / "tests/workloads"], check=True)
    host = results.host()
    seconds = given.seconds // 4 if given.quick else given.seconds
    figures = measure(seconds, given.threads, given.pause_us, given.scrape_every)
    text = "\n".join(["# What lockd takes under a mixed load", "", *table(figures), ""])
    results.write("cost", {"host": host, **asdict(figures)}, text)


if __name__ == "__main__":
    main()
