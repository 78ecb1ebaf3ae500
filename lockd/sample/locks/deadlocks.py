"""Deadlocks: rings of threads, each blocked on a lock that the next thread of the ring holds."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lockd.messages import digest
from lockd.names.labels.processes import Name
from lockd.names.protocol import NOT_READ, OwnedLock, Owners, OwnersAnswer
from lockd.process.clock import NS, suspended_ns
from lockd.sample.locks.waits import Lock, LockDescription, Wait, Waits, find_rings
from lockd.sample.series.block import Block
from lockd.sample.series.series import OTHER

log = logging.getLogger(__name__)

LASTING_NS = NS
"""Nanoseconds for which a ring must last to be reported. Calls that time out may end it before that."""
LOGGED_NS = 1_750_000_000
"""Nanoseconds after which a deadlock is logged whether or not its locks have names."""
ASKED_AFTER_NS = 10_000_000
"""Nanoseconds for which a thread must wait for a lock before its holder is asked for."""
MOST_ASKED = 500
"""Most locks whose holders are asked for at a time."""
MOST_NAMES = 100
"""Most pairs (unit, comm) with a count of deadlocks of their own; the rest count as `other`."""
MOST_SHOWN = 200
"""Most deadlocks in the table behind /api/v1/deadlocks. The oldest are shown, so that a shown deadlock stays
while others come and go."""
MOST_LOGGED = 20
"""Most deadlocks that are logged in LOG_PERIOD_NS. After this time one line says how many were left out."""
LOG_PERIOD_NS = 60 * NS
SHOWN_THREADS = 32
"""Most threads of one deadlock that are shown, in the log and in the table."""
REFUSED_NS = 3 * NS
"""The wait of a thread that was refused a lock (see note_refused()) began at most so many nanoseconds before
the refusal was counted."""
MOST_REFUSED = 1000
"""Most threads that are remembered because they were refused a lock (see note_refused())."""
ID_BYTES = 8
"""Bytes of the identifier of a deadlock."""
LOST_NS = 120 * NS
"""Nanoseconds after which a question about holders that has no answer is taken to be lost."""
SOON_NS = 500_000_000
"""Nanoseconds from one check to the next if check_soon() was called; else there is one check in a second."""
NEVER = 1 << 62
"""A time in the far future (monotonic clock in ns)."""
MOST_SAVED = 1000
"""Most reported deadlocks that are saved. All that exist now are saved, even if they are more; the rest is
for those that only earlier samplers have seen."""
MESSAGE_ID = "6a1c0f3f4b6e4d0e9f0b7c9a52d1e8b4"
"""Message id of a deadlock in the journal: `journalctl MESSAGE_ID=...` lists them."""


def _formed(ring: Sequence[Wait]) -> int:
    """When the last thread of a ring began to wait (monotonic clock in ns)."""
    return max(wait.since for wait in ring)


@dataclass
class Deadlock:
    """One ring of threads."""

    threads: tuple[Wait, ...]
    """The waits in the order of the ring, from the oldest on. The lock of each is held by the thread of the
    next wait, and the lock of the last one by the thread of the first."""
    process: Name
    """(unit, comm) of the first thread."""
    is_wanted: bool = False
    """Whether the filter wants at least one process of the ring."""
    locks: set[Lock] = field(default_factory=set)
    """The locks that no thread can get: those of the ring, and those held by threads that wait for them."""
    waiting: int = 0
    """The number of threads outside of the ring that wait for one of `locks`."""
    is_reported: bool = False
    is_logged: bool = False
    """Whether it was logged, or left out because there were too many."""
    suspended_ns: int = field(default_factory=suspended_ns)
    """Nanoseconds for which the host had been suspended since its boot when the deadlock was first found, be
    it by an earlier sampler."""

    @property
    def formed(self) -> int:
        """When the last thread of the ring began to wait (monotonic clock in ns)."""
        return _formed(self.threads)

    @property
    def id(self) -> str:
        """An identifier that no other deadlock has, and that lasts as long as the deadlock.

        It is the same after a restart of lockd.
        """
        waits = sorted(f"{wait.tid} {wait.since}" for wait in self.threads)
        return digest("\0".join(waits).encode())[:ID_BYTES].hex()


class _Held(NamedTuple):
    """What was read of a lock that threads wait for."""

    holder: int
    """The thread that held the lock; 0 if it is not known."""
    wait: Wait | None
    """The wait in which the holder was when its lock was asked about; None if it did not wait then."""


@dataclass(frozen=True)
class _Question:
    """A question about holders that was asked, and the waits that were read before it was asked."""

    token: int
    clock: int
    waits: Waits
    locks: tuple[Lock, ...]
    left_out: Sequence[Lock]
    """Locks that threads waited for as well, but that the question leaves out."""
    kernel_holders: dict[Lock, int]
    """For each kernel lock, the thread that held it, found without the namer; 0 if it is not known."""

    def covers(self, waits: Waits) -> bool:
        """Whether the answer to this question tells of all rings among these later waits.

        A ring is complete when its last thread begins to wait. Before that, its other threads were blocked
        already and held what they hold.
        """
        return not self.left_out and self.waits.has_all_of(waits, self.clock - ASKED_AFTER_NS)


class Deadlocks:
    """The deadlocks that exist. It gets the waits every second and at `next_check`, and the namer's answers.

    No deadlock is false, and this is why: a ring counts if each of its threads was in the same call before
    the holders were read and is in it after that. A thread that is blocked in a call releases no lock. So it
    held all the time what it held when the holders were read. Hence there was a moment at which every thread
    of the ring held what another waited for, and only they themselves could change that. Threads whose calls
    time out can change it; a ring with such a call is reported if it has lasted a second.

    This does not depend on how long ago a holder was read. Where there are too many locks for one question,
    the answers to several are put together. An older answer counts while the holder is in the call in which
    it was when that question was asked.

    A thread can be given a lock while it is still in its call only if the lock is one of the kernel or a PI
    futex. Such a thread seems to wait for itself, and is left out.
    """

    def __init__(
        self,
        ask: Callable[[Owners, bool], bool],
        kernel_holder: Callable[[int, int], int],
        describe_lock: Callable[[Wait], LockDescription],
        identify: Callable[[int, int], tuple[Name, bool]],
        thread_comm: Callable[[int, int], str],
    ) -> None:
        """`ask(question, is_needed)` passes a question to the namer, with whether the answer is needed, and
        returns whether it did so. take_holders() gets the answer.

        `kernel_holder(address, waiter)` returns the thread id of the holder of a kernel lock, 0 if it is not
        known. `identify` is like Identities.identify_process().
        """
        self._ask_namer, self._kernel_holder = ask, kernel_holder
        self._describe_lock, self._identify, self._thread_comm = describe_lock, identify, thread_comm
        self._question: _Question | None = None
        self._asked_at: dict[Lock, int] = {}
        """When each lock that is waited for was last asked about (monotonic clock in ns)."""
        self._answered: _Question | None = None
        """The last question of which each lock was read."""
        self._refused: dict[int, tuple[int, int]] = {}
        """Address of the lock and time (monotonic clock in ns) of the last refusal, by thread id."""
        self._suspected: list[tuple[tuple[Wait, ...], set[Lock]]] = []
        self._known: dict[frozenset[tuple[int, int]], Deadlock] = {}
        """Deadlocks by a set of pairs, one for each thread: its id, and when its call began (monotonic clock
        in ns)."""
        self._counts: Counter[Name] = Counter()
        """How many deadlocks were reported, by the (unit, comm) of the process."""
        self._token = self._skipped = self._checked = 0
        self.has_waits = False
        """Whether threads waited for locks at the last call of check_waits()."""
        self._is_wanted_soon = False
        self._logged = self._left_out = 0
        """How many deadlocks were logged in the current LOG_PERIOD_NS, and how many were left out."""
        self._log_period_ends = 0
        """When the current LOG_PERIOD_NS ends (monotonic clock in ns)."""
        self._next_report = NEVER
        """When a known deadlock is to be reported or logged (monotonic clock in ns)."""
        self._reported_before: dict[frozenset[tuple[int, int]], int] = {}
        """`suspended_ns` of each deadlock that earlier samplers reported, by key of `_known`. Those that the
        last of them still knew come first."""
        self._held: dict[Lock, _Held] = {}
        """What was last read of each lock that is waited for."""

    @property
    def holders(self) -> dict[Lock, int]:
        """For each lock that is waited for, the thread that held it when its holder was last read; 0 if the
        thread is not known."""
        return {lock: held.holder for lock, held in self._held.items()}

    @property
    def reported(self) -> list[Deadlock]:
        """The deadlocks that have lasted for LASTING_NS and that the filter wants, oldest first."""
        reported = [one for one in self._known.values() if one.is_reported and one.is_wanted]
        return sorted(reported, key=lambda deadlock: deadlock.formed)

    @property
    def next_check(self) -> int:
        """From when on check_waits() is due (monotonic clock in ns), besides its call in every second."""
        if self._suspected:
            return 0
        return min(self._next_report, self._checked + SOON_NS if self._is_wanted_soon else NEVER)

    def check_soon(self) -> None:
        """Have the waits checked soon, because some of them have turned out to be waits for locks."""
        self._is_wanted_soon = True

    def note_refused(self, tids: Sequence[int], addresses: Sequence[int], clock: int) -> None:
        """Note that the kernel refused PI locks to threads, as they would be deadlocks (EDEADLK).

        libcs then have the thread wait for ever, for a word on its own stack. `clock` is the monotonic clock
        in ns.
        """
        for tid, address in zip(tids, addresses, strict=True):
            self._refused.pop(tid, None)
            self._refused[tid] = address, clock
        while len(self._refused) > MOST_REFUSED:
            del self._refused[next(iter(self._refused))]

    def check_waits(self, waits: Waits, clock: int) -> None:
        """Note the waits at the time `clock` (monotonic, in ns), report deadlocks, and ask for holders.

        The waits must have been read after the last call of take_holders().
        """
        self._checked, self._is_wanted_soon = clock, False
        self.has_waits = len(waits) > 0
        for tid, (address, refused_at) in self._refused.items():
            waits.redirect(tid, address, refused_at - REFUSED_NS, refused_at)
        self._confirm(waits)
        waiters = waits.count_waiters() if self._known else Counter[Lock]()
        for deadlock in self._known.values():
            deadlock.is_wanted = self._is_wanted(deadlock.threads)  # a reload may have changed the filter
            outside = sum(waiters[lock] for lock in deadlock.locks) - len(deadlock.threads)
            deadlock.waiting = max(0, outside) if deadlock.is_wanted else 0
        self._report(clock)
        unlogged = (d for d in self._known.values() if d.is_wanted and not d.is_logged)
        due = (d.formed + (LOGGED_NS if d.is_reported else LASTING_NS) for d in unlogged)
        self._next_report = min(due, default=NEVER)  # computed here: every tick reads next_check
        if self._question is None or clock - self._question.clock > LOST_NS:
            self._ask_holders(waits, clock)

    def take_holders(self, answer: OwnersAnswer) -> None:
        """Take the answer to the last question. An answer to another question is ignored.

        If locks were not read, the question still has to be asked: they may be those of a ring.
        """
        question = self._question
        if question is None or question.token != answer.token:
            return
        self._question = None
        if NOT_READ not in answer.tids:
            self._answered = question
        tids = (max(tid, 0) for tid in answer.tids)
        read = dict(zip(question.locks, tids, strict=True)) | question.kernel_holders
        older = {lock: self._held[lock] for lock in question.left_out if lock in self._held}
        holders = {*read.values(), *(held.holder for held in older.values())}
        waiting = question.waits.find_all(holders - {0})
        self._held = older | {lock: _Held(tid, waiting.get(tid)) for lock, tid in read.items()}
        self._suspected = find_rings(
            {
                lock: wait
                for lock, held in self._held.items()
                if held.wait and (wait := waiting.get(held.holder)) and held.wait.goes_on_as(wait)
            }
        )

    def _ask_holders(self, waits: Waits, clock: int) -> None:
        asked, left_out = waits.first_waits(clock - ASKED_AFTER_NS, MOST_ASKED, self._asked_at)
        self._skipped += len(left_out)
        self._asked_at = {lock: self._asked_at[lock] for lock in left_out if lock in self._asked_at}
        self._asked_at.update((wait.lock, clock) for wait in asked)
        if not asked:
            self._held = {}
            return
        kernel_holders = {w.lock: self._kernel_holder(w.address, w.tid) for w in asked if w.in_kernel}
        in_user_space = [wait for wait in asked if not wait.in_kernel]
        self._token += 1
        locks = tuple(wait.lock for wait in in_user_space)
        question = Owners(
            self._token, tuple(OwnedLock(w.tgid, w.address, w.kind, w.family) for w in in_user_space)
        )
        is_needed = len(left_out) > 0 or not (self._answered and self._answered.covers(waits))
        if not in_user_space or self._ask_namer(question, is_needed):
            self._question = _Question(self._token, clock, waits, locks, left_out, kernel_holders)
        if not in_user_space:
            self.take_holders(OwnersAnswer(self._token, ()))

    def _confirm(self, waits: Waits) -> None:
        """Forget rings of which a thread has left its call; add suspected rings if no thread has left its
        call."""
        self._known = {key: known for key, known in self._known.items() if waits.has_all(known.threads)}
        for ring, locks in self._suspected:
            if not waits.has_all(ring):
                continue
            key = frozenset((wait.tid, wait.since) for wait in ring)
            if key not in self._known:
                # A process may have got another name before it began to wait.
                process, _ = self._identify(ring[0].tgid, _formed(ring))
                self._known[key] = known = Deadlock(ring, process)
                if key in self._reported_before:
                    known.is_reported = known.is_logged = True
                    known.suspended_ns = self._reported_before[key]
            self._known[key].locks = locks
        self._suspected = []

    def _is_wanted(self, ring: Sequence[Wait]) -> bool:
        """Whether the filter wants at least one process of a ring."""
        formed = _formed(ring)
        return any(self._identify(tgid, formed)[1] for tgid in {wait.tgid for wait in ring})

    def _report(self, clock: int) -> None:
        if clock >= self._log_period_ends:
            self._begin_log_period(clock)
        room = MOST_LOGGED - self._logged
        for deadlock in self._known.values():
            lasted = clock - deadlock.formed
            if not deadlock.is_wanted or lasted < LASTING_NS:
                continue
            if not deadlock.is_reported:
                deadlock.is_reported = True
                _count(self._counts, deadlock.process)
            if deadlock.is_logged:
                continue
            if room == 0:
                deadlock.is_logged = True
                self._left_out += 1
                continue
            room -= 1  # a deadlock whose locks have no names yet takes room, too
            shown = self._describe_locks(deadlock)
            if lasted >= LOGGED_NS or all(description.lock for description in shown):
                deadlock.is_logged = True
                self._logged += 1
                self._log(deadlock, lasted, shown)

    def _begin_log_period(self, clock: int) -> None:
        """Log how many deadlocks were left out in the last LOG_PERIOD_NS, and begin the next one."""
        if self._left_out:
            log.error(
                "%d more deadlocks were found; /api/v1/deadlocks has the oldest ones of those that last",
                self._left_out,
                extra={"MESSAGE_ID": MESSAGE_ID},
            )
        self._logged = self._left_out = 0
        self._log_period_ends = clock + LOG_PERIOD_NS

    def _log(self, deadlock: Deadlock, lasted: int, shown: Sequence[LockDescription]) -> None:
        unit, comm = deadlock.process
        texts = [
            f"{row['thread_comm']}[{row['tid']}] waits for {row['lock'] or row['address']}"
            + (f" in {row['site']}" if row["site"] else "")
            for row in self._thread_rows(deadlock, shown)
        ]
        left_out = len(deadlock.threads) - len(texts)
        log.error(
            "deadlock in %s%s for %.1f s: %s%s%s",
            comm or "?",
            f" ({unit})" if unit else "",
            lasted / NS,
            ", held by ".join(texts),
            f", and so on ({left_out} more)" if left_out else f", held by {texts[0].partition(' ')[0]}",
            f"; {deadlock.waiting} more threads wait for these" if deadlock.waiting else "",
            extra={
                "MESSAGE_ID": MESSAGE_ID,
                "LOCKD_DEADLOCK": deadlock.id,
                "LOCKD_UNIT": unit,
                "LOCKD_COMM": comm,
                "LOCKD_TIDS": " ".join(str(wait.tid) for wait in deadlock.threads),
            },
        )

    def _describe_locks(self, deadlock: Deadlock) -> list[LockDescription]:
        return [self._describe_lock(wait) for wait in deadlock.threads[:SHOWN_THREADS]]

    def _thread_rows(self, deadlock: Deadlock, shown: Sequence[LockDescription]) -> list[dict[str, Any]]:
        """A table row for each shown thread of a deadlock; `shown` are the descriptions of their locks."""
        holders = [wait.tid for wait in (*deadlock.threads[1:], deadlock.threads[0])]
        return [
            {
                "tid": wait.tid,
                "tgid": wait.tgid,
                "thread_comm": self._thread_comm(wait.tgid, wait.tid),
                "kind": wait.kind,
                "address": f"{wait.address:#x}",
                **description._asdict(),
                "holder_tid": holder,
            }
            for wait, holder, description in zip(deadlock.threads, holders, shown, strict=False)
        ]

    def save(self) -> dict[str, Any]:
        """Return what was counted and which deadlocks were reported, for restore().

        Deadlocks that only earlier samplers reported are among them: they may not have been found again yet.
        """
        reported = [(key, one.suspended_ns) for key, one in self._known.items() if one.is_reported]
        before = [(key, asleep) for key, asleep in self._reported_before.items() if key not in self._known]
        reported += before[: max(MOST_SAVED - len(reported), 0)]
        rings = [(list(key), asleep) for key, asleep in reported]
        return {"found": list(self._counts.items()), "skipped": self._skipped, "reported": rings}

    def restore(self, head: dict[str, Any]) -> None:
        """Go on with what save() of another sampler returned. Deadlocks are not reported a second time."""
        self._counts = Counter({(unit, comm): count for (unit, comm), count in head["found"]})
        self._skipped = head["skipped"]
        self._reported_before = {
            frozenset((tid, since) for tid, since in ring): asleep for ring, asleep in head["reported"]
        }

    def export(self, block: Block) -> None:
        """Write the metrics to a block."""
        existing: Counter[Name] = Counter()
        for deadlock in self.reported:
            _count(existing, deadlock.process)
        block.add("lockd_deadlocks", list(existing), list(existing.values()))
        block.add("lockd_deadlocks_found_total", list(self._counts), list(self._counts.values()))
        block.add("lockd_deadlock_locks_skipped_total", [()], [self._skipped])

    def add_table(
        self, tables: dict[str, Any], arrays: dict[str, npt.NDArray[Any]], clock: int, wall: float
    ) -> None:
        """Add the table behind /api/v1/deadlocks and its numbers.

        `clock` (monotonic, in ns) and `wall` (seconds since 1970) are the same moment.
        """
        shown = self.reported[:MOST_SHOWN]
        age_ns = np.array([clock - deadlock.formed for deadlock in shown], np.int64)
        asleep_ns = suspended_ns() - np.array([deadlock.suspended_ns for deadlock in shown], np.int64)
        arrays["deadlocks.since"] = wall - (age_ns + asleep_ns) / NS
        arrays["deadlocks.lasted_us"] = age_ns / 1000.0
        arrays["deadlocks.threads_in_ring"] = np.array([len(d.threads) for d in shown], np.int64)
        arrays["deadlocks.waiting"] = np.array([deadlock.waiting for deadlock in shown], np.int64)
        tables["deadlocks"] = {
            "text": {
                "id": [deadlock.id for deadlock in shown],
                "unit": [deadlock.process[0] for deadlock in shown],
                "comm": [deadlock.process[1] for deadlock in shown],
            },
            "numbers": ["since", "lasted_us", "threads_in_ring", "waiting"],
            "lists": {"threads": [self._thread_rows(one, self._describe_locks(one)) for one in shown]},
        }


def _count(counts: Counter[Name], process: Name) -> None:
    """Count a deadlock of a process, as `other` if MOST_NAMES others have counts of their own."""
    has_count = process in counts or len(counts) < MOST_NAMES
    counts[process if has_count else (OTHER, OTHER)] += 1
