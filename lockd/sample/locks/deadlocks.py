"""Deadlocks: rings of threads, each blocked on a lock that the next of them holds."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lockd.names.labels.processes import Name
from lockd.names.protocol import OwnedLock, Owners, OwnersAnswer
from lockd.process.clock import NS
from lockd.sample.aggregates.identities import code_of
from lockd.sample.locks.waits import Lock, Wait, Waits, rings
from lockd.sample.series.block import Block
from lockd.sample.series.series import OTHER

log = logging.getLogger(__name__)

LASTING_NS = NS
"""A ring is a deadlock when its youngest wait has lasted so long; locks that time out may end it before."""
TOLD_NS = 1_750_000_000
"""After so long it is logged, whether or not its locks have names by then."""
ASKED_NS = 10_000_000
"""The owners are asked of locks that have been waited for so long."""
MOST_ASKED = 500
"""Locks asked about in one look."""
MOST_NAMES = 100
"""Processes with a count of their deadlocks; those of all others count together."""
SHOWN_THREADS = 32
"""Of one deadlock, in the log and in the table."""
REFUSED_NS = 3 * NS
"""A refused thread's wait began at most so long before its refusal was counted."""
MOST_REFUSED = 1000
LOST_NS = 120 * NS
"""An answer that has not come by then will not."""
SOON_NS = 500_000_000
"""A look between those of every second comes so long after the last one at the earliest."""
NEVER = 1 << 62
MESSAGE_ID = "6a1c0f3f4b6e4d0e9f0b7c9a52d1e8b4"
"""Of the journal's entry for a deadlock: `journalctl MESSAGE_ID=...` lists them."""


class About(NamedTuple):
    """What a wait's lock is called, and where in the code it is waited for."""

    lock: str
    """Empty if it has no name yet."""
    site: str
    stack: tuple[str, ...]


@dataclass
class Deadlock:
    """One ring. Its first thread is the one that has waited longest."""

    threads: tuple[Wait, ...]
    """Each waits for a lock that the next one holds, the last one for one that the first holds."""
    process: Name
    """Of the first thread."""
    is_wanted: bool
    locks: set[Lock] = field(default_factory=set)
    """All that cannot be got because of it: those of the ring, and those held by who waits for them."""
    waiting: int = 0
    """Threads outside of the ring that wait for one of these."""
    is_reported: bool = False
    is_logged: bool = False

    @property
    def formed(self) -> int:
        """When the last of them began to wait."""
        return max(wait.since for wait in self.threads)

    @property
    def id(self) -> str:
        """The same as long as it exists, and no other's."""
        return f"{code_of(tuple(sorted(f'{wait.tid} {wait.since}' for wait in self.threads))):016x}"


@dataclass(frozen=True)
class _Asked:
    """What was asked, and the waits as they were before it."""

    token: int
    clock: int
    waits: Waits
    locks: tuple[Lock, ...]
    of_kernel: dict[Lock, int]
    """Already known."""


