"""Measure what a scrape costs, by its number of lines, and whether scrapes make ticks late.

`sudo .venv/bin/python -m bench.scrape [--quick] [--ahead]` writes bench/build/scrape.json and .md.

Maps are filled as in bench/sampler.py. All costs are CPU time: the sampler's for a snapshot, and the
exporter's for its text, once with all lines new and once with all lines cached. Then a sampler ticks with
10,000 lines and 10,000 new entries a second, alternately with and without a client that scrapes every second.
"""

from __future__ import annotations

import functools
import gzip
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from prometheus_client.openmetrics.exposition import generate_latest

from bench import results
from bench.sampler import CONFIG, SHARES, Filled, begin, cpu_ms
from lockd import messages
from lockd.export.exposition import Exposition
from lockd.sample.loop import Loop
from lockd.sample.own_cost import TickTimes
from lockd.sample.saved_state import SavedState
from lockd.service.exporter import Exporter

LINES = (500, 1000, 5000, 10_000)
LINES_OF_PROCESS = 25
"""The number of lines of one process whose threads wait for mutexes."""
ROUNDS = 15
PERIOD_NS = 50_000_000
SECOND = 20
"""The number of ticks in a second."""
FRESH = 10_000
TURNS, TURN_SECONDS = 4, 10
START_SECONDS = 1.5
"""The seconds that a client may take for its start and for its last scrape."""
SCRAPER = """
import sys, time, urllib.request
end = time.monotonic() + float(sys.argv[2])
while time.monotonic() < end:
    began = time.monotonic()
    urllib.request.urlopen(sys.argv[1]).read()
    print(time.monotonic() - began, flush=True)
    time.sleep(max(0, began + 1 - time.monotonic()))
"""


@dataclass
class Cost:
    """The cost of one scrape, as medians of milliseconds of processor time."""

    lines: int
    block_bytes: int
    sampler: float
    under_systemd: float
    """The sampler's cost under systemd, where it first saves its counts for the next start."""
    save: float
    """The cost of saving the counts alone."""
    first: float
    """The cost of the exporter's first scrape, when all lines are new to it."""
    exporter: float
    gzip: float

    def row(self) -> str:
        return (
            f"| {self.lines:,} | {self.sampler:.2f} | {self.under_systemd:.2f} | {self.save:.2f} |"
            f" {self.block_bytes / 1e3:.0f} | {self.first:.1f} |"
            f" {self.exporter:.1f} | {self.gzip:.2f} |\n"
        )


