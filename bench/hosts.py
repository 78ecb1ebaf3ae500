"""Measure how large a host one lockd serves, by a real sampler on simulated hosts.

`sudo .venv/bin/python -m bench.hosts [--quick] [--profile]` writes bench/build/hosts.json and .md.

What the BPF programs leave in the maps in each period is recorded on this host, under a load. A large host is
made of copies of this host. Each copy has threads, processes and locks of its own, and is at another place of
the recording; further copies only sleep. The windows are written to real maps, as large as `auto` makes them
on the large host, and a real sampler ticks on them.

The clock is simulated. It stands still while a window is written, and advances by the processor time that a
tick takes. So a tick that is longer than a period makes the next window longer, as on a real host. No BPF
program runs on the simulated hosts. The time of programs for each switch is taken from the recording, and is
less under restraint.
"""

from __future__ import annotations

import argparse
import cProfile
import ctypes
import os
import pstats
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np

from bench import results
from bench.sampler import Filled
from lockd.columns import structs
from lockd.columns.index import mix
from lockd.config.schema import default
from lockd.kernel.libbpf import libbpf
from lockd.kernel.maps import HashMap
from lockd.kernel.pairs import Entries
from lockd.load.child import run_loader
from lockd.sample.budget.cpu_budget import CpuBudget
from lockd.sample.budget.restraint import DETAIL, PROCESSES, STEPS
from lockd.sample.drain import Collector
from lockd.service.start import load_settings
from tests.support.workload import Workload

PAIRS = {"futex": ("calls", "uaddr"), "offcpu": ("count", "waker"), "kernel_locks": ("waits", "lock")}
"""For each pair, the value that counts events, and the part of the key that is left out under restraint."""
PERIOD = 0.05
THREADS, FIRST_ID = 100_000, 5_000_000
OF_PROCESS = 0x80000000
"""The flag that marks the thread id of a key as a process id (bpf/include/common.bpf.h)."""
SAVES = (1.0, 0.78, 0.60, 0.59)
"""The time that programs take at each restraint level, as a share of that at level 0 (docs/restraint.md)."""
HOSTS = (
    (2, 8, (50_000, 100_000)),
    (16, 64, (250_000, 500_000)),
    (64, 256, (250_000, 1_000_000, 5_000_000)),
    (192, 768, (250_000, 1_000_000, 5_000_000)),
    (512, 2048, (1_000_000, 5_000_000)),
)
"""The simulated hosts: processors, GB of memory, and the numbers of switches a second to measure."""
RECORDED, QUICK_RECORDED = 10.0, 3.0
SECONDS, QUICK_SECONDS = 40.0, 10.0
LOAD_THREADS, LOAD_PAUSE_US = 200, 1000
"""The threads of the recorded load, and the pause of each between two operations. Each thread makes one
thousand or two thousand switches a second, as those of a database under load do."""


@dataclass
class Recording:
    """What the programs left in the maps of this host in each period."""

    windows: list[dict[str, Entries]]
    threads: Entries
    switches: float
    """Switches a second."""
    program_seconds: float
    """The time of the programs for each switch, in seconds."""

    def __post_init__(self) -> None:
        """Replace the ids of all processes and threads by numbers from 1; 0 stays 0."""
        found: list[Any] = [self.threads[0], self.threads[1]["tgid"]]
        for window in self.windows:
            for keys, values in window.values():
                found += [keys["tid"], values["who"]["tgid"]]
        self._ids = np.unique(np.concatenate([np.zeros(1, np.uint32), *found]))
        self.ids = len(self._ids)
        for window in self.windows:
            for keys, values in window.values():
                keys["tid"] = self._number(keys["tid"])
                values["who"]["tgid"] = self._number(values["who"]["tgid"])
                if "waker" in keys.dtype.names:
                    keys["waker"] = self._number(keys["waker"])
        tids, threads = self.threads
        threads["tgid"], threads["waker"] = self._number(threads["tgid"]), self._number(threads["waker"])
        self.threads = self._number(tids), threads

    def _number(self, ids: Any) -> Any:
        rows = np.searchsorted(self._ids, ids).clip(max=self.ids - 1)
        return np.where(self._ids[rows] == ids, rows, 0).astype(np.uint32)


