"""Metrics about lockd itself: ticks, hooks, maps, losses, run time of programs, CPU time and memory."""

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import lockd
from lockd.kernel.counters import Losses, program_info
from lockd.kernel.manifest import Manifest
from lockd.names.client import Resolver
from lockd.process.clock import NS
from lockd.sample.budget.spending import RestartedProcess
from lockd.sample.drain import Collector
from lockd.sample.locks.releases import SampleCounts
from lockd.sample.series.block import Block
from lockd.sample.series.series import Series
from lockd.sample.series.unit_info import FAMILY

SAVED = ("started", "ticks", "taken_over", "interrupted_drains")
"""Attributes of OwnCost that are saved for the next start, besides the durations of ticks and the counters of
OwnCost.read()."""


class TickTimes:
    """A histogram of durations in the same slots as those of the programs: slot i has (2^(i-1), 2^i] us."""

    def __init__(self, slots: int) -> None:
        self.slots = [0] * slots
        self.sum_ns = 0

    def save(self) -> list[int]:
        return [self.sum_ns, *self.slots]

    def restore(self, saved: list[int]) -> None:
        self.sum_ns = saved[0]
        self.slots = [count for _, count in zip(self.slots, saved[1:], strict=True)]

    def note(self, ns: int) -> None:
        us = max(ns - 1, 0) // 1000
        self.slots[min(us.bit_length(), len(self.slots) - 1)] += 1
        self.sum_ns += max(ns, 0)