class Deadlocks:
    """The deadlocks that exist. Give it the waits once a second and at `look_at`, and the answers.

    Why none of them is false: a ring counts if each of its threads was in the same call before the owners
    were read and is in it after that. A thread that is blocked in a call lets go of no lock, so what it held
    when that was read it held all the time. Hence there was a moment at which all of them held what they
    were waited for, and only they themselves could change that. Those can whose calls time out: a ring
    with such a one is reported if it has lasted a second.

    The only locks that are given to a thread while it is still in its call are those of the kernel and
    PI futexes; such a thread seems to wait for itself, and is left out.
    """

    def __init__(
        self,
        ask: Callable[[Owners], bool],
        kernel_owner: Callable[[int, int], int],
        about: Callable[[Wait], About],
        process: Callable[[int], tuple[Name, bool]],
        thread_comm: Callable[[int, int], str],
    ) -> None:
        """`ask` passes a question on, to be answered by answered(), and says whether it did.
        `kernel_owner(address, waiter)` tells a tid, 0 if it is not known; `process(tgid)` its name, and
        whether it is wanted.
        """
        self._ask_namer, self._kernel_owner, self._about = ask, kernel_owner, about
        self._process, self._thread_comm = process, thread_comm
        self._asked: _Asked | None = None
        self._asked_last: set[Lock] = set()
        self._refused: dict[int, tuple[int, int]] = {}
        self._suspected: list[tuple[tuple[Wait, ...], set[Lock]]] = []
        self._known: dict[frozenset[tuple[int, int]], Deadlock] = {}
        self._found: Counter[Name] = Counter()
        self._token = self._skipped = self._looked = 0
        self._is_wanted_soon = False
        self._reported_before: set[frozenset[tuple[int, int]]] = set()
        """By another sampler."""
        self.holders: dict[Lock, int] = {}
        """The threads that held the contended locks when that was last asked; a thread of 0 is not known."""

    @property
    def now(self) -> list[Deadlock]:
        """Those that have lasted, the oldest first."""
        return sorted((one for one in self._known.values() if one.is_reported), key=lambda one: one.formed)

    @property
    def look_at(self) -> int:
        """When the next look is wanted (monotonic clock in ns) if the one of every second comes later."""
        if self._suspected:
            return 0
        known = (one for one in self._known.values() if one.is_wanted and not one.is_logged)
        due = [one.formed + (TOLD_NS if one.is_reported else LASTING_NS) for one in known]
        soon = self._looked + SOON_NS if self._is_wanted_soon else NEVER
        return min([*due, soon])

    def look_soon(self) -> None:
        """What looked like waits for something else has turned out to be waits for a lock."""
        self._is_wanted_soon = True

    def refused(self, tids: Sequence[int], addresses: Sequence[int], clock: int) -> None:
        """The kernel has refused a PI lock to these threads, as getting it would be a deadlock (EDEADLK).

        libcs then have the thread wait for ever, for a word on its own stack.
        """
        for tid, address in zip(tids, addresses, strict=True):
            self._refused.pop(tid, None)
            self._refused[tid] = address, clock
        while len(self._refused) > MOST_REFUSED:
            del self._refused[next(iter(self._refused))]

    def look(self, waits: Waits, clock: int) -> None:
        """Note the waits for locks at this moment (monotonic clock in ns), and ask who holds these.

        They must have been read after the last call of answered().
        """
        self._looked, self._is_wanted_soon = clock, False
        for tid, (address, at) in self._refused.items():
            waits.redirect(tid, address, at - REFUSED_NS, at)
        self._confirm(waits)
        for one in self._known.values():
            one.waiting = max(0, waits.count(one.locks) - len(one.threads)) if one.is_wanted else 0
        self._report(clock)
        if self._asked is None or clock - self._asked.clock > LOST_NS:
            self._ask(waits, clock)

    def answered(self, answer: OwnersAnswer) -> None:
        """Take the owners that were asked for."""
        asked = self._asked
        if asked is None or asked.token != answer.token:
            return
        self._asked = None
        self.holders = dict(zip(asked.locks, answer.tids, strict=True)) | asked.of_kernel
        self._suspected = rings(asked.waits, self.holders)

    def _ask(self, waits: Waits, clock: int) -> None:
        locks, left_out = waits.locks(clock - ASKED_NS, MOST_ASKED, self._asked_last)
        self._skipped += left_out
        self._asked_last = {wait.lock for wait in locks}
        if not locks:
            self.holders = {}
            return
        of_kernel = {w.lock: self._kernel_owner(w.address, w.tid) for w in locks if w.in_kernel}
        of_user = [wait for wait in locks if not wait.in_kernel]
        self._token += 1
        asked = _Asked(self._token, clock, waits, tuple(wait.lock for wait in of_user), of_kernel)
        question = Owners(self._token, tuple(OwnedLock(w.tgid, w.address, w.kind, w.family) for w in of_user))
        if not of_user or self._ask_namer(question):
            self._asked = asked
        if not of_user:
            self.answered(OwnersAnswer(self._token, ()))

    def _confirm(self, waits: Waits) -> None:
        """Forget the rings of which a thread has gone on; keep the suspected ones of which none has."""
        self._known = {key: one for key, one in self._known.items() if waits.has(one.threads)}
        for ring, locks in self._suspected:
            if not waits.has(ring):
                continue
            key = frozenset((wait.tid, wait.since) for wait in ring)
            if key not in self._known:
                processes = [self._process(wait.tgid) for wait in ring]
                wanted = any(wants for _, wants in processes)
                told = key in self._reported_before
                self._known[key] = Deadlock(ring, processes[0][0], wanted, is_reported=told, is_logged=told)
            self._known[key].locks = locks
        self._suspected = []

    def _report(self, clock: int) -> None:
        for one in self._known.values():
            lasted = clock - one.formed
            if not one.is_wanted or lasted < LASTING_NS:
                continue
            if not one.is_reported:
                one.is_reported = True
                known = one.process in self._found or len(self._found) < MOST_NAMES
                self._found[one.process if known else (OTHER, OTHER)] += 1
            if not one.is_logged:
                about = [self._about(wait) for wait in one.threads[:SHOWN_THREADS]]
                if lasted >= TOLD_NS or all(each.lock for each in about):
                    one.is_logged = True
                    self._log(one, lasted)

    def _log(self, one: Deadlock, lasted: int) -> None:
        unit, comm = one.process
        words = [
            f"{row['thread_comm']}[{row['tid']}] waits for {row['lock'] or row['address']}"
            + (f" in {row['site']}" if row["site"] else "")
            for row in self._thread_rows(one)
        ]
        left_out = len(one.threads) - len(words)
        log.error(
            "deadlock in %s%s for %.1f s: %s%s%s",
            comm or "?",
            f" ({unit})" if unit else "",
            lasted / NS,
            ", held by ".join(words),
            f", and so on ({left_out} more)" if left_out else f", held by {words[0].partition(' ')[0]}",
            f"; {one.waiting} more threads wait for these" if one.waiting else "",
            extra={
                "MESSAGE_ID": MESSAGE_ID,
                "LOCKD_DEADLOCK": one.id,
                "LOCKD_UNIT": unit,
                "LOCKD_COMM": comm,
                "LOCKD_TIDS": " ".join(str(wait.tid) for wait in one.threads),
            },
        )

    def _thread_rows(self, one: Deadlock) -> list[dict[str, Any]]:
        holders = [wait.tid for wait in (*one.threads[1:], one.threads[0])]
        return [
            {
                "tid": wait.tid,
                "tgid": wait.tgid,
                "thread_comm": self._thread_comm(wait.tgid, wait.tid),
                "kind": wait.kind,
                "address": f"{wait.address:#x}",
                **self._about(wait)._asdict(),
                "holder_tid": holder,
            }
            for wait, holder in list(zip(one.threads, holders, strict=True))[:SHOWN_THREADS]
        ]

    def save(self) -> dict[str, Any]:
        """What was found, for restore()."""
        rings = [[(wait.tid, wait.since) for wait in one.threads] for one in self.now]
        return {"found": list(self._found.items()), "skipped": self._skipped, "reported": rings}

    def restore(self, head: dict[str, Any]) -> None:
        """Go on with what another one has found: it is found again, and not reported."""
        self._found = Counter({(unit, comm): count for (unit, comm), count in head["found"]})
        self._skipped = head["skipped"]
        self._reported_before = {frozenset((tid, since) for tid, since in ring) for ring in head["reported"]}

    def export(self, block: Block) -> None:
        """Write the metrics."""
        existing = Counter(one.process for one in self.now)
        block.add("lockd_deadlocks", list(existing), list(existing.values()))
        block.add("lockd_deadlocks_found_total", list(self._found), list(self._found.values()))
        block.add("lockd_deadlock_locks_skipped_total", [()], [self._skipped])

    def add_to(
        self, tables: dict[str, Any], arrays: dict[str, npt.NDArray[Any]], clock: int, wall: float
    ) -> None:
        """Add the table behind /api/v1/deadlocks; `clock` and `wall` are the same moment."""
        shown = self.now
        age_ns = np.array([clock - one.formed for one in shown], np.int64)
        arrays["deadlocks.since"] = wall - age_ns / NS
        arrays["deadlocks.lasted_us"] = age_ns / 1000.0
        arrays["deadlocks.threads_in_ring"] = np.array([len(one.threads) for one in shown], np.int64)
        arrays["deadlocks.waiting"] = np.array([one.waiting for one in shown], np.int64)
        tables["deadlocks"] = {
            "text": {
                "id": [one.id for one in shown],
                "unit": [one.process[0] for one in shown],
                "comm": [one.process[1] for one in shown],
            },
            "numbers": ["since", "lasted_us", "threads_in_ring", "waiting"],
            "lists": {"threads": [self._thread_rows(one) for one in shown]},
        }
