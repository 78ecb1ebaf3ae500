"""The processes and threads that a trace is limited to, while they end one after another; stacks for which
there is no room; and the progress line on a terminal."""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import numpy as np
import pytest

from lockd import cli
from lockd.errors import UsageError
from lockd.kernel.manifest import Hook
from lockd.kernel.pairs import Entries
from lockd.load.child import OTHER_DESCRIPTORS, raise_descriptor_limit
from lockd.load.settings import Trace
from lockd.names.unwind.capture import REGISTERS
from lockd.trace.core import call_stacks, options, output
from lockd.trace.core import session as sessions
from lockd.trace.core.call_stacks import KEPT, LOST_STACK, NO_STACK, CallStacks
from lockd.trace.core.session import TRACED_PROCESSES, TRACED_THREADS, Lifetimes, Session
from lockd.trace.futex import futex
from lockd.trace.mutex import mutex
from lockd.trace.offcpu import offcpu
from lockd.trace.probes import pattern_options
from lockd.trace.probes.patterns import Place, Probes, parse

OF_THIS_MACHINE = REGISTERS[os.uname().machine]
SECONDS = 60.0
"""The longest time that a thread may take to end after it has been joined."""


class Nothing:
    """Whatever is asked of it is nothing, too."""

    def __getattr__(self, _: str) -> Nothing:
        return self

    def __call__(self, *_: object, **__: object) -> Nothing:
        return self

    def __getitem__(self, _: object) -> Nothing:
        return self

    def __setitem__(self, *_: object) -> None:
        pass

    def __iter__(self) -> Iterator[Nothing]:
        return iter(())

    def __bool__(self) -> bool:
        return False

    def __enter__(self) -> Nothing:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_a_profile_begins_when_all_is_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attaching can take seconds."""
    session: Any = Nothing()
    session.began_at, session.elapsed = 1234.5, 2.0
    parts = {
        futex: ("_settings", "FutexCalls", "OpenWaits", "LockNames"),
        offcpu: ("_settings", "Absences", "OlderWaits"),
        mutex: ("probes", "MutexTimes"),
    }
    for tool, names in parts.items():
        monkeypatch.setattr(tool, "Session", lambda *_, **__: session)
        for name in names:
            monkeypatch.setattr(tool, name, Nothing())
    monkeypatch.setattr(options, "load_settings", Nothing())
    written: list[Any] = []
    monkeypatch.setattr(mutex, "_write", lambda *given: written.append(given))
    calls = futex.trace_calls("", parsed("futex"), None, with_names=False, with_holders=False)
    assert (calls.began, calls.seconds) == (1234.5, 2.0)
    with offcpu.trace("", parsed("offcpu"), {}) as (_, profile, _):
        assert (profile.began, profile.seconds) == (1234.5, 2.0)
    mutex.run(parsed("mutex", "-p", str(os.getpid())))
    assert written[0][-2:] == (1234.5, 2.0)


def parsed(*words: str) -> argparse.Namespace:
    return cli._parser(["trace"]).parse_args(["trace", *words])


def test_the_programs_forget_each_process_that_ends() -> None:
    """The kernel gives its id to another process later, which is not to be traced."""
    deleted: list[int] = []
    session: Any = Session.__new__(Session)
    session.fds = {TRACED_PROCESSES: 3}
    session._pairs = SimpleNamespace(
        hashes={TRACED_PROCESSES: SimpleNamespace(delete=lambda keys: deleted.extend(keys.tolist()))}
    )
    with contextlib.ExitStack() as opened:
        first, second = (
            opened.enter_context(subprocess.Popen(["cat"], stdin=subprocess.PIPE)) for _ in range(2)
        )
        session._lifetimes = Lifetimes((first.pid, second.pid), (), opened)
        for child, ended in ((None, []), (first, [first.pid]), (None, [first.pid])):
            if child:
                child.kill()
                child.wait()
            session._forget_ended()
            assert (deleted, session._lifetimes.have_ended) == (ended, False)
        second.kill()
        second.wait()
        session._forget_ended()
        assert (deleted, session._lifetimes.have_ended) == ([first.pid, second.pid], True)


def test_threads_are_examined_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "EXAMINED_AT_ONCE", 1)
    events = [threading.Event() for _ in range(3)]
    threads = [threading.Thread(target=event.wait) for event in events]
    for thread in threads:
        thread.start()
    tids = [thread.native_id or 0 for thread in threads]
    with contextlib.ExitStack() as opened:
        lifetimes = Lifetimes((), tids, opened)
        found: list[int] = []
        for event, thread, tid in reversed(list(zip(events, threads, tids, strict=True))):
            assert not lifetimes.have_ended
            event.set()
            thread.join()
            deadline = time.monotonic() + SECONDS
            while tid not in found and time.monotonic() < deadline:
                found += lifetimes.take_ended()[TRACED_THREADS]
        assert found == tids[::-1]
        assert lifetimes.have_ended


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (errno.EMFILE, "Too many open files"),
        (errno.ESRCH, "No such process"),
        (errno.EINVAL, "it is a thread; rule: the id of a process"),
        (errno.ENOENT, "it is a thread; rule: the id of a process"),
    ],
)
def test_why_a_process_cannot_be_opened(number: int, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> NoReturn:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pidfd_open", refuse)
    own = os.getpid()
    with contextlib.ExitStack() as opened, pytest.raises(UsageError, match=f"process {own}: {says}"):
        Lifetimes((own,), (), opened)


def test_there_is_room_for_a_descriptor_of_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(1024, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.append(limit))
    settings = options.load_settings(argparse.Namespace(), Trace())
    for processes in (0, 300, 1000, 1000):
        raise_descriptor_limit(settings, processes)
    assert limits == [(1024, 4096), (OTHER_DESCRIPTORS + 1000, 4096)]


def test_a_trace_of_all_processes_does_not_end_with_any() -> None:
    with contextlib.ExitStack() as opened:
        lifetimes = Lifetimes((), (), opened)
        assert not any(lifetimes.take_ended().values())
        assert not lifetimes.have_ended


def captures_of(*numbers: int) -> dict[str, Entries]:
    """Return a window with captures of these numbers, and with an event at each of these stacks."""
    registers = [(name, "u8", (31,)) if name == "regs" else (name, "u8") for name in OF_THIS_MACHINE]
    capture = np.dtype([
        ("tgid", "u4"), ("registers", registers), ("stack", "u1", (8,)), ("bytes", "u4"),
        ("frames", "u8", (2,)), ("thread_pointer", "u8"),
    ])  # fmt: skip
    events = np.zeros(len(numbers), [("stacks", [("user", "u8"), ("kernel", "u8")])])
    events["stacks"]["user"] = numbers
    keys = np.array(numbers, np.uint64)
    return {"user_stacks": (keys, np.zeros(len(numbers), capture)), "events": (keys, events)}


def stacks_that_are_few(monkeypatch: pytest.MonkeyPatch, waiting: int, numbers: int) -> CallStacks:
    """Return stacks with room for so many captures that wait to be unwound, and for so many numbers."""
    monkeypatch.setattr(call_stacks, "MOST_CAPTURED", waiting)
    monkeypatch.setattr(call_stacks, "MOST_NUMBERS", numbers + len((NO_STACK, LOST_STACK)))
    stacks: Any = CallStacks()
    stacks.names = SimpleNamespace(read_mappings=lambda _: None, user_stack=lambda *_: ("main",))
    return cast("CallStacks", stacks)


def test_a_stack_that_came_too_early_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs send no stack twice unless they are told to."""
    deleted: list[int] = []
    kept = SimpleNamespace(delete=lambda keys: deleted.extend(keys.tolist()))
    windows = [captures_of(10, 11, 12), captures_of(12)]
    session: Any = Session.__new__(Session)
    session.stacks, session._has_stacks = stacks_that_are_few(monkeypatch, 2, 9), True
    session._pairs = SimpleNamespace(
        is_settled=True, drain=lambda: windows.pop(0).items(), flip=lambda: None, hashes={KEPT: kept}
    )
    events = session._drain()["events"][1]
    assert (deleted, session.stacks.lost) == ([12], 1)
    assert events["stacks"]["user"].tolist() == [10, 11, LOST_STACK]
    session.stacks.unwind(time.monotonic() + SECONDS)
    assert session._drain()["events"][1]["stacks"]["user"].tolist() == [12]
    assert (deleted, session.stacks.lost, session.stacks.user(12)) == ([12], 1, ("main",))


