"""Sampled releases of locks: read from the kernel's ring, and joined with the code of the holders.

The programs sample a release with a chance in proportion to the time for which threads have waited since the
lock was last released (lockd/bpf/daemon/lock_queues.bpf.c), and say what the holder has done meanwhile
(lock_causes.bpf.c). The namer finds out which code released the lock.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from lockd.columns.structs import struct_dtype
from lockd.kernel.counters import PerCpuCounters
from lockd.kernel.manifest import Layout, Manifest
from lockd.kernel.pairs import Control
from lockd.kernel.rings import Ring, RingReader
from lockd.names.client import Resolver
from lockd.names.labels.processes import Name
from lockd.names.labels.reasons import Reasons
from lockd.names.protocol import (
    NO_RELEASE,
    OWNER_ENDED,
    UNKNOWN_HOLDER,
    HolderAnswer,
    KernelLockReleased,
    LockReleased,
)
from lockd.names.unwind.capture import decode_captures
from lockd.process.clock import NS
from lockd.sample.aggregates.identities import ProcessNames

RUNNING = "running"
"""The cause of a wait if the holder ran meanwhile."""
RUNQUEUE = "runqueue"
"""The cause of a wait if the holder was ready to run and had no CPU."""
LOCK = "lock"
"""The cause of a wait if the holder waited for another lock itself. An off-CPU reason has the same name."""
UNKNOWN_CAUSE = "unknown"
"""The cause of a wait if it is not known which thread held the lock, or if no thread released it."""
WAIT_UNIT_NS = 1024
"""The unit of Control.set_wait_per_sample() and set_wait_per_capture(), in nanoseconds."""
MOST_NS = 1_000_000_000_000
"""The largest SamplePace.wait_ns: with it, 100,000 threads that wait all the time make 100 samples in a
second."""
MOST_WEIGHT_NS = 1 << 60
"""The largest weight that the programs give to a sample."""
ANSWER_SECONDS = 5.0
"""Seconds after which a release whose code has not been found out has the holder UNKNOWN_HOLDER."""
MOST_WAITING = 512
"""Most releases that wait for an answer about their code or their lock. More are refused."""


class NextLock(NamedTuple):
    """A lock for which the holder of another lock waits."""

    tgid: int
    """The process; 0 for a lock of the kernel."""
    address: int


@dataclass
class Release:
    """A sampled release of a lock, or another end of a wait for it (OWNER_ENDED, NO_RELEASE)."""

    tgid: int
    """The process that waited: that of the thread which was woken."""
    process: Name
    """Unit and comm of the process when the wait ended."""
    address: int
    kind: int
    """The kind of a user-space lock as the programs knew it (enum futex_kind), or the type of a kernel lock
    (enum lock_type)."""
    in_kernel: bool
    """Whether it is a lock of the kernel."""
    weight_ns: int
    """The waited time that the sample stands for."""
    taken: float
    """When the sample was read, by the monotonic clock in seconds."""
    tick: int
    """The number of the tick in which the sample was read."""
    causes: dict[str, int] = field(default_factory=dict)
    """What the holder did while threads waited: parts of `weight_ns` by RUNNING, RUNQUEUE, an off-CPU reason
    or UNKNOWN_CAUSE. Empty if the programs do not look at it."""
    next_lock: NextLock | None = None
    """The lock that the holder waited for in the part LOCK of `causes`, if that is known."""
    holder: str = ""
    """The site of the code that released the lock; empty while it is not known."""
    stack: tuple[str, ...] = ()
    """Functions of the thread that released the lock, innermost first."""


def has_causes(manifest: Manifest) -> bool:
    """Whether the programs' samples say what the holder of the lock has done."""
    names = "release_record", "kernel_release_record"
    records = [struct_dtype(info.value) for info in manifest.maps if info.name in names]
    return any("times" in (record["sample"]["release"].names or ()) for record in records)


def processes_of(releases: Sequence[Release]) -> ProcessNames:
    """Return the process of each release. One process may have several names, if it has called exec."""
    names = np.empty(len(releases), object)
    names[:] = [release.process for release in releases]
    return ProcessNames(names, np.arange(len(releases)))


