"""Tests of the results of lockd trace offcpu and offwake, on made-up waits."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import numpy as np
import pytest

from lockd import cli
from lockd.load.source import assemble
from lockd.names.labels.reasons import Reasons, calls
from lockd.names.unwind.capture import Capture
from lockd.trace.core import call_stacks
from lockd.trace.core.call_stacks import LOST, LOST_STACK, CallStacks
from lockd.trace.core.session import OLDER_WAITS_LOST, OLDER_WAITS_UNREADABLE, Session
from lockd.trace.offcpu import offcpu, offwake, older_waits
from lockd.trace.offcpu.absences import NOBODY, Absences, Place, Times
from lockd.trace.offcpu.older_waits import BlockedThread, OlderWaits, ThreadState
from lockd.views.profile import Profile


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    offcpu.add_options(parser)
    return parser.parse_args(words)


def test_of_waits_that_look_the_same_the_longest_is_told() -> None:
    """Two stacks of the kernel are one where only the stacks of user space are shown."""
    args = parsed("-U")
    places = {
        Place("reader", 1, 2, ("read", "main"), ("schedule", "pipe_read")): Times(3, 9_000_000, 0, 5_000_000),
        Place("reader", 1, 2, ("read", "main"), ("schedule", "new_read")): Times(2, 8_000_000, 0, 4_800_000),
    }
    samples = [offcpu._sample(place, times, args) for place, times in places.items()]
    (merged,) = Profile("test", offcpu._values(args), samples).sorted()
    assert merged.frames == ("main", "read")
    assert merged.values == (17_000, 5, 5_000)


def test_the_entries_of_interrupts_are_found_before_the_trace_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes up to a second, in which busy threads would fill the maps."""
    order: list[str] = []

    class Begun(Exception):
        pass

    def found() -> tuple[int, int]:
        order.append("entries of interrupts")
        return 1, 2

    def begin(_: object) -> NoReturn:
        order.append("begin of the trace")
        raise Begun

    monkeypatch.setattr(offcpu, "interrupt_entries", found)
    monkeypatch.setattr(Session, "__enter__", begin)
    args = cli._parser(["trace"]).parse_args(["trace", "offwake"])
    with pytest.raises(Begun):
        offwake.run(args)
    assert order == ["entries of interrupts", "begin of the trace"]


KEY = np.dtype(
    [("tid", "u4"), ("nr", "i2"), ("state", "u1"), ("iowait", "u1"), ("detail", "u1"), ("comm", "S16"),
     ("stacks", [("user", "u8"), ("kernel", "u8")])]
)  # fmt: skip
VALUE = np.dtype(
    [*((name, "u8") for name in ("count", "blocked_ns", "run_ns", "max_blocked_ns")),
     ("who", [("tgid", "u4")])]
)  # fmt: skip


def absences_of(most: int) -> tuple[Absences, Session]:
    info = SimpleNamespace(name="offcpu_0", key=KEY)
    manifest = SimpleNamespace(
        maps=[info], enums={"state": ("runnable",)}, constants={"NR_NONE": -1, "NR_KERNEL": -2}
    )
    session = cast("Session", SimpleNamespace(manifest=manifest, stacks=CallStacks(), events=0))
    return Absences(session, with_runqueue=False, most=most), session


def places_of(absences: Absences) -> dict[Place, Times]:
    older = cast("OlderWaits", SimpleNamespace(has_stack=lambda _: False))
    return absences.by_place(older, 0, 10**9, with_ongoing=False)


def test_absences_beyond_what_there_is_room_for_count_without_names() -> None:
    absences, session = absences_of(most=2)
    for tids in ((1,), (1, 2, 3), (3, 2, 4)):
        keys, values = np.zeros(len(tids), KEY), np.zeros(len(tids), VALUE)
        keys["tid"], values["who"]["tgid"] = tids, 5
        values["count"], values["blocked_ns"], values["max_blocked_ns"] = 1, 10, tids
        absences.add({"offcpu": (keys, values)})
    found = {
        (place.comm, place.tid): (times.count, times.wait, times.longest)
        for place, times in places_of(absences).items()
    }
    assert found == {("", 1): (2, 20, 1), ("", 2): (2, 20, 2), (NOBODY, 0): (3, 30, 4)}
    assert (absences.nameless, session.events) == (3, 7)


def test_a_thread_id_that_is_used_again_is_of_another_process() -> None:
    absences, _ = absences_of(most=9)
    for tgid, comm, count in ((5, b"old", 1), (7, b"new", 2), (9, b"new", 4)):
        keys, values = np.zeros(1, KEY), np.zeros(1, VALUE)
        keys["tid"], keys["comm"], values["who"]["tgid"], values["count"] = 6, comm, tgid, count
        absences.add({"offcpu": (keys, values)})
    found = {(place.comm, place.pid, place.tid): times.count for place, times in places_of(absences).items()}
    assert found == {("old", 5, 6): 1, ("new", 7, 6): 2, ("new", 9, 6): 4}