def record(seconds: float) -> Recording:
    """Record this host under a load of futexes, pipes and sleeps, with all programs attached."""
    manifest, fds = run_loader(load_settings(default()))
    collector = Collector(manifest, fds)
    load = Workload("load", int(seconds) + 3, LOAD_THREADS, LOAD_PAUSE_US, comm="load")
    load.go()
    windows: list[dict[str, Entries]] = []
    busy: list[float] = []
    began = time.monotonic()
    while (now := time.monotonic()) < began + 1 + seconds:
        collector.drain()
        window = {name: collector.backlogs[name].take(1 << 30) for name in PAIRS}
        if now >= began + 1:
            windows.append({name: (k.copy(), v.copy()) for name, (k, v) in window.items()})
            busy.append(collector.program_times.busy_cpus())
        for backlog in collector.backlogs.values():
            backlog.clear()
        collector.captures()
        time.sleep(max(0.0, now + PERIOD - time.monotonic()))
    keys, values = collector._threads.read(collector._maps.buffers)
    threads = structs.copy(keys), structs.copy(values)
    passed = time.monotonic() - began - 1
    load.truth()
    for fd in fds:
        os.close(fd)
    switches = sum(int(window["offcpu"][1]["count"].sum()) for window in windows) / passed
    return Recording(windows, threads, switches, float(np.mean(busy)) / switches)