class OwnCost:
    """Counts what the sampler did, and exports the metrics about lockd, except those of CpuBudget.

    `functions` has the program and the descriptor of every BPF function.
    """

    def __init__(
        self, manifest: Manifest, collector: Collector, functions: list[tuple[str, int]],
        resolver: Resolver, exporter: RestartedProcess, procfs: Path = Path("/proc"),
    ) -> None:  # fmt: skip
        slots = manifest.constants["SLOTS"]
        self._manifest = manifest
        self._losses = Losses(manifest, collector.losses)
        self._collector = collector
        self._functions = functions
        self._resolver, self._exporter = resolver, exporter
        self._procfs = procfs
        self.started = time.time()
        """When counting began, in Unix time: at the last start that took over no counts of an earlier
        sampler."""
        self.work, self.late = TickTimes(slots), TickTimes(slots)
        """How long ticks took, and how late they began."""
        self.ticks = 0
        self.exporter_restarts = 0
        self.captures_refused = 0
        self.releases: SampleCounts | None = None
        """The counts of sampled releases of locks; None if the programs sample none."""
        self.wait_samples: SampleCounts | None = None
        """The counts of sampled waits off the CPU; None if the programs sample none."""
        self.undecided_calls = 0
        """The number of futex calls that wait to be counted until the names of their locks are looked up."""
        self.taken_over = {"end": 0, "crash": 0}
        """The number of starts that took over the counts of an earlier sampler, by how that sampler ended."""
        self.interrupted_drains = 0
        """The number of starts that took over the counts of a sampler which ended during a drain, so that
        rows may be lost."""
        self._reload_was_successful, self._reloaded, self._keys_waiting = True, time.time(), 0
        self._before: dict[str, float] = {}
        """The counters of read() that an earlier sampler saved, if its counts were taken over. read() adds
        them to those of this process."""
        self.read()

    def note_reload(self, was_successful: bool, keys_waiting: int) -> None:
        """Note the result of a reload of the configuration, and how many changed keys wait for a restart."""
        self._reload_was_successful, self._keys_waiting = was_successful, keys_waiting
        if was_successful:
            self._reloaded = time.time()

    def save(self) -> dict[str, Any]:
        """Return all counts for restore(), in types of JSON. CPU times are those of the last read()."""
        own = {name: getattr(self, name) for name in SAVED}
        return {**own, "late": self.late.save(), "work": self.work.save(), "others": self._others}

    def restore(self, head: dict[str, Any], is_end: bool) -> None:
        """Go on with the result of save() of another sampler. `is_end` says whether that sampler ended in
        order, after it had saved everything."""
        for name in SAVED:
            setattr(self, name, head[name])
        self.late.restore(head["late"])
        self.work.restore(head["work"])
        self._before = dict(head["others"])
        self.read()
        self.taken_over["end" if is_end else "crash"] += 1

    def read(self) -> None:
        """Read the counters that other objects and processes keep, such as CPU time.

        save() and export() both use the values read last, so that no counter is saved with less than was
        exported.
        """
        usage = resource.getrusage(resource.RUSAGE_SELF)
        now = {
            "exporter_restarts": self.exporter_restarts,
            "namer_restarts": self._resolver.restarts,
            "namer_refused": self._resolver.refused,
            "captures_refused": self.captures_refused,
            **self._read_samples(),
            "sampler_seconds": usage.ru_utime + usage.ru_stime,
            "namer_seconds": self._resolver.cpu_seconds(),
            "exporter_seconds": self._exporter.cpu_seconds(),
        }
        self._others = {name: value + self._before.get(name, 0) for name, value in now.items()}

    def _read_samples(self) -> dict[str, float]:
        """Return those counters of samples that are kept in this process, and begin at 0 in the next one."""
        counters: dict[str, float] = {}
        for sort, samples in self._samples:
            refused, refused_ns = samples.refused_here
            counters[f"{sort}_samples"] = samples.taken
            counters[f"{sort}_samples_refused"] = refused
            counters[f"{sort}_samples_refused_ns"] = refused_ns
        return counters

    @property
    def _samples(self) -> list[tuple[str, SampleCounts]]:
        """For each sort of samples that the programs take: its word in the metrics' names, and its counts."""
        sorts = (("holder", self.releases), ("wait", self.wait_samples))
        return [(sort, samples) for sort, samples in sorts if samples]

    @property
    def exporters_seconds(self) -> float:
        """CPU seconds of the exporters that have ended."""
        return self._exporter.ended_seconds + self._before.get("exporter_seconds", 0.0)

    def export(self, block: Block, families: list[Series], unit_lines: int) -> None:
        """Add the metrics about lockd to a block, also those about the series in `families`.

        `unit_lines` is how many lines lockd_unit_info has.
        """
        block.add(
            "lockd_build_info", [(lockd.__version__, sys.version.partition(" ")[0], os.uname().release)], [1]
        )
        block.add("lockd_start_time_seconds", [()], [self.started])
        block.add("lockd_config_last_reload_successful", [()], [self._reload_was_successful])
        block.add("lockd_config_last_reload_success_timestamp_seconds", [()], [self._reloaded])
        block.add("lockd_config_keys_waiting", [()], [self._keys_waiting])
        # One hook can have two BPF programs: downgrade_write() is both a release and an acquisition.
        attached: dict[tuple[str, str, str], bool] = {}
        for hook in self._manifest.hooks:
            labels = (hook.program, hook.hook, hook.mechanism)
            attached[labels] = attached.get(labels, True) and hook.attached
        block.add("lockd_hook_attached", list(attached), list(attached.values()))
        for metric, by_map in (
            ("lockd_map_entries", self._collector.entries),
            ("lockd_map_capacity", self._collector.capacities),
        ):
            block.add(metric, [(name,) for name in by_map], list(by_map.values()))
        block.add("lockd_ticks_total", [()], [self.ticks])
        for name, times in (("lockd_tick_seconds", self.work), ("lockd_tick_late_seconds", self.late)):
            block.add_histogram(name, [()], np.array([times.slots]), np.array([times.sum_ns / NS]))
        names = [(series.family,) for series in families]
        lines = [series.exported_lines for series in families]
        block.add("lockd_series", [*names, (FAMILY,)], [*lines, unit_lines])
        block.add("lockd_series_overflow_total", names, [series.overflowed for series in families])
        block.add("lockd_series_retired_total", names, [series.retired for series in families])
        retired = {metric: value for series in families for metric, value in series.retired_values().items()}
        block.add("lockd_retired_value", [(metric,) for metric in retired], list(retired.values()))
        others = self._others
        block.add("lockd_exporter_restarts_total", [()], [others["exporter_restarts"]])
        block.add("lockd_undecided_futex_calls", [()], [self.undecided_calls])
        block.add("lockd_namer_restarts_total", [()], [others["namer_restarts"]])
        block.add("lockd_namer_refused_total", [()], [others["namer_refused"]])
        block.add(
            "lockd_taken_over_total", [(how,) for how in self.taken_over], list(self.taken_over.values())
        )
        block.add("lockd_interrupted_drains_total", [()], [self.interrupted_drains])
        self._export_programs(block, others["captures_refused"])
        for sort, samples in self._samples:
            refused, refused_ns = samples.kernel_refused()
            refused += int(others[f"{sort}_samples_refused"])
            refused_seconds = (refused_ns + others[f"{sort}_samples_refused_ns"]) / 1e9
            block.add(f"lockd_{sort}_samples_total", [()], [others[f"{sort}_samples"]])
            block.add(f"lockd_{sort}_samples_refused_total", [()], [refused])
            block.add(f"lockd_{sort}_refused_seconds_total", [()], [refused_seconds])
            block.add(f"lockd_{sort}_seconds_per_sample", [()], [samples.wait_ns / 1e9])
        processes = [("sampler",), ("namer",)]
        seconds = [others["sampler_seconds"], others["namer_seconds"]]
        resident = [self._resident_bytes("self"), self._resident_bytes(str(self._resolver.pid))]
        block.add("lockd_cpu_seconds_total", processes, seconds)
        block.add("lockd_resident_bytes", processes, resident)

    def _export_programs(self, block: Block, captures_refused: float) -> None:
        dropped, overflowed, stacks, unseen = self._losses.read()
        dropped = {where: count for where, count in dropped.items() if where[0] != "trace"}
        runs: dict[str, npt.NDArray[np.int64]] = {}
        for program, fd in self._functions:
            runs[program] = runs.get(program, 0) + program_info(fd)
        # Since commit 9ed9e9ba2337 (Linux 5.12) the kernel counts the calls of a program that it skips
        # because the program is running on that CPU already, or because that CPU is changing a map.
        for program, (_, _, missed) in runs.items():
            dropped[program, "recursion"] = int(missed)
        if "kernel_holding" in self._collector.capacities:
            dropped["kernel_holds", "holder_gone"] = self._collector.abandoned
        block.add("lockd_dropped_events_total", list(dropped), list(dropped.values()))
        block.add("lockd_overflow_events_total", [(name,) for name in overflowed], list(overflowed.values()))
        stacks["refused"] = int(captures_refused)
        block.add("lockd_stack_misses_total", [(reason,) for reason in stacks], list(stacks.values()))
        block.add("lockd_unseen_switches_total", [()], [unseen])
        if self._kernel_keeps_statistics():
            names = [(program,) for program in runs]
            block.add("lockd_program_runs_total", names, [count for _, count, _ in runs.values()])
            block.add("lockd_program_run_seconds_total", names, [ns / 1e9 for ns, _, _ in runs.values()])

    def _kernel_keeps_statistics(self) -> bool:
        try:
            return (self._procfs / "sys/kernel/bpf_stats_enabled").read_text().strip() == "1"
        except OSError:
            return False

    def _resident_bytes(self, process: str) -> int:
        """Resident memory of a process; 0 if it does not exist."""
        try:
            pages = int((self._procfs / process / "statm").read_text().split()[1])
        except OSError:
            return 0
        return pages * resource.getpagesize()