def test_a_stack_beyond_the_most_numbers_does_not_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    stacks = stacks_that_are_few(monkeypatch, 9, 2)
    assert stacks.add(captures_of(10, 11, 12)) == []
    assert stacks.lost == 1


def test_nothing_is_lost_before_the_trace_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attaching takes a while. Programs that are attached already may count losses meanwhile."""
    lost = {("kernel_holds", "return_missed"): 3}
    manifest = SimpleNamespace(maps=(), functions=(), chosen=(), hooks=())

    def begin(_: bool) -> None:
        lost["kernel_holds", "return_missed"] += 2

    pairs = SimpleNamespace(control=SimpleNamespace(set_tracing=begin), losses=None)
    monkeypatch.setattr(sessions, "run_loader", lambda _: (manifest, []))
    monkeypatch.setattr(sessions, "Pairs", lambda *_: pairs)
    monkeypatch.setattr(sessions, "Losses", lambda *_: SimpleNamespace(read=lambda: (dict(lost), {}, {}, 0)))
    with Session("test", options.load_settings(argparse.Namespace(), Trace())) as session:
        assert session.losses() == {"kernel_holds: return missed": 2}


class Terminal(io.TextIOWrapper):
    """A terminal that keeps what is written to it."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", write_through=True)

    def isatty(self) -> bool:
        return True

    @property
    def shown(self) -> list[str]:
        """The texts that were written, split where the line was cleared."""
        raw = self.buffer
        assert isinstance(raw, io.BytesIO)
        return raw.getvalue().decode().split("\r\x1b[K")[1:]


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Terminal]:
    """Return a session that has not begun, and the terminal on which it runs."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    session: Any = Session("test", options.load_settings(argparse.Namespace(), Trace()), duration=0.0)
    session.manifest = SimpleNamespace(functions=(), chosen=(), hooks=())
    return session, terminal


def test_the_progress_line_is_cleared_before_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    session, terminal = on_terminal(monkeypatch)
    control = SimpleNamespace(set_tracing=lambda _: None)
    session._pairs = SimpleNamespace(control=control, is_settled=True, drain=list, flip=lambda: None)
    session._losses = SimpleNamespace(read=lambda: ({}, {}, {}, 0))
    session._functions, session._attached, session._began = [], [], time.monotonic()
    assert list(session.windows()) == [{}, {}]
    print("result")
    assert terminal.shown == ["test: detaching", "result\n"]


def test_the_progress_line_is_cleared_before_what_could_not_be_attached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session, terminal = on_terminal(monkeypatch)
    session.manifest.hooks = (Hook("trace", "vfs_read", "kprobe", False, "no room"),)
    session.progress.show_text("test: attaching")
    session._report_missing_hooks()
    assert terminal.shown == ["test: attaching", "test: not attached: kprobe vfs_read: no room\n"]


def test_the_progress_line_is_cleared_before_what_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    session, terminal = on_terminal(monkeypatch)
    session.manifest.hooks = (Hook("trace", "vfs_read", "kprobe", True),)
    session.progress.announce("test: tracing")
    pattern_options.report_attached(session, Probes(parse("vfs_read"), (Place("vfs_read", "vfs_read"),)))
    assert terminal.shown == ["test: tracing", "test: tracing vfs_read; Ctrl-C ends\n"]


def test_the_progress_line_is_cleared_before_what_is_printed_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session, terminal = on_terminal(monkeypatch)
    with output.stream(None, session.progress.end) as write:
        for text in ("", "one\n", "two\n"):
            session.progress.show_text("progress")
            write(text)
    assert terminal.shown == ["progress", "progress", "one\n", "progress", "two\n"]
