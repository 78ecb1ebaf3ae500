"""A restart under load, with the descriptors kept as systemd keeps them: the programs never stop counting."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockd import messages
from lockd.export.catalog import CATALOG
from lockd.sample.saved_state import PLACE, SavedState
from tests.kernel.test_nothing_left import IDS, check_gone, in_kernel, processes_of
from tests.support.descriptor_store import DescriptorStore
from tests.support.lockd_process import PERIOD_SECONDS, Labels, Lockd, Metrics
from tests.support.workload import Start

pytestmark = pytest.mark.untimed

SECONDS = 10
RESTARTS = 3
AFTER = {signal.SIGTERM: "end", signal.SIGKILL: "crash"}
PERIODS_LOST = 4
"""The most periods whose waits are lost with an interrupted drain.

A drain takes one window out of the maps. Under this load a window lasts a period, or two if the grace period
of the window before has not ended by the tick. The load may be twice as fast in this window as on average:
starts of lockd and other tests take processor time from the load at other times.
"""
Counters = dict[tuple[str, Labels], float]
RETIRED = "lockd_retired_value"
ROUNDED = 1e-9
"""The share by which a sum may fall because its parts are added in another order."""
LATER = {"period": "20ms"}
"""A configuration that differs from the default one and loads the same programs."""


@pytest.fixture
def store(tmp_path: Path, host: None) -> Iterator[DescriptorStore]:
    kept = DescriptorStore(tmp_path)
    yield kept
    kept.close()


def loaded_by(pid: int) -> set[str]:
    """Return the lines of in_kernel() about programs, maps and links of which `pid` has descriptors."""
    held = set()
    for file in Path(f"/proc/{pid}/fdinfo").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed just now
            held |= {" ".join(found) for found in IDS.findall(file.read_text())}
    return {one for one in in_kernel() if " ".join(one.split()[:2]) in held}


def ended(lockd: Lockd) -> None:
    lockd.process.kill()
    lockd.process.wait(30)


def test_what_is_kept_is_adopted(store: DescriptorStore, tmp_path: Path, workload: Start) -> None:
    """The second daemon attaches nothing, and counts what happened while no daemon ran."""
    before = in_kernel()
    first = store.start(tmp_path)
    loaded = loaded_by(first.process.pid)
    assert len([one for one in loaded if one.startswith("prog")]) > 5
    assert first.stop() == 0, "".join(first.log)
    one = workload("mutex_handover", 200, 1000)
    truth = one.run()
    second = store.start(tmp_path, LATER)
    try:
        metrics = second.metrics()
        log = "".join(second.log)
        assert "the programs of the last start are attached still" in log
        assert "loader" not in log
        assert loaded_by(second.process.pid) == loaded
        told = truth["futex"]["lock"]
        counted = metrics.sum("lockd_futex_waits_total", comm=one.comm, kind="lock")
        blocked = metrics.sum("lockd_futex_blocked_seconds_count", comm=one.comm, kind="lock")
        assert told["waits"] == 200
        assert told["waits"] - metrics.not_told <= counted <= told["waits"]
        assert told["blocked"] - metrics.not_told <= blocked <= told["blocked"]
        for child in processes_of(second.process.pid)[1:]:
            command = Path(f"/proc/{child}/cmdline").read_bytes()
            links = set()
            for link in Path(f"/proc/{child}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):  # it was closed just now
                    links.add(os.readlink(link))
            kernel = {link for link in links if link.startswith("anon_inode:")}  # not the file libbpf.so.1
            objects = {link for link in kernel if "bpf" in link or "perf_event" in link}
            assert objects <= ({"anon_inode:bpf-map"} if b"lockd.names" in command else set()), command
    finally:
        ended(second)
    store.close()
    check_gone(loaded, before, [os.getpid()])


def counters(lockd: Lockd) -> Counters:
    """Return all counters, the parts of all histograms and lockd_retired_value, by name and labels."""
    names = {RETIRED, *(metric.name for metric in CATALOG.values() if metric.kind == "counter")}
    histograms = [metric.name for metric in CATALOG.values() if metric.kind == "histogram"]
    names |= {name + part for name in histograms for part in ("_bucket", "_count", "_sum")}
    samples = lockd.metrics(settled=False).samples
    return {(name, key): value for name in names for key, value in samples.get(name, {}).items()}


def fallen(before: Counters, now: Counters) -> dict[Any, Any]:
    """Return the counters that have fallen and the metrics whose sum over all series has fallen.

    A series may go with its process. lockd_retired_value then has what the series had counted.
    """
    less: dict[Any, Any] = {
        which: (was, now[which])
        for which, was in before.items()
        if which[0] != RETIRED and now.get(which, was) < was
    }
    in_all = totals(now)
    for name, was in totals(before).items():
        if in_all.get(name, 0.0) < was * (1 - ROUNDED):
            less[name] = was, in_all.get(name)
    return less


def totals(told: Counters) -> dict[str, float]:
    """Return the sum of each metric over all series, including the retired ones.

    Buckets are left out: lockd does not export the counts of retired series by bucket. The sum of the buckets
    is the count of the histogram, which is included.
    """
    found: dict[str, float] = {}
    for (name, labels), value in told.items():
        if not name.endswith("_bucket"):
            metric = dict(labels)["metric"] if name == RETIRED else name
            found[metric] = found.get(metric, 0.0) + value
    return found


def interrupted_waits(metrics: Metrics, waits: int, seconds: float) -> float:
    """Return the most waits that interrupted drains may have lost, of `waits` in `seconds` seconds."""
    interrupted = metrics.sum("lockd_interrupted_drains_total")
    return interrupted * PERIODS_LOST * PERIOD_SECONDS * waits / seconds


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGTERM, marks=pytest.mark.thorough("a kill is the harder case")),
        signal.SIGKILL,
    ],
)
def test_nothing_is_lost_and_no_counter_falls(
    store: DescriptorStore, tmp_path: Path, workload: Start, number: signal.Signals
) -> None:
    """The daemon is restarted several times under load.

    A kill may interrupt a drain. What the drain had taken out of the maps may then be lost.
    """
    lockd = store.start(tmp_path)
    try:
        one = workload("storm", 2, SECONDS, 1, 50)
        one.go()
        began = lockd.metrics(settled=False).sum("lockd_start_time_seconds")
        told = counters(lockd)
        for _ in range(RESTARTS):
            time.sleep(0.7)
            before, told = told, counters(lockd)
            assert fallen(before, told) == {}
            lockd.process.send_signal(number)
            lockd.process.wait(30)
            lockd = store.start(tmp_path)
            before, told = told, counters(lockd)
            assert fallen(before, told) == {}
        truth = one.truth()["futex"]["lock"]
        metrics = lockd.metrics()
        counted = metrics.sum("lockd_futex_waits_total", comm=one.comm, kind="lock")
        blocked = metrics.sum("lockd_futex_blocked_seconds_count", comm=one.comm, kind="lock")
        interrupted = metrics.sum("lockd_interrupted_drains_total")
        assert metrics.sum("lockd_taken_over_total", after=AFTER[number]) == RESTARTS
        assert metrics.sum("lockd_taken_over_total") == RESTARTS
        assert metrics.sum("lockd_start_time_seconds") == began
        assert interrupted == 0 or number == signal.SIGKILL
        lost = interrupted_waits(metrics, truth["waits"], SECONDS) + metrics.not_told
        assert truth["waits"] - lost <= counted <= truth["waits"]
        assert truth["blocked"] - lost <= blocked <= truth["blocked"]
    finally:
        ended(lockd)


@pytest.mark.parametrize(
    "why",
    [
        "settings",
        "damaged",
        *(
            pytest.param(why, marks=pytest.mark.thorough("three daemons, for what `damaged` shows as well"))
            for why in ("missing", "exchanged", "failing")
        ),
    ],
)
def test_what_does_not_fit_is_let_go(store: DescriptorStore, tmp_path: Path, why: str) -> None:
    before = in_kernel()
    first = store.start(tmp_path)
    loaded = loaded_by(first.process.pid)
    ended(first)
    config = {"filter": {"min_block": "1us"}} if why == "settings" else {}
    says = spoil(store, why)
    second = store.start(tmp_path, config)
    try:
        assert f"not used: {says}; loading anew" in "".join(second.log)
        check_gone(loaded, before, [os.getpid(), *processes_of(second.process.pid)])
        assert second.metrics().sum("lockd_hook_attached") > 5
    finally:
        ended(second)
    third = store.start(tmp_path, config)
    assert "attached still" in "".join(third.log)
    ended(third)


def spoil(store: DescriptorStore, why: str) -> str:
    """Spoil what is kept, if `why` is about it, and return what the next start says."""
    match why:
        case "missing":
            os.close(store.kept.pop("bpf-003"))
            return "the descriptor bpf-003 is missing"
        case "damaged":
            os.pwrite(store.kept["manifest"], b"x", 1000)
            return "the manifest is damaged"
        case "exchanged":
            kept = store.kept
            kept["bpf-003"], kept["bpf-004"] = kept["bpf-004"], kept["bpf-003"]
            return "the descriptor bpf-003 is another's"
        case "failing":
            os.pwrite(store.kept["manifest"], b"\3", 0)
            return "3 starts with it have failed, one after another"
    return "this start loads other programs, or the same with other settings"


@pytest.mark.parametrize("why", ["another version", "damaged", "other rows"])
def test_counts_that_make_no_sense_begin_at_zero(
    store: DescriptorStore, tmp_path: Path, workload: Start, why: str
) -> None:
    """The next start still takes over the programs. The start after it takes over the counts as well."""
    first = store.start(tmp_path)
    one = workload("mutex_handover", 50, 1000)
    one.run()
    before = first.metrics()
    assert before.sum("lockd_futex_waits_total", comm=one.comm, kind="lock") == 50
    ended(first)
    says = spoil_counted(store.kept["counted"], why)
    second = store.start(tmp_path)
    log = "".join(second.log)
    assert "the programs of the last start are attached still" in log
    assert f"is not used: {says}" in log
    assert "all counts begin at zero" in log
    other = workload("mutex_handover", 30, 1000)
    other.run()
    metrics = second.metrics()
    assert metrics.sum("lockd_futex_waits_total", comm=one.comm, kind="lock") == 0
    assert metrics.sum("lockd_futex_waits_total", comm=other.comm, kind="lock") == 30
    assert metrics.sum("lockd_taken_over_total") == 0
    assert metrics.sum("lockd_start_time_seconds") > before.sum("lockd_start_time_seconds")
    ended(second)
    third = store.start(tmp_path)
    try:
        metrics = third.metrics()
        assert "begin at zero" not in "".join(third.log)
        assert metrics.sum("lockd_futex_waits_total", comm=other.comm, kind="lock") == 30
        assert metrics.sum("lockd_taken_over_total", after="crash") == 1
    finally:
        ended(third)


def spoil_counted(file: int, why: str) -> str:
    """Spoil the saved state, and return what the next start says about it."""
    saved = SavedState(file)
    block = saved.read()
    assert block
    if why == "another version":
        head, arrays = messages.unpack(block)
        parts = {name: np.asarray(array) for name, array in arrays.items()}
        saved.write(messages.pack({**head, "form": [0]}, parts))
        return "what was counted was left by another version of lockd"
    if why == "damaged":
        for at in (1, 2):
            os.pwrite(file, b"x", at * PLACE + 100)
        return "what was counted is damaged"
    os.pwrite(file, b"\x77" * 16, 3 * PLACE)
    return "drained rows: "


def test_an_interrupted_drain_is_counted_whatever_comes_next(store: DescriptorStore, tmp_path: Path) -> None:
    ended(store.start(tmp_path))
    os.pwrite(store.kept["counted"], b"\1", 0)  # as it is while a daemon drains
    expected = 1
    for _ in range(2):
        lockd = store.start(tmp_path)
        try:
            assert lockd.metrics(settled=False).sum("lockd_interrupted_drains_total") == expected
        finally:
            ended(lockd)
        expected += os.pread(store.kept["counted"], 1, 0) != b"\0"  # ended() may have interrupted one, too


@pytest.mark.parametrize("decides", [True, False])
def test_settings_that_load_the_same_programs(
    store: DescriptorStore, tmp_path: Path, workload: Start, decides: bool
) -> None:
    """The counts go on over a restart, unless the changed setting decides how they are kept."""
    same = {"filter": {"exclude_comms": ["nobody"]}, "budget": {"cpu": "50%"}, "names": {"parked": ["gate"]}}
    first = store.start(tmp_path)
    one = workload("mutex_handover", 50, 1000)
    one.run()
    assert first.metrics().sum("lockd_futex_waits_total", comm=one.comm) == 50
    assert first.stop() == 0
    second = store.start(tmp_path, {"series": {"max": 20_000}} if decides else same)
    try:
        log = "".join(second.log)
        assert "the programs of the last start are attached still" in log
        assert ("what was counted was left by another version of lockd, or with other" in log) == decides
        assert ("all counts begin at zero" in log) == decides
        counted = second.metrics().sum("lockd_futex_waits_total", comm=one.comm)
        assert counted == (0 if decides else 50)
    finally:
        ended(second)
