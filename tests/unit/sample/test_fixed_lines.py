"""The configuration knows how many lines the sampler reserves for what has no name."""

from __future__ import annotations

from typing import Any, cast

import pytest

from lockd.config.reader import read_text
from lockd.config.schema import Config
from lockd.kernel.manifest import Chosen, Manifest, MapInfo
from lockd.load.source import assemble
from lockd.sample.aggregates.contention import ContentionTables
from lockd.sample.aggregates.futex import FutexAggregates
from lockd.sample.aggregates.go_waits import GoMutexWaits
from lockd.sample.aggregates.kernel_holds import KernelHoldAggregates
from lockd.sample.aggregates.kernel_locks import KernelLockAggregates
from lockd.sample.aggregates.offcpu import OffcpuAggregates
from lockd.sample.series.limits import RESERVED_LINES, SHARES, Limits, LineBudget
from lockd.sample.series.unit_info import UnitInfo
from lockd.service.daemon import sampler_settings


class Entered(LineBudget):
    """Notes what the families enter."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self.others: dict[str, int] = {}

    def enter(self, family: str, others: int) -> None:
        super().enter(family, others)
        self.others[family] = others


def manifest_of(config: Config) -> Manifest:
    """What the loader hands over on a host that can do all that this configuration asks for."""
    source = assemble(
        ["include/common.bpf.h", "include/arch.bpf.h", "daemon/futex.bpf.c", "daemon/sched.bpf.c"], {}
    )
    release = {"names": ["release"], "formats": [{"names": ["times"], "formats": ["u8"], "offsets": [0],
               "itemsize": 8}], "offsets": [0], "itemsize": 8}  # fmt: skip
    record = {"names": ["sample"], "formats": [release], "offsets": [0], "itemsize": 8}
    records = ("release_record", "kernel_release_record") if config.profile.samples_per_second else ()
    return Manifest(
        attached_ns=0,
        chosen=(Chosen("futex", "calls", "tracepoint", ""),) * (config.programs.futex.mode == "calls"),
        hooks=(),
        maps=tuple(MapInfo(name, 1, "u4", cast("Any", record)) for name in records),
        functions=(),
        enums=source.enums,
        constants={**source.constants, "SLOTS": 28, "SLOT_NONE": 255},
    )


def entered(config: Config) -> dict[str, int]:
    """The lines that each family reserves, as the sampler makes the families (lockd/sample/sampler.py)."""
    limits, anything = sampler_settings(config).limits, cast("Any", None)
    budget = Entered(limits)
    contention = ContentionTables(lambda tgid, tid: "", 64)
    shared = (manifest_of(config), limits, budget, contention)
    UnitInfo(budget)
    if config.programs.futex.enabled:
        FutexAggregates(*shared, anything)
        GoMutexWaits(budget, anything)
    if config.programs.offcpu.enabled:
        OffcpuAggregates(*shared, anything)
    if config.programs.kernel_locks.enabled:
        KernelLockAggregates(*shared, anything)
        if config.programs.kernel_locks.mode == "all":
            KernelHoldAggregates(*shared, anything, anything)
    return budget.others


OFF = "{enabled: false}"
EVERY = "programs: {futex: {mode: calls}, kernel_locks: {mode: all}}"


@pytest.mark.parametrize(
    "text",
    [
        "",
        EVERY,
        f"{EVERY}\nwindows: [1m, 2m, 3m, 4m]",
        f"{EVERY}\nhistogram: {{buckets_us: {[2**power for power in range(27)]}}}\nwindows: [1m]",
        f"{EVERY}\nprofile: {{samples_per_second: 0}}",
        f"programs: {{offcpu: {OFF}, kernel_locks: {OFF}}}",
        f"programs: {{futex: {OFF}, kernel_locks: {OFF}}}",
        f"programs: {{futex: {OFF}, offcpu: {OFF}}}",
    ],
)
def test_the_configuration_counts_the_lines_that_the_families_reserve(text: str) -> None:
    config = read_text(Config, text, "lockd.yaml")
    assert config.fixed_lines == RESERVED_LINES + sum(entered(config).values())


def test_these_are_all_families() -> None:
    assert entered(read_text(Config, EVERY, "lockd.yaml")).keys() == SHARES.keys()