class Copies:
    """A host made of `count` copies of the recorded host that do something, and of copies that sleep."""

    def __init__(self, recording: Recording, count: int) -> None:
        self._recording, self._count = recording, count
        self._at = 0
        comms = {bytes(comm) for w in recording.windows for _, v in w.values() for comm in v["who"]["comm"]}
        self._comms = np.array(sorted(comms), "S16")
        self._names = np.array(
            [[b"%b-%d" % (comm[:11], copy) for comm in self._comms] for copy in range(count)]
        )

    def threads(self) -> Entries:
        """The entries of the map of threads: at least THREADS, and those of all copies that do something."""
        tids, threads = self._recording.threads
        copies = max(self._count, -(-THREADS // len(tids)))
        parts = [self._own(tids, copy) for copy in range(copies)], [threads.copy() for _ in range(copies)]
        for copy, rows in enumerate(parts[1]):
            rows["tgid"], rows["waker"] = self._own(rows["tgid"], copy), self._own(rows["waker"], copy)
        return np.concatenate(parts[0]), np.concatenate(parts[1])

    def _own(self, ids: Any, copy: int) -> Any:
        return np.where(ids > 0, ids + FIRST_ID + copy * self._recording.ids, 0)

    def window(self, periods: int, level: int) -> dict[str, Entries]:
        """What the programs leave in a number of periods at a restraint level, if there is room for all."""
        self._at += periods
        return {name: self._window(name, periods, level) for name in PAIRS}

    def _window(self, name: str, periods: int, level: int) -> Entries:
        _, detail = PAIRS[name]
        all_keys, all_values = [], []
        windows = self._recording.windows
        for copy in range(self._count):
            for period in range(periods):
                keys, values = windows[(self._at + period + 7 * copy) % len(windows)][name]
                keys, values = keys.copy(), values.copy()
                who = values["who"]
                keys["tid"], who["tgid"] = self._own(keys["tid"], copy), self._own(who["tgid"], copy)
                who["comm"] = self._names[copy][np.searchsorted(self._comms, who["comm"])]
                if detail == "waker":
                    keys["waker"] = self._own(keys["waker"], copy)
                elif detail == "lock":
                    keys["lock"] += np.uint64(copy << 24)
                if level >= DETAIL:
                    keys["tid"], keys[detail] = OF_PROCESS | who["tgid"], 0
                all_keys.append(keys)
                all_values.append(values)
        keys, values = np.concatenate(all_keys), np.concatenate(all_values)
        if level >= PROCESSES:
            keys, values = nobodys(name, keys, values)
        return once(keys, values) if periods > 1 or level else (keys, values)


def once(keys: Any, values: Any) -> Entries:
    """Return each key once. The values are not added up, since their sums make no difference to the cost."""
    words = np.ascontiguousarray(keys).view(np.uint64).reshape(-1, 2)
    _, first = np.unique(mix(words[:, 0], words[:, 1]), return_index=True)
    return keys[first], values[first]


def nobodys(name: str, keys: Any, values: Any) -> Entries:
    """Return the same events without their processes, as they are in an overflow map."""
    keys, values = keys.copy(), values.copy()
    keys["tid"] = keys[PAIRS[name][1]] = 0
    values["who"] = 0
    return once(keys, values)


class Clock:
    """A clock that by itself advances only in ticks, by the processor time that they take."""

    def __init__(self) -> None:
        self._processor = time.process_time
        self.now, self.taken = time.monotonic(), 0.0
        self._began: float | None = None

    def monotonic(self) -> float:
        return self.now + (0.0 if self._began is None else self._processor() - self._began)

    def process_time(self) -> float:
        return self.taken + (0.0 if self._began is None else self._processor() - self._began)

    def time(self, what: Callable[[], object]) -> float:
        """Run `what`, and return the seconds of processor time that it took."""
        self._began = self._processor()
        what()
        took, self._began = self._processor() - self._began, None
        self.now += took
        self.taken += took
        return took

    @contextmanager
    def is_everybodys(self) -> Iterator[None]:
        with (
            mock.patch("time.monotonic", self.monotonic),
            mock.patch("time.monotonic_ns", lambda: int(self.monotonic() * 1e9)),
            mock.patch("time.process_time", self.process_time),
        ):
            yield


@dataclass
class Service:
    """How lockd fared on one host. Each list has a value for each tick."""

    cpus: int
    switches: int
    entries: int
    threads: int
    rows: list[int] = field(default_factory=list)
    """The number of entries of each window, whether or not there is room for them."""
    work_ms: list[float] = field(default_factory=list)
    late_ms: list[float] = field(default_factory=list)
    """How late each tick began. A tick that would begin while another one works is skipped: see `times`."""
    levels: list[int] = field(default_factory=list)
    """The restraint level at each tick."""
    overflowed: list[float] = field(default_factory=list)
    """The share of each window's entries that found no room."""
    times: list[float] = field(default_factory=list)
    """Seconds from the beginning to each tick."""

    def row(self) -> str:
        """The row of the report, with figures at level 0 and figures in the last quarter of the time."""
        levels, work = np.array(self.levels), np.array(self.work_ms)
        times, over = np.array(self.times), np.array(self.overflowed)
        windows = np.diff(times, prepend=-PERIOD) * 1e3
        first, last = levels == 0, times >= 0.75 * times[-1]
        text = f"| {self.cpus} | {self.switches:,} | {np.median(np.array(self.rows)[first]):,.0f} |"
        for which in (first, last):
            passed = max(float(np.diff(times, append=times[-1] + PERIOD)[which].sum()), PERIOD)
            share = work[which].sum() / 1e3 / passed
            middle, high = np.quantile(work[which], (0.5, 0.99))
            text += (
                f" {middle:.1f}, {high:.0f} ms | {np.quantile(windows[which], 0.99):.0f} ms | {share:.0%} |"
            )
            text += f" {over[which].mean():.0%} |"
        changes = [
            f"{level} after {times[np.argmax(levels >= level)]:.0f} s" for level in range(1, levels.max() + 1)
        ]
        return f"{text} {', '.join(changes) or '0'}; {levels[-1]} at the end |\n"


HEAD = (
    "| processors | switches/s | entries in a window | tick at level 0: median, p99 | window, p99"
    " | of one processor | without room | at the end: tick | window, p99 | of one processor | without room"
    " | restraint level |\n"
    "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|\n"
)


class Host:
    """A real sampler with maps as large as on a host with this many processors and bytes of memory."""

    def __init__(self, cpus: int, memory_bytes: int, switches: int, recording: Recording) -> None:
        maps = default().maps.for_machine(cpus, memory_bytes)
        sizes = {"entries": maps.entries, "threads": maps.threads}
        self._filled = Filled({"maps": sizes, "budget": {"cpu": None}})
        self.sampler = self._filled.sampler
        self._collector = self.sampler._collector
        self._copies = Copies(recording, max(1, round(switches / recording.switches)))
        self.service = Service(cpus, switches, maps.entries, maps.threads)
        tids, threads = self._copies.threads()
        self._collector._threads.drain(self._collector._maps.buffers)  # remove the threads of this host
        self._write(self._collector._threads, tids[: maps.threads], threads[: maps.threads])
        self._clock = Clock()

        def busy_cpus() -> float:
            return switches * recording.program_seconds * SAVES[self.level]

        with self._clock.is_everybodys():
            self.sampler.cpu_budget = CpuBudget(
                default().budget.share(cpus), self._collector.control,
                cast(Any, SimpleNamespace(busy_cpus=busy_cpus)), self.sampler._resolver, cpus,
            )  # fmt: skip

    @property
    def level(self) -> int:
        return self.sampler.cpu_budget.restraint.level

    def run(self, seconds: float) -> None:
        """Tick for this many seconds of simulated time."""
        with self._clock.is_everybodys():
            began = due = last = self._clock.now
            while due < began + seconds:
                started = self._clock.now = max(self._clock.now, due)
                self._fill(max(1, round((started - last) / PERIOD)))
                last = started
                self._filled.settle()
                took = self._clock.time(self.sampler.tick)
                self.service.work_ms.append(took * 1e3)
                self.service.late_ms.append((started - due) * 1e3)
                self.service.levels.append(self.level)
                self.service.times.append(started - began)
                period = PERIOD * self.sampler.cpu_budget.tick_periods
                due += period * max((self._clock.now - due) // period + 1, 1)

    def _fill(self, periods: int) -> None:
        level = self.level
        window = self._copies.window(periods, level)
        self._end_window([*window, *(f"{name}_over" for name in window), "soon"])
        rows = without_room = 0
        for name, (keys, values) in window.items():
            suffix = "_over" if level >= PROCESSES else ""
            table = self._collector._maps.idle(name + suffix)
            self._write(table, keys[: table.entries], values[: table.entries])
            rows += len(keys)
            if not suffix and len(keys) > table.entries:
                without_room += len(keys) - table.entries
                over = self._collector._maps.idle(f"{name}_over")
                rest = nobodys(name, keys[table.entries :], values[table.entries :])
                self._write(over, rest[0][: over.entries], rest[1][: over.entries])
        self.service.rows.append(rows)
        self.service.overflowed.append(without_room / max(rows, 1))

    def _end_window(self, marks: Iterable[str]) -> None:
        """End the window as one with these marks, so that the next tick drains what is then written."""
        for what in marks:
            self._collector._maps.written.mark(what)
        self._collector.drain()
        self._filled.settle()

    @staticmethod
    def _write(table: HashMap, keys: Any, values: Any) -> None:
        keys, values = keys.astype(table.key), np.ascontiguousarray(values)
        written = ctypes.c_uint32(len(keys))
        rows = ctypes.c_void_p(keys.ctypes.data), ctypes.c_void_p(values.ctypes.data)
        if len(keys) and libbpf().bpf_map_update_batch(table.fd, *rows, ctypes.byref(written), None):
            raise OSError(ctypes.get_errno(), f"filling the map {table.name}")

    def close(self) -> None:
        self.sampler.close()
        manifest = self.sampler._manifest
        for fd in self._filled.fds[: len(manifest.maps) + len(manifest.functions)]:
            os.close(fd)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="simulate a quarter of the time")
    parser.add_argument("--profile", action="store_true", help="print what ticks without restraint call")
    parser.add_argument("--only", type=int, help="the host with so many processors")
    args = parser.parse_args()
    host = results.host()
    recording = record(QUICK_RECORDED if args.quick else RECORDED)
    text = "# How large a host one lockd serves\n\n"
    text += (
        f"Recorded: {recording.switches:,.0f} switches a second of {len(recording.threads[0])} threads;"
        f" programs took {recording.program_seconds * 1e9:.0f} ns for each."
        f" Hosts have {THREADS:,} threads.\n\n"
    )
    print(text, file=sys.stderr)
    text += HEAD
    services: list[Service] = []
    for cpus, gigabytes, rates in HOSTS:
        for switches in rates if args.only in (None, cpus) else ():
            large = Host(cpus, gigabytes * 10**9, switches, recording)
            profile = cProfile.Profile() if args.profile else None
            if profile:
                large.sampler.tick = lambda tick=large.sampler.tick, call=profile.runcall: call(tick)  # type: ignore[method-assign,misc]
            large.run(QUICK_SECONDS if args.quick else SECONDS)
            large.close()
            services.append(large.service)
            text += large.service.row()
            print(large.service.row(), end="", file=sys.stderr, flush=True)
            if profile:
                pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(25)
    text += f"\nRestraint levels: {'; '.join(f'{at}: {step}' for at, step in enumerate(STEPS))}.\n"
    results.write("hosts", {"host": host, "services": [asdict(one) for one in services]}, text)
    print(text)


if __name__ == "__main__":
    main()
