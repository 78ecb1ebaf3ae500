"""The processes and threads that a trace is limited to, while they end one after another, and the progress
line on a terminal."""

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
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from lockd.errors import UsageError
from lockd.kernel.manifest import Hook
from lockd.load.child import OTHER_DESCRIPTORS, raise_descriptor_limit
from lockd.load.settings import Trace
from lockd.trace.core import options, output
from lockd.trace.core import session as sessions
from lockd.trace.core.session import TRACED_PROCESSES, TRACED_THREADS, Lifetimes, Session
from lockd.trace.probes import pattern_options
from lockd.trace.probes.patterns import Place, Probes, parse

SECONDS = 60.0
"""The longest time that a thread may take to end after it has been joined."""


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
