"""The processes and threads that a trace is limited to, while they end one after another."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from lockd.trace.core import session as sessions
from lockd.trace.core.session import TRACED_PROCESSES, TRACED_THREADS, Lifetimes, Session

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


def test_a_trace_of_all_processes_does_not_end_with_any() -> None:
    with contextlib.ExitStack() as opened:
        lifetimes = Lifetimes((), (), opened)
        assert not any(lifetimes.take_ended().values())
        assert not lifetimes.have_ended
