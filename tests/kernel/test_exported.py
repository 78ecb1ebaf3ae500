"""A running daemon exports the metrics of the catalogue: no others, and after some work all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from lockd.export.catalog import CATALOG
from tests.kernel.test_futex import ABSENT
from tests.support.lockd_process import Lockd
from tests.support.workload import Start

STATISTICS = {"lockd_program_runs_total", "lockd_program_run_seconds_total"}
"""Metrics that exist only where the kernel keeps these statistics (kernel.bpf_stats_enabled)."""
HOLDS = {"lockd_kernel_lock_acquisitions_total", "lockd_kernel_lock_hold_seconds"}
"""Metrics that exist only in mode `all`."""
DEADLOCKS = {"lockd_deadlocks", "lockd_deadlocks_found_total"}
"""Metrics that have samples only where there is a deadlock, or has been (test_rings.py)."""
RUNTIMES = {"lockd_advised_processes", "lockd_go_mutex_wait_seconds_total"}
"""Metrics that have samples only where programs in Java or Go run (test_java.py, test_go.py)."""
UNITS = {"lockd_unit_info"}
"""Metrics that have samples only where threads are in services or containers (test_cgroups.py)."""
SUFFIXES = {"counter": "_total", "info": "_info"}


@pytest.mark.parametrize("mode", ["blocked", "calls"])
def test_the_catalogue_is_what_is_exported(
    mode: str, request: pytest.FixtureRequest, workload: Start, scratch: Path
) -> None:
    lockd: Lockd = request.getfixturevalue("lockd" if mode == "blocked" else "calls")
    # The waits of the first program are longer than that, and are certain to be sampled then.
    lockd.until(lambda m: m.max("lockd_holder_seconds_per_sample") < 0.5, 60)
    for name, arguments in {
        # Waits, wakes, maxima, locks by name, and holders.
        "mutex_handover": (3, 500_000),
        "futex_errors": (1, 1, 1, 1000),
        "kernel_locks": (2, 100_000, scratch),
        "offcpu_mix": (2, scratch),
    }.items():
        one = workload(name, *arguments)
        one.run()
        one.finish()
    ring = workload("deadlock")
    ring.run()
    lockd.until(lambda m: m.sum("lockd_deadlocks", comm=ring.comm) == 1, 60)
    lockd.metrics()  # everything is counted now

    names, samples = set(), set()
    for family in text_string_to_metric_families(lockd.get("/metrics").decode()):
        # The parser takes `_total` off a name. An info metric is a gauge in this format.
        name = family.name if family.name in CATALOG else family.name + SUFFIXES.get(family.type, "")
        names.add(name)
        if family.samples:
            samples.add(name)
        assert family.documentation == CATALOG[name].help
        for sample in family.samples:
            assert sample.labels.keys() - {"le"} == set(CATALOG[name].labels), sample
    has_statistics = Path("/proc/sys/kernel/bpf_stats_enabled").read_text().strip() == "1"
    exported = CATALOG.keys() - HOLDS - (ABSENT if mode == "blocked" else set())
    expected = exported - (set() if has_statistics else STATISTICS)
    assert names <= exported
    assert samples | DEADLOCKS | RUNTIMES | UNITS == expected