def test_absences_whose_stacks_are_lost_add_up() -> None:
    """Keys that differed in their stacks are equal once all of these have the number of a lost stack."""
    absences, _ = absences_of(most=9)
    keys, values = np.zeros(2, KEY), np.zeros(2, VALUE)
    keys["stacks"]["user"] = LOST_STACK
    values["count"], values["blocked_ns"], values["run_ns"] = (2, 3), (20, 30), (1, 2)
    values["max_blocked_ns"] = 18, 12
    absences.add({"offcpu": (keys, values)})
    assert list(places_of(absences).values()) == [Times(5, 50, 3, 18)]


FILES = ("include/common.bpf.h", "include/arch.bpf.h", "daemon/futex.bpf.c", "daemon/sched.bpf.c")
SOURCE = assemble(FILES, {})
NUMBERS = {name: nr for nr, (_, name) in calls(os.uname().machine).items()}
ENTRY = np.dtype(
    [("off_since", "u8"), ("tgid", "u4"), ("nr", "i2"), ("state", "u1"), ("detail", "u1"), ("comm", "S16"),
     ("stacks", [("user", "u8"), ("kernel", "u8")])]
)  # fmt: skip


@pytest.mark.parametrize(("tgid", "lost"), [(0, 1), (5, 0)])
def test_an_older_wait_for_which_the_map_has_no_room_is_lost(
    tgid: int, lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that a program has entered meanwhile is in the map, and its wait is not lost."""
    entry = np.zeros(1, ENTRY)
    entry["tgid"] = tgid
    full: Any = SimpleNamespace(
        key=np.dtype("u8"), value=ENTRY, insert=lambda *_: False, lookup=lambda _: entry
    )
    session: Any = SimpleNamespace(
        manifest=SimpleNamespace(enums={"state": ("runnable", "interruptible")}, constants={}),
        stacks=CallStacks(), began_ns=1, own_losses=Counter(), map=lambda _: full,
    )  # fmt: skip
    thread = BlockedThread(6, 5, b"x", ThreadState("S", 3), False, 0, None, None, ())
    monkeypatch.setattr(older_waits, "blocked_thread", lambda _: thread)
    OlderWaits(session, None, False, False).enter((), (6,))
    assert session.own_losses[OLDER_WAITS_LOST] == lost


def procfs_of(directory: Path, **files: str) -> Path:
    """Make a proc file system of thread 6, which sleeps in nanosleep(), with these other files."""
    thread = directory / "6"
    thread.mkdir()
    shown = {
        "status": "Tgid:\t6\nState:\tS (sleeping)\nvoluntary_ctxt_switches:\t3\n",
        "stat": "6 (x) S 1 6 6 0 -1 0",
        "comm": "x\n",
        "syscall": call_of(NUMBERS["nanosleep"]),
    }
    for name, text in (shown | files).items():
        (thread / name).write_text(text)
    return directory


def call_of(nr: int, first: int = 0, stack_pointer: int = 0x7FF0) -> str:
    """The file `syscall` of a thread in a system call with this first argument."""
    return f"{nr} {first:#x} 0x0 0x0 0x0 0x0 0x0 {stack_pointer:#x} {stack_pointer:#x}\n"


def entries_of(session: Any) -> list[Any]:
    """Give a session a map of threads and what else OlderWaits asks for. The list has what was entered."""
    entered: list[Any] = []
    threads = SimpleNamespace(
        key=np.dtype("u8"), value=ENTRY, insert=lambda _, entry: not entered.append(entry[0])
    )
    session.manifest = SimpleNamespace(enums=SOURCE.enums, constants=SOURCE.constants)
    session.stacks, session.began_ns, session.own_losses = CallStacks(), 1, Counter()
    session.map = lambda _: threads
    return entered


def in_procfs(procfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have OlderWaits look for threads in this proc file system."""
    blocked, state = older_waits.blocked_thread, older_waits.thread_state
    monkeypatch.setattr(older_waits, "blocked_thread", lambda tid: blocked(tid, procfs))
    monkeypatch.setattr(older_waits, "thread_state", lambda tid, _=procfs: state(tid, procfs))


@pytest.mark.parametrize(("state_mask", "lost"), [(None, 1), (1, 1), (2, 0)])
def test_an_older_wait_that_the_kernel_refuses_to_show_is_lost(
    state_mask: int | None, lost: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a wait that was asked for is lost."""
    in_procfs(procfs_of(tmp_path), monkeypatch)
    read_text = Path.read_text

    def refuse(path: Path, **options: Any) -> str:
        if path.name == "syscall":
            raise PermissionError(f"{path}")
        return read_text(path, **options)

    monkeypatch.setattr(Path, "read_text", refuse)
    session: Any = SimpleNamespace()
    entered = entries_of(session)
    OlderWaits(session, state_mask, False, False).enter((), (6,))
    assert (session.own_losses[OLDER_WAITS_UNREADABLE], entered) == (lost, [])


FROZEN = "[<0>] get_signal+0x38e/0x840\n[<0>] arch_do_signal_or_restart+0x26/0x250\n"
UNINTERRUPTIBLE = "Tgid:\t6\nState:\tD (disk sleep)\nvoluntary_ctxt_switches:\t3\n"


@pytest.mark.parametrize(
    ("reason", "files"),
    [
        ("sleep", {"syscall": call_of(NUMBERS["nanosleep"])}),
        ("fault", {"syscall": "-1 0x7ff0 0x7ff0\n"}),
        ("other", {"syscall": call_of(NUMBERS["nanosleep"]), "exe": "\x7fELF\x01"}),
        ("sleep", {"syscall": call_of(NUMBERS["nanosleep"]), "exe": "\x7fELF\x02"}),
        ("kthread", {"syscall": call_of(NUMBERS["ppoll"], stack_pointer=0)}),
        ("kthread", {"syscall": "-1 0x0 0x0\n"}),
        ("kthread", {"stat": f"6 (x) S 1 6 6 0 -1 {1 << 21}"}),
        ("other", {"syscall": call_of(NUMBERS["ppoll"]), "stat": "6 (x) S 1 6 6 0 -1 4"}),
        ("stopped", {"syscall": call_of(NUMBERS["nanosleep"]), "stack": FROZEN}),
        ("stopped", {"syscall": "-1 0x7ff0 0x7ff0\n", "stack": f"[<0>] do_freezer_trap+0x8/0x40\n{FROZEN}"}),
        ("stopped", {"status": UNINTERRUPTIBLE, "stack": f"[<0>] __refrigerator+0x8/0x40\n{FROZEN}"}),
        ("sleep", {"syscall": call_of(NUMBERS["nanosleep"]), "stack": "[<0>] hrtimer_nanosleep+0x74/0xf0\n"}),
        ("poll", {"syscall": call_of(NUMBERS["epoll_pwait"])}),
        ("lock", {"syscall": call_of(NUMBERS["epoll_pwait"]), "comm": "postgres\n",
                  "cmdline": "postgres: shop shop [local] UPDATE waiting\0\0\0"}),
        ("poll", {"syscall": call_of(NUMBERS["epoll_pwait"]), "comm": "postgres\n",
                  "cmdline": "postgres: shop shop [local] idle\0\0\0"}),
        ("poll", {"syscall": call_of(NUMBERS["epoll_pwait"]), "cmdline": "x waiting\0"}),
        ("child", {"syscall": call_of(NUMBERS["clone"], 0x4111), "status": UNINTERRUPTIBLE}),
        ("kernel", {"syscall": call_of(NUMBERS["clone"], 0x111), "status": UNINTERRUPTIBLE}),
        ("child", {"syscall": call_of(NUMBERS["clone3"], 8), "status": UNINTERRUPTIBLE,
                   "mem": "\0" * 8 + "\x11\x41" + "\0" * 6}),
    ],
)  # fmt: skip
def test_older_waits_have_the_reasons_that_the_programs_would_give_them(
    reason: str, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_procfs(procfs_of(tmp_path, **files), monkeypatch)
    session: Any = SimpleNamespace()
    entered = entries_of(session)
    OlderWaits(session, None, False, False).enter((), (6,))
    (entry,) = entered
    cause = int(entry["nr"]), int(entry["state"]), False, int(entry["detail"])
    assert Reasons(SOURCE.enums, SOURCE.constants).reason(*cause) == reason


def test_a_stack_of_an_older_wait_that_there_is_no_room_for_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_stacks, "MOST_CAPTURED", 1)
    stacks, capture = CallStacks(), Capture((), b"", (), 0)
    monkeypatch.setattr(stacks.names, "read_mappings", lambda _: None)
    stacks.add_sleeping(5, None, ())
    stacks.add_sleeping(5, capture, ())
    assert stacks.lost == 0
    assert stacks.user(stacks.add_sleeping(5, capture, ())) == LOST
    assert stacks.lost == 1


def test_a_side_that_was_not_asked_for_is_not_shown() -> None:
    """A wait from before the trace has the stacks of both sides in any case."""
    place = Place("reader", 1, 2, ("read", "main"), ("schedule", "pipe_read"), is_older=True)
    sides = {option: offcpu._sample(place, Times(), parsed(option)).frames for option in ("-K", "-U")}
    assert sides == {"-K": ("pipe_read", "schedule"), "-U": ("main", "read")}