def with_lines(lines: int, saved: SavedState | None = None) -> Filled:
    """A sampler with about this number of lines, and room for half as many more."""
    filled = Filled({**CONFIG, "series": {"max": max(lines * 3 // 2, 1000)}}, saved)
    filled.settle()
    filled.fill(FRESH, comms=lines // LINES_OF_PROCESS)
    filled.sampler.tick()
    filled.sampler.fold()
    return filled


def cost_of(lines: int) -> Cost:
    filled, kept = with_lines(lines), with_lines(lines, SavedState(os.memfd_create("kept")))

    def answer() -> None:
        os.close(messages.to_memfd(filled.sampler.metrics()))

    def answer_under_systemd() -> None:
        os.close(messages.to_memfd(kept.sampler.metrics()))

    block = memoryview(filled.sampler.metrics())

    def render_first() -> bytes:
        return Exposition(generate_latest, Path("/proc")).text(*messages.unpack(block))

    exposition = Exposition(generate_latest, Path("/proc"))

    def render() -> bytes:
        return exposition.text(*messages.unpack(block))

    text = render()
    shrink = functools.partial(gzip.compress, text, 1, mtime=0)
    parts = answer, answer_under_systemd, kept.sampler.save, render_first, render, shrink
    # The parts take turns, because the speed of the host changes.
    rounds = [[cpu_ms(part) for part in parts] for _ in range(ROUNDS)]
    cost = Cost(_lines(text), len(block), *map(statistics.median, zip(*rounds, strict=True)))
    filled.sampler.close()
    kept.sampler.close()
    return cost


def _lines(text: bytes) -> int:
    return sum(not line.startswith(b"#") for line in text.splitlines())


@dataclass
class Lateness:
    """By how many milliseconds ticks began late, and how many they took by the clock, for each turn."""

    late: list[list[float]]
    work: list[list[float]]
    scrapes: list[float]
    """The milliseconds that the client waited for each scrape."""


class Recorder(TickTimes):
    """Keeps each time of a tick, by turn. The sampler itself only counts times by powers of two."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.turns: list[list[float]] = []

    def note(self, ns: int) -> None:
        super().note(ns)
        self.turns[-1].append(ns / 1e6)


def lateness(lines: int, turns: int, seconds: float) -> Lateness:
    """Measure how late ticks are. In every second turn a client scrapes."""
    filled = with_lines(lines)
    sampler = filled.sampler
    sampler.sleep = lambda: 0.0  # type: ignore[method-assign]  # a busy host has a tick in each period
    slots = len(sampler.own_cost.late.slots)
    sampler.own_cost.late, sampler.own_cost.work = late, work = Recorder(slots), Recorder(slots)
    listening = socket.create_server(("127.0.0.1", 0))
    exporter = Exporter([listening], None, "warning")
    url = f"http://127.0.0.1:{listening.getsockname()[1]}/metrics"
    wakeup, _other = socket.socketpair()
    loop = Loop(sampler, PERIOD_NS, lambda message: None, lambda: next(steps), wakeup)
    clients: list[subprocess.Popen[str]] = []

    def each_tick() -> Iterator[None]:
        for turn in range(turns):
            if turn % 2:
                command = [sys.executable, "-c", SCRAPER, url, str(seconds - START_SECONDS)]
                clients.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            late.turns.append([])
            work.turns.append([])
            for tick in range(int(seconds * SECOND)):
                if tick % SECOND == SECOND // 2:
                    filled.fill(FRESH, comms=lines // LINES_OF_PROCESS)
                yield
        loop.stop()
        yield

    steps = each_tick()
    next(steps)
    loop.control = exporter.control
    exporter.serve()
    loop.run()
    exporter.end()
    sampler.close()
    scrapes = [float(line) * 1e3 for client in clients for line in client.communicate()[0].split()]
    return Lateness(late.turns, work.turns, scrapes)


def late_rows(found: Lateness) -> Iterator[str]:
    for what, turns in (("late", found.late), ("work of a tick", found.work)):
        for name, chosen in (("not scraped", turns[::2]), ("scraped", turns[1::2])):
            each = np.quantile(np.concatenate(chosen), SHARES)
            yield f"| {what}, {name} | " + " | ".join(f"{value:.2f}" for value in each) + " |\n"
    each = np.quantile(found.scrapes, SHARES)
    yield "| what the client waits | " + " | ".join(f"{value:.1f}" for value in each) + " |\n"


def main() -> None:
    is_quick, host = begin(__doc__ or "", "two short turns")
    costs = [cost_of(lines) for lines in LINES]
    turns, seconds = (2, 3.0) if is_quick else (TURNS, TURN_SECONDS)
    found = lateness(LINES[-1], turns, seconds)
    text = "# What a scrape costs\n\nMilliseconds of processor time, medians.\n\n"
    text += "| lines | sampler | under systemd | of that saving | kB handed over | exporter, at first"
    text += " | from then on | gzip |\n|---:|---:|---:|---:|---:|---:|---:|---:|\n"
    text += "".join(cost.row() for cost in costs)
    text += f"\n{LINES[-1]:,} lines, {FRESH:,} fresh entries a second, {turns} turns of {seconds:g} s;"
    text += " milliseconds by the clock.\n\n| | median | p99 | most |\n|---|---:|---:|---:|\n"
    text += "".join(late_rows(found))
    results.write("scrape", {"host": host, "costs": [asdict(c) for c in costs], **asdict(found)}, text)
    print(text)


if __name__ == "__main__":
    main()
