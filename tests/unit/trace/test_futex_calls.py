"""Tests of what lockd trace futex makes of drained calls, and of what /proc tells about waiting threads."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockd.kernel.manifest import Manifest
from lockd.kernel.maps import HashMap
from lockd.trace.core.histogram import as_bcc
from lockd.trace.futex.calls import CALLS, MAXIMA, SUMS, UNKNOWN, FutexCalls
from lockd.trace.futex.open_waits import FUTEX, OpenWaits, find_wait, kind_of_wait, slots_of

KINDS = ("lock", "pi", "cond", "other", "wake", "none")
STATES = ("runnable", "interruptible")
MANIFEST = Manifest(0, (), (), (), (), {"futex_kind": KINDS, "state": STATES}, {"SLOT_NONE": 255})
LOCK, COND, WAKE = (KINDS.index(name) for name in ("lock", "cond", "wake"))

CALL = st.fixed_dictionaries({
    "tgid": st.integers(1, 3), "tid": st.integers(1, 4), "uaddr": st.integers(0, 3),
    "kind": st.integers(0, 5), "slot": st.sampled_from([0, 3, 9, 255]), "error": st.sampled_from([0, 11]),
    "stack": st.integers(0, 2), "is_open": st.integers(0, 1), "calls": st.integers(1, 2**40),
    "blocked_ns": st.integers(0, 2**50), "sys_ns": st.integers(0, 2**50),
    "max_blocked_ns": st.integers(0, 2**50), "max_sys_ns": st.integers(0, 2**50),
})  # fmt: skip
WINDOWS = st.lists(st.lists(CALL, min_size=1, max_size=10), max_size=6)


def part_of(calls: list[dict[str, int]]) -> Any:
    part = np.zeros(len(calls), CALLS)
    for row, call in enumerate(calls):
        for name, value in call.items():
            part[name][row] = value
    return part


def names_of(number: int) -> tuple[str, ...]:
    return (f"inner{number}", "outer") if number else ()


@given(WINDOWS, st.integers(0, 5), st.booleans())
def test_no_count_and_no_time_is_lost(windows: list[list[dict[str, int]]], most: int, often: bool) -> None:
    """Nothing is lost whenever calls are merged, even if there is room for only a few sorts of calls."""
    found = FutexCalls(MANIFEST, most)
    for window in windows:
        found.add_rows(part_of(window))
        if often:
            found.merged()
    calls = [call for window in windows for call in window]
    merged = found.merged()
    assert found.total == sum(call["calls"] for call in calls)
    for name in SUMS:
        assert int(merged[name].sum()) == sum(call[name] for call in calls)
    for name in MAXIMA:
        assert max(merged[name].tolist(), default=0) == max((call[name] for call in calls), default=0)
    assert sum(merged["tgid"] > 0) <= most
    assert int(merged["calls"][merged["tgid"] == 0].sum()) == found.nameless
    rows = found.rows(names_of)
    assert sum(row.blocked_ns for row in rows) == sum(call["blocked_ns"] for call in calls)
    assert sum(row.wait_count for row in rows) == sum(c["calls"] for c in calls if c["kind"] < WAKE)
    assert sum(row.wake_count for row in rows) == sum(c["calls"] for c in calls if c["kind"] == WAKE)
    assert sum(row.errors for row in rows) == sum(c["calls"] for c in calls if c["error"])
    assert sum(row.ongoing for row in rows) == sum(c["calls"] for c in calls if c["is_open"])
    histograms = found.histograms()
    assert sum(one.count for one in histograms.values()) == sum(row.blocked_count for row in rows)
    assert len({(row.pid, row.tid, row.address, row.frames) for row in rows}) == len(rows)


def test_what_has_no_room_says_so() -> None:
    found = FutexCalls(MANIFEST, 0)
    found.add_rows(part_of([{"tgid": 7, "tid": 8, "uaddr": 9, "stack": 1, "kind": LOCK, "calls": 3}]))
    (row,) = found.rows(names_of)
    assert (row.pid, row.tid, row.address, row.comm, row.frames) == (0, 0, 0, UNKNOWN, ())
    assert (row.wait_count, found.nameless) == (3, 3)


def test_wakes_have_the_name_of_their_lock() -> None:
    found = FutexCalls(MANIFEST)
    wait = {"tgid": 7, "tid": 8, "uaddr": 9, "kind": COND, "calls": 2, "slot": 255}
    found.add_rows(part_of([wait, {**wait, "tid": 10, "kind": WAKE}, {**wait, "uaddr": 11, "kind": WAKE}]))
    asked: list[tuple[int, int, str]] = []

    def name_of(tgid: int, address: int, guess: str) -> tuple[str, str]:
        asked.append((tgid, address, guess))
        return ("lock" if guess else ""), f"lock{address}"

    rows = found.rows(names_of, name_of)
    assert sorted(asked) == [(7, 9, "cond"), (7, 11, "")]
    assert sorted((row.tid, row.kind, row.lock) for row in rows) == [
        (8, "", "lock11"), (8, "lock", "lock9"), (10, "lock", "lock9"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("us", "line"),
    [(0, "0 -> 1"), (1, "0 -> 1"), (2, "2 -> 3"), (3, "2 -> 3"), (4, "4 -> 7"), (1023, "512 -> 1023"),
     (1024, "1024 -> 2047"), (3_600_000_000, "2147483648 -> 4294967295")],
)  # fmt: skip
def test_a_time_is_in_the_line_of_a_histogram_that_has_it(us: int, line: str) -> None:
    found = FutexCalls(MANIFEST)
    slot = int(slots_of(np.array([us * 1000 + 500]))[0])
    found.add_rows(part_of([{"tgid": 7, "uaddr": 9, "kind": LOCK, "slot": slot, "calls": 5}]))
    (lines,) = (list(as_bcc(histogram)) for histogram in found.histograms().values())
    assert " ".join(lines[-1].partition(":")[0].split()) == line
    assert lines[-1].split(":")[1].split()[0] == "5"


THREAD = np.dtype(
    [("off_since", "u8"), ("tgid", "u4"), ("state", "u1"), ("call_blocked", "u8"),
     ("call", [("since", "u8"), ("uaddr", "u8"), ("kind", "u1"), ("restart", "u1"),
               ("stacks", [("user", "u8"), ("kernel", "u8")])])]
)  # fmt: skip
END = 10**12


def test_what_began_after_the_end_was_not_open_then(tmp_path: Path) -> None:
    """While the programs are detached, they may still note calls, and absences in calls from before."""
    times = [(END - 90, END - 50), (END - 90, END + 50), (END + 30, END + 50)]
    threads = np.zeros(len(times), THREAD)
    threads["call"]["since"], threads["off_since"] = zip(*times, strict=True)
    threads["call"]["stacks"]["user"], threads["state"] = 1, STATES.index("interruptible")
    calls = FutexCalls(MANIFEST)
    open_waits = OpenWaits(MANIFEST, tmp_path)
    tids = np.arange(1, 1 + len(times), dtype=np.uint64)
    assert open_waits.count_unfinished(calls, (tids, threads), END, lambda _: 0) == 2
    found = {row["tid"]: (row["blocked_ns"], row["sys_ns"]) for row in calls.merged()}
    assert found == {1: (50, 40), 2: (0, 90)}


ENTRY = np.dtype(
    [("off_since", "u8"), ("tgid", "u4"), ("nr", "i2"), ("state", "u1"),
     ("call", [("since", "u8"), ("uaddr", "u8"), ("tid", "u4"), ("kind", "u1"), ("guess", "u1")])]
)  # fmt: skip


@pytest.mark.parametrize(("known", "without_room"), [((), 2), ((8,), 1), ((7, 8), 0)])
def test_older_waits_for_which_the_map_has_no_room_are_counted(
    known: tuple[int, ...], without_room: int, tmp_path: Path
) -> None:
    """A thread that a program has entered meanwhile is in the map, and its wait is not lost."""
    for tid in (7, 8):
        task = tmp_path / "7" / "task" / str(tid)
        task.mkdir(parents=True)
        (task / "status").write_text("Name:\tx\nvoluntary_ctxt_switches:\t5\n")
        (task / "syscall").write_text(f"{FUTEX} 0x1000 0x80 0x2 0x0 0x0 0x0 0x7ff0 0x5550\n")

    def lookup(key: Any) -> Any:
        entry = np.zeros(1, ENTRY)
        entry["tgid"] = 7 if int(key[0]) in known else 0
        return entry

    full = SimpleNamespace(key=np.dtype("u8"), value=ENTRY, insert=lambda *_: False, lookup=lookup)
    waits = OpenWaits(MANIFEST, tmp_path)
    assert waits.enter_older(cast("HashMap", full), [7], END) == 0
    assert waits.without_room == without_room


def test_threads_whose_calls_the_kernel_refuses_to_show_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that run do not wait, and threads of the kernel, which have no memory, make no calls."""
    for tid, state, memory in ((7, "S", "VmSize:\t9 kB\n"), (8, "R", "VmSize:\t9 kB\n"), (9, "S", "")):
        task = tmp_path / "7" / "task" / str(tid)
        task.mkdir(parents=True)
        status = f"Name:\tx\nState:\t{state} (x)\n{memory}voluntary_ctxt_switches:\t5\n"
        (task / "status").write_text(status)

    def refuse(path: Path) -> NoReturn:
        raise PermissionError(f"{path}")

    monkeypatch.setattr(Path, "read_text", refuse)
    waits = OpenWaits(MANIFEST, tmp_path)
    assert waits.enter_older(cast("HashMap", None), [7], END) == 0
    assert (waits.unreadable, waits.without_room) == (1, 0)
    assert find_wait(tmp_path, 7, 7) is None


REALTIME, PRIVATE = 256, 128


@pytest.mark.parametrize(
    ("operation", "value", "timeout", "kind"),
    [
        (0, 2, 0, "lock"), (PRIVATE, 2, 0, "lock"), (0, 1, 0, "cond"), (0, 0x80000123, 0, "lock"),
        (0, 0xFFFFFFFF, 0, "cond"), (0, 0xFFFFFFFFFFFFFFFF, 0, "cond"), (9, 2, 0, "lock"), (9, 2, 1, "cond"),
        (9 | REALTIME, 2, 0, "cond"), (9, 0, 0, "cond"), (11, 0, 0, "cond"), (6, 0, 0, "pi"),
        (13 | PRIVATE, 0, 0, "pi"), (1, 2, 0, ""), (3, 2, 0, ""), (5, 2, 0, ""), (10, 2, 0, ""),
        (99, 2, 0, ""),
    ],
)  # fmt: skip
def test_kinds_of_calls_are_as_the_programs_tell_them(
    operation: int, value: int, timeout: int, kind: str
) -> None:
    assert kind_of_wait(operation, value, timeout) == kind
