"""Measure what a tick of the sampler costs, by the number of entries that it finds.

`sudo .venv/bin/python -m bench.sampler` writes bench/build/sampler.json and .md.

Real maps are filled with entries of futex waits, with keys that no window had before and then with the same
keys again. A real sampler ticks until all of them are folded. All times are CPU time of the process. The
programs are detached, so that nothing is counted but the entries that were filled in.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import numpy as np

from bench import results
from lockd.config.reader import read_text
from lockd.config.schema import Config
from lockd.kernel.libbpf import libbpf
from lockd.kernel.maps import HashMap
from lockd.load.child import run_loader
from lockd.sample.drain import FOLDED_ROWS
from lockd.sample.sampler import Sampler
from lockd.sample.saved_state import SavedState
from lockd.service.daemon import sampler_settings
from lockd.service.start import load_settings

ENTRIES = (1000, 10_000, 16_000)
ROUNDS, QUICK_ROUNDS = 25, 3
SHARES = (0.5, 0.99, 1.0)
COMMS = 50
PERIOD = 0.05
AHEAD = "let the sampler run before others' processes, on a host that is not idle"
STEADY_TICKS = 100
OFF = {"enabled": False}
CONFIG = {
    "programs": {"offcpu": OFF, "kernel_locks": OFF},
    "filter": {"comms": ["filled-*"]},
    "maps": {"entries": 16_384},
    "budget": {"cpu": None},
}


class Filled:
    """A sampler whose programs have been detached, and methods that fill its maps instead.

    With `saved`, the sampler saves its counts as under systemd.
    """

    def __init__(self, config: dict[str, object], saved: SavedState | None = None) -> None:
        settings = read_text(Config, json.dumps(config), "bench")
        manifest, fds = run_loader(load_settings(settings))
        for fd in fds[len(manifest.maps) + len(manifest.functions) :]:
            os.close(fd)
        self.fds = fds
        self.sampler = Sampler(manifest, fds, sampler_settings(settings), saved=saved)
        self._collector = self.sampler._collector
        self._made = 0
        for _ in range(2):  # fold what was counted while they were attached
            self.settle()
            self.drain()
            self.sampler.fold()

    def fill(self, count: int, is_fresh: bool = True, comms: int = COMMS) -> None:
        """Write entries that the next tick drains, as programs do. If they are not fresh, they have the last
        keys again."""
        maps = self._collector._maps
        for what in ("futex", "captures", "soon"):
            maps.written.mark(what)
        self.drain()  # the window with these marks ends
        self.settle()
        table: HashMap = maps.idle("futex")
        keys, values = np.zeros(count, table.key), np.zeros(count, table.value)
        self._made += count if is_fresh else 0
        numbers = np.arange(count) + self._made
        keys["tid"], keys["uaddr"] = numbers % 1_000_000 + 5_000_000, numbers * 64 + (1 << 40)
        keys["slot"] = numbers % 20
        values["calls"], values["blocked_ns"], values["max_blocked_ns"] = 1, 5000, 5000
        who = values["who"]
        who["tgid"] = 4_000_000 + numbers % comms
        who["comm"] = np.array([b"filled-%d" % number for number in range(comms)])[numbers % comms]
        written = ctypes.c_uint32(count)
        rows = ctypes.c_void_p(keys.ctypes.data), ctypes.c_void_p(values.ctypes.data)
        if libbpf().bpf_map_update_batch(table.fd, *rows, ctypes.byref(written), None):
            raise OSError(ctypes.get_errno(), "filling the map")

    def settle(self) -> None:
        """Wait until the next tick can drain."""
        while not self._collector._maps.is_settled:
            time.sleep(0.001)

    def drain(self) -> None:
        self._collector.drain()

    def end_second(self) -> None:
        """Tick, and fold what is left."""
        self.sampler.tick()
        self.sampler.fold()

    @property
    def unfolded_rows(self) -> int:
        """The number of rows that are drained and not yet folded."""
        return self._collector.unfolded_rows


def begin(doc: str, quick: str) -> tuple[bool, dict[str, str]]:
    """Read the command line of a bench that fills maps.

    Return whether the bench is to be quick, and the facts about the host. `quick` is the help text of that
    option. With the option --ahead, this process is scheduled before those of others from now on, but the
    processes that it starts are not.
    """
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--ahead", action="store_true", help=AHEAD)
    args = parser.parse_args()
    host = results.host()
    if args.ahead:
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
        host["ahead"] = "the sampler ran before others' processes (SCHED_RR)"
    return args.quick, host


def cpu_ms(what: Callable[[], object]) -> float:
    began = time.process_time()
    what()
    return (time.process_time() - began) * 1e3


@dataclass
class Cost:
    """The cost of a number of entries in one window: lists of milliseconds, with a value for each round."""

    entries: int
    is_fresh: bool
    drain: list[float] = field(default_factory=list)
    fold: list[float] = field(default_factory=list)
    ticks: list[list[float]] = field(default_factory=list)
    """The ticks of each round until all entries were folded. The first one also drains them."""

    def measure(self, filled: Filled) -> None:
        """Measure one round: draining and folding by themselves, and then as ticks do both."""
        sampler = filled.sampler
        filled.settle()
        filled.fill(self.entries, self.is_fresh)
        self.drain.append(cpu_ms(filled.drain))
        self.fold.append(cpu_ms(sampler.fold))
        filled.settle()
        filled.fill(self.entries, self.is_fresh)
        each = [cpu_ms(sampler.tick)]
        while filled.unfolded_rows > FOLDED_ROWS:
            filled.settle()
            each.append(cpu_ms(sampler.tick))
        filled.settle()
        each.append(cpu_ms(filled.end_second))
        self.ticks.append(each)

    def row(self) -> str:
        per_entry = [(d + f) / self.entries * 1e3 for d, f in zip(self.drain, self.fold, strict=True)]
        times = [middle(each) for each in (self.drain, self.fold, per_entry)]
        ticks = np.quantile(np.concatenate(self.ticks), SHARES)
        times += [f"{len(self.ticks[0])}", *(f"{time:.2f}" for time in ticks)]
        what = "fresh" if self.is_fresh else "known"
        return f"| {self.entries:,} {what} | " + " | ".join(times) + " |\n"


def middle(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


@dataclass
class Steady:
    """The cost of a quiet tick, which finds nothing, at one tick in each period."""

    cpu_ms: float
    """CPU time of all threads, with the work that comes once a second."""
    blocks: float
    """The growth of the number of Python's memory blocks by one tick, on average."""
    peak_bytes: float
    """The most bytes that are allocated at a time within a tick, as the median of the ticks."""


