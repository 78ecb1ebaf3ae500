"""The stacks of a trace by their numbers: collected as they come, unwound and named while there is time."""

from __future__ import annotations

import itertools
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy.typing as npt

from lockd.kernel.pairs import Entries
from lockd.names.stacks import FUNCTIONS, FrameFormat, StackNames
from lockd.names.unwind.capture import Capture, captures_of
from lockd.views.profile import KernelFrame, Mark

PAIRS = ("kernel_stacks", "user_stacks")
"""The pairs of maps that the loader hands over for stacks (lockd/bpf/include/trace.bpf.h)."""
NO_STACK, LOST_STACK = 0, 1
"""Two stack numbers of trace.bpf.h: no stack was asked for, and there was no room for the stack."""
LOST = (Mark("[stack lost]"),)

MOST_CAPTURED = 8192
"""Stacks of user space that wait to be unwound: up to 17 KiB each, 0.2 ms of work."""
MOST_NUMBERS = 1 << 18
"""Numbers of stacks that are known, of the kernel and of user space each; further ones are lost. There can
be several numbers of one stack."""

Names = tuple[str, ...]
"""Functions, innermost first."""


class CallStacks:
    """What is kept is bounded: of stacks that come faster than they can be unwound, or are too many, only
    their number is (`lost`), and they are all named LOST.
    """

    def __init__(
        self, procfs: Path = Path("/proc"), most_numbers: int = MOST_NUMBERS, shown: FrameFormat = FUNCTIONS
    ) -> None:
        self.names = StackNames(procfs, shown)
        """Of functions, and of locks: what is known of processes serves both."""
        self._most = most_numbers
        self._user: dict[int, Names] = {NO_STACK: (), LOST_STACK: LOST}
        self._kernel: dict[int, Names] = {NO_STACK: (), LOST_STACK: LOST}
        self._addresses: dict[int, tuple[int, ...]] = {}
        self._captured: dict[int, tuple[int, Capture]] = {}
        self._queue: deque[int] = deque()
        self._shared: dict[Any, Any] = {}
        """Addresses, names and stacks of names: one object for all that are equal."""
        self._kernel_frames: dict[str, KernelFrame] = {}
        self._small_numbers = itertools.count(LOST_STACK + 1)
        self.lost = 0

    @property
    def waiting(self) -> int:
        """Stacks that are to be unwound."""
        return len(self._queue)

    def add(self, taken: dict[str, Entries]) -> None:
        """Take what was drained; the processes are looked at now, as they may end at any time.

        The numbers of stacks there is no room for are changed to LOST_STACK in the other tables of `taken`.
        """
        share = self._shared.setdefault
        if "kernel_stacks" in taken:
            numbers, stacks = taken["kernel_stacks"]
            for number, frames in zip(numbers.tolist(), stacks["frames"].tolist(), strict=True):
                if number in self._addresses:
                    continue
                if len(self._addresses) < self._most:
                    self._addresses[number] = tuple(share(address, address) for address in frames if address)
                else:
                    self.lost += 1
        if "user_stacks" in taken:
            self._capture(*taken["user_stacks"])
        if self.lost:
            for name, rows in taken.items():
                if name not in PAIRS:
                    for columns in rows:
                        self._forget_lost(columns)

    def _capture(self, numbers: npt.NDArray[Any], rows: npt.NDArray[Any]) -> None:
        fresh = [at for at, number in enumerate(numbers.tolist()) if not self._is_known(number)]
        room = min(MOST_CAPTURED - len(self._captured), self._most - len(self._user) - len(self._captured))
        taken = fresh[: max(0, room)]
        self.lost += len(fresh) - len(taken)
        tgids = rows["tgid"][taken].tolist()
        self.names.read_mappings(set(tgids))
        for number, tgid, capture in zip(
            numbers[taken].tolist(), tgids, captures_of(rows[taken]), strict=True
        ):
            self._captured[number] = tgid, capture
            self._queue.append(number)

    def _is_known(self, number: int) -> bool:
        return number in self._user or number in self._captured

    def _forget_lost(self, columns: npt.NDArray[Any]) -> None:
        """In columns of struct call_stack_ids, wherever they are in the rows."""
        for name in columns.dtype.names or ():
            if columns.dtype[name].names == ("user", "kernel"):
                for side, is_known in (("user", self._is_known), ("kernel", self._is_kernel_known)):
                    numbers = columns[name][side]
                    for at, number in enumerate(numbers.tolist()):
                        if not is_known(number):
                            numbers[at] = LOST_STACK
            elif columns.dtype[name].names:
                self._forget_lost(columns[name])

    def _is_kernel_known(self, number: int) -> bool:
        return number in self._addresses or number in self._kernel

    def has(self, user: int, kernel: int) -> bool:
        """Whether these two were taken already."""
        return self._is_known(user) and self._is_kernel_known(kernel)

    def unwound(self, tgid: int, capture: Capture) -> int:
        """The number of a stack that no program has taken: too small to be one of theirs."""
        number = next(self._small_numbers)
        self._user[number] = self.names.user_stack(tgid, capture)
        return number

    def put(self, tgid: int, user: Capture | None, kernel: Names) -> int:
        """The same of both sides of a stack; it is unwound with the others."""
        number = next(self._small_numbers)
        if user and len(self._captured) < MOST_CAPTURED:
            self.names.read_mappings({tgid})
            self._captured[number] = tgid, user
            self._queue.append(number)
        else:
            self._user[number] = LOST if user else ()
        self._kernel[number] = kernel
        return number

    def work(self, until: float) -> None:
        """Unwind what waits for it, until that time of time.monotonic()."""
        while self._queue and time.monotonic() < until:
            self.user(self._queue.popleft())

    def user(self, number: int) -> Names:
        """Of the user side; empty of a kernel thread's."""
        if number not in self._user and number in self._captured:
            found = self.names.user_stack(*self._captured.pop(number))
            names = tuple(self._shared.setdefault(name, name) for name in found)
            self._user[number] = self._shared.setdefault(names, names)
        return self._user.get(number, LOST)

    def kernel(self, number: int) -> Names:
        """Of the kernel's side; each a KernelFrame."""
        if number not in self._kernel and number in self._addresses:
            found = self.names.kernel_stack(self._addresses[number])
            names = tuple(self._kernel_frames.setdefault(name, KernelFrame(name)) for name in found)
            self._kernel[number] = names
        return self._kernel.get(number, LOST)

    def kernel_addresses(self, number: int) -> tuple[int, ...]:
        """The same as return addresses; empty if there was no room for it."""
        return self._addresses.get(number, ())
