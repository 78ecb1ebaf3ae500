"""A restart under load, with the descriptors kept as systemd keeps them: the programs never stop counting."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Start
from descriptor_store import DescriptorStore
from lockd_process import Lockd
from test_nothing_left import check_gone, in_kernel, new_since, processes_of

LATER = {"period": "20ms"}
"""A configuration that loads the same programs."""


@pytest.fixture
def store(tmp_path: Path, host: None) -> Iterator[DescriptorStore]:
    kept = DescriptorStore(tmp_path)
    yield kept
    kept.close()


def ours(lockd: Lockd) -> list[int]:
    """The processes that may have what it loaded: this one keeps it."""
    return [os.getpid(), *processes_of(lockd.process.pid)]


def ended(lockd: Lockd) -> None:
    lockd.process.kill()
    lockd.process.wait(30)


def test_what_is_kept_is_adopted(store: DescriptorStore, tmp_path: Path, workload: Start) -> None:
    """Nothing else is attached, and what happens between two daemons is counted by the second."""
    before = in_kernel()
    first = store.start(tmp_path)
    loaded = new_since(before, ours(first))
    attached = {one for one in loaded if not one.startswith("map")}
    assert first.stop() == 0, "".join(first.log)
    one = workload("mutex_handover", 200, 1000)
    truth = one.run()
    second = store.start(tmp_path, LATER)
    try:
        metrics = second.metrics()
        log = "".join(second.log)
        assert "the programs of the last start are attached still" in log
        assert "loader" not in log
        assert {one for one in new_since(before, ours(second)) if not one.startswith("map")} == attached
        told = truth["futex"]["lock"]
        assert metrics.sum("lockd_futex_waits_total", comm=one.comm, kind="lock") == told["waits"] == 200
        assert metrics.sum("lockd_futex_blocked_seconds_count", comm=one.comm, kind="lock") == told["blocked"]
        assert metrics.dropped == 0
        for child in processes_of(second.process.pid)[1:]:
            command = Path(f"/proc/{child}/cmdline").read_bytes()
            links = {os.readlink(link) for link in Path(f"/proc/{child}/fd").iterdir()}
            rings = {link for link in links if "bpf" in link or "perf_event" in link}
            assert rings <= ({"anon_inode:bpf-map"} if b"lockd.names" in command else set()), command
    finally:
        ended(second)
    store.close()
    check_gone(loaded, before)


@pytest.mark.parametrize("why", ["settings", "missing", "damaged", "exchanged", "failing"])
def test_what_does_not_fit_is_let_go(store: DescriptorStore, tmp_path: Path, why: str) -> None:
    before = in_kernel()
    first = store.start(tmp_path)
    loaded = new_since(before, ours(first))
    ended(first)
    config = {"filter": {"min_block": "1us"}} if why == "settings" else {}
    says = spoil(store, why)
    second = store.start(tmp_path, config)
    try:
        assert f"not used: {says}; loading anew" in "".join(second.log)
        check_gone(loaded, before, ours(second))
        assert second.metrics().sum("lockd_hook_attached") > 5
    finally:
        ended(second)
    third = store.start(tmp_path, config)
    assert "attached still" in "".join(third.log)
    ended(third)


def spoil(store: DescriptorStore, why: str) -> str:
    """What the next start says of it."""
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
