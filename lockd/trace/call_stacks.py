"""The stacks of a trace by their numbers: collected as they come, unwound and named while there is time."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path

from lockd.names.capture import Capture
from lockd.names.stacks import StackNames
from lockd.profile import KernelFrame, Mark
from lockd.sample.captured import captures_of
from lockd.sample.pairs import Rows

PAIRS = ("kernel_stacks", "user_stacks")
"""Handed over by the loader: see lockd/bpf/trace.bpf.h."""
LOST = (Mark("[stack lost]"),)
"""There was no room for it."""

Names = tuple[str, ...]
"""Functions, innermost first."""


class CallStacks:
    """`stack_number` of the constants in lockd/bpf/trace.bpf.h stands for no stack, or a lost one."""

    def __init__(self, procfs: Path = Path("/proc")) -> None:
        self._names = StackNames(procfs)
        self._user: dict[int, Names] = {0: (), 1: LOST}
        self._kernel: dict[int, Names] = {0: (), 1: LOST}
        self._addresses: dict[int, tuple[int, ...]] = {}
        self._captured: dict[int, tuple[int, Capture]] = {}
        self._queue: deque[int] = deque()

    def add(self, taken: dict[str, Rows]) -> None:
        """Take what was drained; the processes are looked at now, as they may end at any time."""
        if "kernel_stacks" in taken:
            numbers, stacks = taken["kernel_stacks"]
            for number, frames in zip(numbers.tolist(), stacks["frames"].tolist(), strict=True):
                self._addresses.setdefault(number, tuple(address for address in frames if address))
        if "user_stacks" in taken:
            numbers, rows = taken["user_stacks"]
            tgids = rows["tgid"].tolist()
            self._names.look(set(tgids))
            for number, tgid, capture in zip(numbers.tolist(), tgids, captures_of(rows), strict=True):
                if number not in self._user and number not in self._captured:
                    self._captured[number] = tgid, capture
                    self._queue.append(number)

    def work(self, until: float) -> None:
        """Unwind what waits for it, until that time of time.monotonic()."""
        while self._queue and time.monotonic() < until:
            self.user(self._queue.popleft())

    def user(self, number: int) -> Names:
        """Of the user side; empty of a kernel thread's."""
        if number not in self._user:
            tgid, capture = self._captured.pop(number, (0, None))
            self._user[number] = self._names.user(tgid, capture) if capture else LOST
        return self._user[number]

    def kernel(self, number: int) -> Names:
        """Of the kernel's side; each a KernelFrame."""
        if number not in self._kernel:
            addresses = self._addresses.get(number)
            self._kernel[number] = (
                tuple(map(KernelFrame, self._names.kernel(addresses))) if addresses is not None else LOST
            )
        return self._kernel[number]