def causes_of(seen: Any, weight_ns: int, reasons: Reasons) -> dict[str, int]:
    """The parts of a sample's weight, in ns, by what the holder did; `seen` is its `struct release`."""
    times, absence = seen["times"], seen["times"]["absence"]
    known, ready, blocked = (int(times[name]) for name in ("known", "ready", "blocked"))
    known = max(known, ready + blocked)  # one processor may add to the times while another one reads them
    waited = max(int(seen["waited"]), known)
    facts = int(absence["nr"]), int(absence["state"]), bool(absence["iowait"]), int(absence["detail"])
    reason = LOCK if absence["in_kernel"] else reasons.reason(*facts)
    parts = {RUNNING: known - ready - blocked, RUNQUEUE: ready, reason: blocked}
    causes = {cause: part * weight_ns // waited for cause, part in parts.items() if part > 0}
    rest = weight_ns - sum(causes.values())  # what rounding leaves, and the time of which nothing is known
    most = max(causes, key=causes.__getitem__) if causes and known == waited else UNKNOWN_CAUSE
    return {**causes, most: causes.get(most, 0) + rest}


def _next_lock(absence: Any, tgid: int) -> NextLock | None:
    """The lock that a holder waited for while it was off the CPU (`absence`); None if it is not known.

    `tgid` is the process that waits for the holder.
    """
    address = int(absence["lock"])
    return NextLock(0 if absence["in_kernel"] else tgid, address) if address else None


class SamplePace:
    """Adapts the waited time that one sample stands for, so that `per_second` samples are taken.

    This time, `wait_ns`, changes once a second, and falls by half at most. If more than twice the wanted
    number of samples were taken before the second is over, `wait_ns` doubles at once. Each sample has the
    weight that was in force when it was taken, so sums are right however the time changes.

    `wait_ns` never falls below a second divided by `per_second`. Where all threads together wait for less
    than a second in each second, there are fewer samples, and no namer is kept running for them on a quiet
    host.
    """

    def __init__(self, per_second: int, now: float) -> None:
        self._per_second = per_second
        self._taken, self._since = 0, now
        self.wait_ns = self._least_ns = NS // per_second

    def set_rate(self, per_second: int) -> None:
        """Take another number of samples in a second from now on."""
        self._per_second, self._least_ns = per_second, NS // per_second

    def note(self, samples: int, now: float) -> None:
        """Note how many samples were taken since the last call."""
        self._taken += samples
        seconds = now - self._since
        if seconds >= 1.0:
            change = max(self._taken / self._per_second / seconds, 0.5)
        elif self._taken > 2 * self._per_second:
            change = 2.0
        else:
            return
        self.wait_ns = min(max(int(self.wait_ns * change), self._least_ns), MOST_NS)
        self._taken, self._since = 0, now


class SampleCounts:
    """The samples of one sort that were taken, and those that were refused.

    `refused` counts the samples for which their ring had no room, and `pace` adapts how many are taken.
    """

    def __init__(self, refused: PerCpuCounters, pace: SamplePace) -> None:
        self._kernel_refused, self._pace = refused, pace
        self.taken = 0
        """The number of samples that were neither refused nor left out by the filter."""
        self._refused, self._refused_ns = 0, 0

    @property
    def wait_ns(self) -> int:
        """The least waited time that a sample stands for at present, in nanoseconds."""
        return self._pace.wait_ns

    @property
    def refused_here(self) -> tuple[int, int]:
        """How many samples this process has refused, and the waited time that they stood for, in ns."""
        return self._refused, self._refused_ns

    def kernel_refused(self) -> tuple[int, int]:
        """How many samples the programs have refused because the ring was full, and the waited time that they
        stood for, in ns."""
        samples, ns = self._kernel_refused.read().tolist()
        return samples, ns

    def _refuse(self, weight_ns: int) -> None:
        """Count a sample that was read and is thrown away."""
        self._refused += 1
        self._refused_ns += weight_ns


class Releases(SampleCounts):
    """Reads `ring`, and has the namer find out which code made each release.

    `enums` and `constants` are those of the manifest. `refused` counts samples for which the ring had no
    room.
    """

    def __init__(
        self,
        ring: Ring,
        user_record: Layout | str,
        kernel_record: Layout | str,
        enums: Mapping[str, tuple[str, ...]],
        constants: Mapping[str, int],
        refused: PerCpuCounters,
        control: Control,
        resolver: Resolver,
        identify: Callable[[Any], tuple[Name, bool]],
        per_second: int,
        now: float,
    ) -> None:
        """`user_record` and `kernel_record` are the layouts of the ring's records for user-space locks and
        for kernel locks; one of them is empty if the programs sample no such locks. `identify` is
        Identities.identify_thread().
        """
        super().__init__(refused, SamplePace(per_second, now))
        self._reader = RingReader(ring)
        self._user_record = struct_dtype(user_record) if user_record else None
        self._kernel_record = struct_dtype(kernel_record) if kernel_record else None
        some = self._user_record or self._kernel_record
        assert some
        self._sample = some["sample"]
        self._reasons = Reasons(enums, constants)
        self._has_causes = "times" in (self._sample["release"].names or ())
        kinds, ends = enums["futex_kind"], enums["wait_end"]
        self._user_kinds = {kinds.index("lock"), kinds.index("pi")} if self._user_record else set()
        self._kernel_kinds = set(range(len(enums["lock_type"]))) if self._kernel_record else set()
        self._release_end = ends.index("release")
        self._holders = {ends.index("owner_ended"): OWNER_ENDED, ends.index("no_release"): NO_RELEASE}
        self._control, self._resolver, self._identify = control, resolver, identify
        self._tokens = itertools.count(1)
        self._waiting: dict[int, Release] = {}
        """The releases that take() has still to return, by token."""
        control.set_wait_per_sample(self._pace.wait_ns // WAIT_UNIT_NS)

    def read(self, now: float, tick: int) -> None:
        """Read new samples, in the tick with the number `tick`, and ask for the code that made each release.

        Makes no system call if there are no samples.
        """
        samples = 0
        for record in self._reader.records():
            samples += 1
            self._note_record(record, now, tick)
        self._pace.note(samples, now)
        self._control.set_wait_per_sample(self._pace.wait_ns // WAIT_UNIT_NS)

    def note_answer(self, answer: HolderAnswer) -> None:
        """Note the code of a release, unless take() has returned the release."""
        if release := self._waiting.get(answer.token):
            release.holder, release.stack = answer.site or UNKNOWN_HOLDER, answer.stack
            if release.holder == NO_RELEASE and release.causes:
                # The causes are of the thread that woke the waiter. The programs took it for the holder.
                release.causes, release.next_lock = {UNKNOWN_CAUSE: release.weight_ns}, None

    @property
    def has_waiting(self) -> bool:
        """Whether take() may return something."""
        return bool(self._waiting)

    def has_counted(self, tick: int) -> bool:
        """Whether no sample that was read up to that tick waits for the name of its holder or its lock."""
        return all(release.tick > tick for release in self._waiting.values())

    def take(self, now: float) -> list[Release]:
        """Return the releases whose holders are known, or were asked for ANSWER_SECONDS ago."""
        taken = []
        for token, release in list(self._waiting.items()):
            if not release.holder and now >= release.taken + ANSWER_SECONDS:
                release.holder = UNKNOWN_HOLDER
            if release.holder:
                taken.append(self._waiting.pop(token))
        return taken

    def refuse_waiting(self) -> None:
        """Count the samples that take() has still to return as refused: nothing is counted any more."""
        for release in self._waiting.values():
            self._refuse(release.weight_ns)
        self._waiting.clear()

    def give_back(self, releases: Sequence[Release]) -> None:
        """Have take() return some releases again, as the names of their locks are being looked up."""
        for release in releases:
            self._waiting[next(self._tokens)] = release

    def _note_record(self, record: memoryview, now: float, tick: int) -> None:
        sample: Any = np.frombuffer(record, self._sample, 1)[0]
        seen = sample["release"]
        tgid, address, kind, weight_ns = (int(seen[name]) for name in ("tgid", "address", "kind", "weight"))
        in_kernel, end = bool(seen["in_kernel"]), int(seen["end"])
        kinds = self._kernel_kinds if in_kernel else self._user_kinds
        is_whole = end == self._release_end or end in self._holders
        is_whole &= int(sample["who"]["tgid"]) == tgid
        if not is_whole or kind not in kinds or not 0 < weight_ns <= MOST_WEIGHT_NS:
            return  # the record was read before it was complete, see RingReader
        process, is_wanted = self._identify(sample["who"])
        if not is_wanted:
            return
        if len(self._waiting) >= MOST_WAITING:
            self._refuse(weight_ns)
            return
        release = Release(tgid, process, address, kind, in_kernel, weight_ns, now, tick)
        if self._has_causes:
            release.causes = causes_of(seen, weight_ns, self._reasons)
            release.next_lock = _next_lock(seen["times"]["absence"], tgid)
        token = next(self._tokens)
        if end != self._release_end:
            release.holder = self._holders[end]
        elif not self._resolver.ask(self._question(token, record, in_kernel)):
            release.holder = UNKNOWN_HOLDER
        self._waiting[token] = release
        self.taken += 1

    def _question(self, token: int, record: memoryview, in_kernel: bool) -> LockReleased | KernelLockReleased:
        """The question of which code released a lock, from the record of the release."""
        if in_kernel:
            frames = np.frombuffer(record, self._kernel_record, 1)["frames"][0]
            return KernelLockReleased(token, tuple(filter(None, frames.tolist())))
        whole = np.frombuffer(record, self._user_record, 1)
        by, functions = whole["by"], tuple(itertools.takewhile(bool, whole["python"][0].tolist()))
        return LockReleased(token, int(by["tgid"][0]), decode_captures(by)[0], functions)
