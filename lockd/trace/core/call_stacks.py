"""The call stacks of a trace, by the numbers that the BPF programs give them.

Stacks are collected when a window is drained. Their user sides are unwound later: in the time that the trace
leaves between two drains, and at its end.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from typing import Any

import numpy.typing as npt

from lockd.kernel.pairs import Entries
from lockd.names.stacks import FUNCTIONS, FrameFormat, StackNames
from lockd.names.unwind.capture import Capture, decode_captures
from lockd.views.profile import KernelFrame, Mark

PAIRS = ("kernel_stacks", "user_stacks")
"""The pairs of maps that contain new stacks (lockd/bpf/include/trace.bpf.h)."""
KEPT = "kept_stacks"
"""The map with the numbers of the stacks that the programs do not send again."""
NO_STACK, LOST_STACK = 0, 1
"""Two stack numbers of trace.bpf.h. NO_STACK: no stack was asked for, or the user side of a kernel thread.
LOST_STACK: there was no room for the stack."""
LOST = (Mark("[stack lost]"),)
"""The frames that stand for a stack that was lost."""

MOST_CAPTURED = 8192
"""The most captures that may wait to be unwound. Each takes up to 18 KiB of memory, and about 0.2 ms to be
unwound."""
MOST_NUMBERS = 1 << 18
"""The most numbers of kernel stacks that are remembered, and the most numbers of user stacks. Stacks with
further numbers are lost. Several numbers can stand for one stack."""

Names = tuple[str, ...]
"""The functions of a stack, innermost first."""


class CallStacks:
    """Stacks by their numbers. A stack has a user side (functions in user space) and a kernel side, each with
    a number of its own.

    Memory is bounded. If stacks come faster than they can be unwound, or if there are too many of them, some
    stacks are lost: they have the frames LOST, and `lost` counts them. A stack that a BPF program took too
    early can come again, and is then no longer lost.
    """

    def __init__(self, shown: FrameFormat = FUNCTIONS) -> None:
        self.names = StackNames(frame_format=shown)
        """Names of functions and of locks. One object serves both, as both read the same processes."""
        self._user: dict[int, Names] = {NO_STACK: (), LOST_STACK: LOST}
        self._kernel: dict[int, Names] = {NO_STACK: (), LOST_STACK: LOST}
        self._addresses: dict[int, tuple[int, ...]] = {}
        self._captured: dict[int, tuple[int, Capture]] = {}
        self._queue: deque[int] = deque()
        self._shared: dict[Any, Any] = {}
        """Addresses, names and tuples of names; each is key and value. Equal ones share one object, which
        saves memory."""
        self._kernel_frames: dict[str, KernelFrame] = {}
        self._small_numbers = itertools.count(LOST_STACK + 1)
        """Numbers for add_unwound() and add_sleeping(), from 2 on. The numbers that programs give are hashes
        of 64 bits, which are hardly ever so small."""
        self.lost = 0
        """How often this object had no room for a stack."""

    @property
    def backlog(self) -> int:
        """Number of captures that wait to be unwound."""
        return len(self._queue)

    def add(self, taken: dict[str, Entries]) -> list[int]:
        """Add the stacks of a window, and read the mappings of their processes, which may end at any time.

        Returns the numbers of user stacks for which there is no room now, but may be later. The caller has
        the programs forget that they have sent these (KEPT).

        `taken` has the drained entries by the name of their pair, those of PAIRS among them. In the entries
        of other pairs, members of type struct call_stack_ids with the number of a lost stack are changed to
        LOST_STACK.
        """
        share = self._shared.setdefault
        refused: list[int] = []
        if "kernel_stacks" in taken:
            numbers, stacks = taken["kernel_stacks"]
            for number, frames in zip(numbers.tolist(), stacks["frames"].tolist(), strict=True):
                if number in self._addresses:
                    continue
                if len(self._addresses) < MOST_NUMBERS:
                    self._addresses[number] = tuple(share(address, address) for address in frames if address)
                else:
                    self.lost += 1
        if "user_stacks" in taken:
            refused = self._capture(*taken["user_stacks"])
        if self.lost:
            for name, rows in taken.items():
                if name not in PAIRS:
                    for columns in rows:
                        self._mark_lost(columns)
        return refused

    def _capture(self, numbers: npt.NDArray[Any], rows: npt.NDArray[Any]) -> list[int]:
        """Add captures of user stacks. Returns the numbers of those that may be added later, as in add()."""
        fresh = [row for row, number in enumerate(numbers.tolist()) if not self._is_known(number)]
        captures = MOST_CAPTURED - len(self._captured)
        most = MOST_NUMBERS - len(self._user) - len(self._captured)
        room = max(0, min(captures, most))
        taken, refused = fresh[:room], fresh[room:]
        self.lost += len(refused)
        tgids = rows["tgid"][taken].tolist()
        self.names.read_mappings(set(tgids))
        for number, tgid, capture in zip(
            numbers[taken].tolist(), tgids, decode_captures(rows[taken]), strict=True
        ):
            self._captured[number] = tgid, capture
            self._queue.append(number)
        return numbers[refused].tolist() if captures < most else []  # there never is more room for numbers

    def _is_known(self, number: int) -> bool:
        return number in self._user or number in self._captured

    def _mark_lost(self, columns: npt.NDArray[Any]) -> None:
        """Change unknown numbers to LOST_STACK in every struct call_stack_ids that `columns` contain."""
        for name in columns.dtype.names or ():
            if columns.dtype[name].names == ("user", "kernel"):
                for side, is_known in (("user", self._is_known), ("kernel", self._is_kernel_known)):
                    numbers = columns[name][side]
                    for row, number in enumerate(numbers.tolist()):
                        if not is_known(number):
                            numbers[row] = LOST_STACK
            elif columns.dtype[name].names:
                self._mark_lost(columns[name])

    def _is_kernel_known(self, number: int) -> bool:
        return number in self._addresses or number in self._kernel

    def has(self, user: int, kernel: int) -> bool:
        """Whether both sides of a stack have been drained."""
        return self._is_known(user) and self._is_kernel_known(kernel)

    def add_unwound(self, tgid: int, capture: Capture) -> int:
        """Unwind a capture that lockd has read from procfs, so that no BPF program has given it a number.

        Returns a new number for the user side of the stack.
        """
        number = next(self._small_numbers)
        self._user[number] = self.names.user_stack(tgid, capture)
        return number

    def add_sleeping(self, tgid: int, user: Capture | None, kernel: Names) -> int:
        """Add both sides of a stack that was read from procfs; the user side is unwound later.

        Returns a new number, which stands for the user side and for the kernel side.
        """
        number = next(self._small_numbers)
        if user and len(self._captured) < MOST_CAPTURED:
            self.names.read_mappings({tgid})
            self._captured[number] = tgid, user
            self._queue.append(number)
        else:
            self._user[number] = LOST if user else ()
            self.lost += user is not None
        self._kernel[number] = kernel
        return number

    def unwind(self, until: float) -> None:
        """Unwind captures until none is left or time.monotonic() reaches `until`."""
        while self._queue and time.monotonic() < until:
            self.user(self._queue.popleft())

    def user(self, number: int) -> Names:
        """The functions in user space, innermost first; empty for NO_STACK, LOST if the stack was lost."""
        if number not in self._user and number in self._captured:
            functions = self.names.user_stack(*self._captured.pop(number))
            names = tuple(self._shared.setdefault(name, name) for name in functions)
            self._user[number] = self._shared.setdefault(names, names)
        return self._user.get(number, LOST)

    def kernel(self, number: int) -> Names:
        """The functions in the kernel as KernelFrame, innermost first; LOST if the stack was lost."""
        if number not in self._kernel and number in self._addresses:
            functions = self.names.kernel_stack(self._addresses[number])
            names = tuple(self._kernel_frames.setdefault(name, KernelFrame(name)) for name in functions)
            self._kernel[number] = names
        return self._kernel.get(number, LOST)

    def kernel_addresses(self, number: int) -> tuple[int, ...]:
        """The return addresses in the kernel, innermost first; empty if they are not known."""
        return self._addresses.get(number, ())
