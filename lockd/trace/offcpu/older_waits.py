"""Waits that began before the trace: entered into the programs' table of threads as if they began with it.

From then on the programs see who ends them, and when. Of a thread that has been blocked since before, they
know no stacks: those are procfs's.
"""

from __future__ import annotations

import numpy as np

from lockd.trace.core.blocked_threads import RUNNING, BlockedThread, blocked_thread, moment_of, threads_of
from lockd.trace.core.session import Session
from lockd.views.profile import KernelFrame

TASK_STATES = {"S": 0x1, "D": 0x2, "T": 0x4, "t": 0x8, "P": 0x40, "I": 0x402}
"""Bits of the kernel's by the letters of proc(5)."""
STATES = {"S": "interruptible", "D": "uninterruptible"}


class OlderWaits:
    """`state_mask` as the option --state; None for all."""

    def __init__(self, session: Session, state_mask: int | None) -> None:
        self._session = session
        self._stacks = session.stacks
        self._state_mask = state_mask
        self._used: set[int] = set()

    def has_stack(self, number: int) -> bool:
        """Whether the stack of this number is of a wait that began before the trace."""
        return number in self._used

    def enter(self, pids: tuple[int, ...], tids: tuple[int, ...]) -> None:
        """Those of the threads asked for. A thread that runs meanwhile is left to the programs."""
        for tid in threads_of(pids, tids):
            thread = blocked_thread(tid)
            if thread and self._is_wanted(thread) and self._put(thread):
                now = moment_of(tid)
                # It ran before it was entered, and runs still: the programs would take it for blocked.
                if now and now != thread.moment and now.state == RUNNING and self._is_mine(tid):
                    self._session.map("threads").delete(np.array([tid], np.uint32))

    def _is_mine(self, tid: int) -> bool:
        entry = self._session.map("threads").lookup(np.array([tid], np.uint32))
        return bool(entry["off_since"] == self._session.began_ns)

    def _is_wanted(self, thread: BlockedThread) -> bool:
        bits = TASK_STATES.get(thread.moment.state, 0)
        return self._state_mask is None or bool(bits & self._state_mask)

    def _put(self, thread: BlockedThread) -> bool:
        """False if the programs know it already."""
        table, manifest = self._session.map("threads"), self._session.manifest
        kernel = tuple(map(KernelFrame, thread.kernel))
        number = self._stacks.put(thread.tgid, thread.capture, kernel)
        self._used.add(number)
        entry = np.zeros(1, table.value)
        entry["off_since"] = self._session.began_ns
        entry["tgid"] = thread.tgid
        entry["nr"] = manifest.constants["NR_KERNEL"] if thread.is_kernel_thread else thread.nr
        entry["state"] = manifest.enums["state"].index(STATES.get(thread.moment.state, "other"))
        if thread.detail:
            enum, member = thread.detail
            entry["detail"] = manifest.enums[enum].index(member)
        entry["comm"] = thread.comm
        entry["stacks"]["user"] = entry["stacks"]["kernel"] = number
        return table.insert(np.array([thread.tid], np.uint32), entry)