def steady(sampler: Sampler, ticks: int) -> Steady:
    def run() -> None:
        for _ in range(ticks):
            sampler.tick()
            time.sleep(PERIOD)

    run()
    blocks = sys.getallocatedblocks()
    ms = cpu_ms(run) / ticks
    blocks = sys.getallocatedblocks() - blocks
    peaks = []
    tracemalloc.start()
    for _ in range(ticks):
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        sampler.tick()
        peaks.append(tracemalloc.get_traced_memory()[1] - before)
        time.sleep(PERIOD)
    tracemalloc.stop()
    return Steady(ms, blocks / ticks, statistics.median(peaks))


def main() -> None:
    is_quick, host = begin(__doc__ or "", "few rounds")
    filled = Filled(CONFIG)
    costs = [Cost(entries, is_fresh) for entries in ENTRIES for is_fresh in (True, False)]
    for _ in range(QUICK_ROUNDS if is_quick else ROUNDS):
        for cost in costs:
            cost.measure(filled)
    calm = steady(filled.sampler, STEADY_TICKS // 10 if is_quick else STEADY_TICKS)
    filled.sampler.close()
    text = "# What a tick costs\n\nMilliseconds of processor time, medians (least to most).\n\n"
    text += "| entries | drain | fold | both, us an entry | ticks | one: median | p99 | most |\n"
    text += "|---|---:|---:|---:|---:|---:|---:|---:|\n"
    text += "".join(cost.row() for cost in costs)
    text += (
        f"\nA tick that finds nothing: {calm.cpu_ms:.3f} ms, {calm.cpu_ms / PERIOD / 10:.2f}% of a processor;"
        f" {calm.blocks:.2f} blocks of memory more than before it, {calm.peak_bytes:,.0f} bytes in between.\n"
    )
    results.write(
        "sampler", {"host": host, "costs": [asdict(c) for c in costs], "steady": asdict(calm)}, text
    )
    print(text)


if __name__ == "__main__":
    main()
