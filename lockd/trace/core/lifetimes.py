"""The processes and threads that a trace is about: whether they are there, and when all have ended."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Iterable

from lockd.errors import UsageError


class Lifetimes:
    """Opens descriptors that are closed with `opened`. Raises UsageError for an id of nothing."""

    def __init__(self, tgids: Iterable[int], tids: Iterable[int], opened: contextlib.ExitStack) -> None:
        self._processes = [_opened_process(tgid, opened) for tgid in tgids]
        self._started = {tid: _start_of_thread(tid) for tid in tids}

    @property
    def are_over(self) -> bool:
        """Whether all have ended; never, if there are none."""
        if not (self._processes or self._started):
            return False
        if any(_start_time(tid) == start for tid, start in self._started.items()):
            return False
        poll = select.poll()
        for fd in self._processes:
            poll.register(fd, select.POLLIN)
        return len(poll.poll(0)) == len(self._processes)


def _opened_process(tgid: int, opened: contextlib.ExitStack) -> int:
    """A descriptor that can be read from when the process has ended, closed with `opened`."""
    try:
        fd = os.pidfd_open(tgid)
    except OSError as error:
        if _start_time(tgid):
            raise UsageError(f"process {tgid}: it is a thread; rule: the id of a process") from error
        raise UsageError(f"process {tgid}: {error.strerror}") from error
    opened.callback(os.close, fd)
    return fd


def _start_of_thread(tid: int) -> str:
    start = _start_time(tid)
    if not start:
        raise UsageError(f"thread {tid}: No such thread")
    return start


def _start_time(tid: int) -> str:
    """When a thread began, which tells it from later ones of the same id; empty if it has ended."""
    try:
        with open(f"/proc/{tid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in (b"Z", b"X") else fields[19].decode()
