"""Holders of locks: for how long the code that held a lock made threads wait for it, and what it did then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from lockd.columns import wide_sums
from lockd.columns.index import Groups, Rows
from lockd.columns.wide_sums import WIDE
from lockd.sample.aggregates.contention import ContentionTables
from lockd.sample.locks.releases import LOCK, NextLock, Release
from lockd.sample.series.block import Block
from lockd.sample.series.label_hash import hash_labels
from lockd.sample.series.limits import Limits, LineBudget
from lockd.sample.series.ranking import STAYS, merits
from lockd.sample.series.series import OTHER, Series

SERIES_OF_LOCK = 4
"""For how many holders, and for how many causes, each of the `top_locks` locks can have series, on average.
Most locks have few holders and causes that matter."""


class LockHolders:
    """Counts the holders of user-space locks or of kernel locks, and their causes: what they did meanwhile.

    They are counted in series and in the table of locks. `family` is `futex_lock` or `kernel_lock`, a part of
    the metrics' names. `kinds` are the names of the kinds, or types, of these locks; `others` is how many of
    them can have a series called `other`. There are series of causes only if `has_causes`.
    """

    def __init__(
        self, family: str, kinds: Sequence[str], others: int, limits: Limits, budget: LineBudget,
        contention: ContentionTables, has_causes: bool,
    ) -> None:  # fmt: skip
        self._kinds = kinds
        self._contention = contention

        def series_of(label: str) -> Series:
            return Series(
                f"{family}_{label}",
                {"waited_ns": WIDE},
                counters={"waited_ns": f"lockd_{family}_{label}_seconds_total"},
                names=(0, 1, 3, 4), lines=1, budget=budget, others=others,
                most=SERIES_OF_LOCK * limits.top_locks,
            )  # fmt: skip

        self._by_holder = series_of("holder")
        self._by_cause = series_of("cause") if has_causes else None
        self.series = [self._by_holder, *([] if self._by_cause is None else [self._by_cause])]

    def add(self, lock_rows: Rows, releases: Sequence[Release], now: float) -> None:
        """Add releases of the locks in these rows of the table of locks; a lock without a row has -1."""
        table = self._contention.locks
        for row, release in zip(lock_rows.tolist(), releases, strict=True):
            if row < 0:
                continue
            if not table["holders"][row]:
                table["holders"][row] = HoldersOfLock()
            table["holders"][row].add(release)
        rows_and_releases = list(zip(lock_rows.tolist(), releases, strict=True))
        of_holders = [
            (self._labels(row, release, release.holder), release.weight_ns)
            for row, release in rows_and_releases
        ]
        of_causes = [
            (self._labels(row, release, cause), waited_ns)
            for row, release in rows_and_releases
            for cause, waited_ns in release.causes.items()
        ]
        _add(self._by_holder, of_holders, now)
        if self._by_cause is not None:
            _add(self._by_cause, of_causes, now)

    def _labels(self, row: int, release: Release, last: str) -> tuple[str, ...]:
        """The labels of a series of the lock in `row` of the table of locks; `last` is a holder or cause."""
        locks = self._contention.locks
        if row < 0:
            return (OTHER, OTHER, self._kinds[release.kind], OTHER, OTHER)
        if locks["series_code"][row] == 0:  # a lock without a name counts as `other`
            return (OTHER, OTHER, locks["kind"][row], OTHER, OTHER)
        return (*locks["process"][row], locks["kind"][row], locks["lock"][row], last)

    def export(self, block: Block) -> None:
        """Write every series to a block."""
        for series in self.series:
            rows, labels = series.live()
            block.add(f"lockd_{series.family}_seconds_total", labels, series.seconds("waited_ns", rows))


def _add(series: Series, waits: Sequence[tuple[tuple[str, ...], int]], now: float) -> None:
    """Add waited times in nanoseconds to series, by their labels."""
    labels = [one for one, _ in waits]
    waited = np.array([waited_ns for _, waited_ns in waits], np.int64)
    keys = np.array([hash_labels(one) for one in labels], np.uint64)
    rows = series.rows(keys, labels.__getitem__, merits(waited, np.ones_like(waited)), now)
    wide_sums.add(series["waited_ns"], Groups(rows), waited)


MOST_HOLDERS = 8
"""The most holders of one lock that are counted by themselves. All others are counted as OTHER."""
MOST_REMEMBERED = 32
"""The most holders of one lock that have a merit: the time for which they recently made threads wait. Those
that are counted by themselves are included."""
HALF_LIFE = 600.0
"""Seconds after which waited time counts half in the merit of a holder. It is longer than ranking.HALF_LIFE,
because a holder that loses its place loses all its time to OTHER: this should happen seldom."""
MOST_NEXT = 8
"""The most locks for which one holder waited that are counted by themselves. There can be any number of them,
for instance if each object has a lock."""


@dataclass
class Held:
    """What is known of one holder of a lock."""

    waited_ns: int = 0
    samples: int = 0
    causes: Counter[str] = field(default_factory=Counter)
    """The parts of `waited_ns` by what the holder did."""
    next_locks: Counter[NextLock] = field(default_factory=Counter)
    """The parts of `causes[LOCK]` by the lock that the holder waited for, for the first MOST_NEXT locks."""
    stack: tuple[str, ...] = ()

    def add(self, release: Release) -> None:
        """Count one sample."""
        self.waited_ns += release.weight_ns
        self.samples += 1
        self.causes.update(release.causes)
        if release.next_lock:
            self._add_next(release.next_lock, release.causes.get(LOCK, 0))
        self.stack = release.stack or self.stack

    def add_all(self, other: Held) -> None:
        """Count the samples of another holder as well."""
        self.waited_ns += other.waited_ns
        self.samples += other.samples
        self.causes.update(other.causes)
        for next_lock, waited_ns in other.next_locks.items():
            self._add_next(next_lock, waited_ns)

    def _add_next(self, next_lock: NextLock, waited_ns: int) -> None:
        if next_lock in self.next_locks or len(self.next_locks) < MOST_NEXT:
            self.next_locks[next_lock] += waited_ns


class Part(NamedTuple):
    """A part of the time that threads waited for a lock."""

    site: str
    """The code that held the lock."""
    cause: str
    """What the holder did."""
    next_lock: NextLock | None
    """The lock that the holder waited for, if that is the cause and if the lock is known."""
    waited_ns: int


class HoldersOfLock:
    """The holders of one lock, by the site of their code.

    MOST_HOLDERS of them are counted by themselves. A new holder takes the place of one of these if its merit
    is STAYS times as large. The count of the new holder begins at zero: its time until then stays in OTHER.
    The time of the holder that loses its place is added to OTHER.
    """

    def __init__(self) -> None:
        self._by_site: dict[str, Held] = {}
        self._others = Held()
        self._merits: dict[str, float] = {}
        """The merits, by site: for how long each holder made threads wait, in ns, halved every HALF_LIFE."""
        self._decayed_at = 0.0
        """When the merits were last decayed (monotonic clock in seconds)."""

    def add(self, release: Release) -> None:
        """Count one sample."""
        self._add_merit(release)
        if release.holder not in self._by_site:
            self._give_place(release.holder)
        if held := self._by_site.get(release.holder):
            held.add(release)
        else:
            self._others.add(replace(release, stack=()))  # OTHER has no stack

    def _add_merit(self, release: Release) -> None:
        """Count a sample in the merits.

        When MOST_REMEMBERED holders have merits, a new holder replaces the one with the least merit among
        those without a place in `_by_site`, and takes over this merit, as in the algorithm Space-Saving. If
        its merit began at zero, holders that take turns would replace each other for ever, and none would
        earn a place.
        """
        merits, site = self._merits, release.holder
        elapsed = max(release.taken - self._decayed_at, 0.0)
        self._decayed_at += elapsed
        for known in merits:
            merits[known] *= 0.5 ** (elapsed / HALF_LIFE)
        if site not in merits and len(merits) == MOST_REMEMBERED:
            least = min((known for known in merits if known not in self._by_site), key=merits.__getitem__)
            merits[site] = merits.pop(least)
        merits[site] = merits.get(site, 0.0) + release.weight_ns

    def _give_place(self, site: str) -> None:
        """Count a holder by itself from now on, if there is room or the holder of least merit makes room.

        The holder of least merit makes room if the merit of the new one is STAYS times as large or larger.
        """
        if len(self._by_site) == MOST_HOLDERS:
            least = min(self._by_site, key=self._merits.__getitem__)
            if self._merits[site] < STAYS * self._merits[least]:
                return
            self._others.add_all(self._by_site.pop(least))
        self._by_site[site] = Held()

    @property
    def waited_ns(self) -> int:
        """The time for which all holders made threads wait, in nanoseconds."""
        return sum(held.waited_ns for held in self._all.values())

    @property
    def _all(self) -> dict[str, Held]:
        return {**self._by_site, **({OTHER: self._others} if self._others.samples else {})}

    def parts(self) -> Iterator[Part]:
        """Yield the parts of `waited_ns`, by holder, cause and next lock."""
        for site, held in self._all.items():
            for cause, waited_ns in held.causes.items():
                if cause == LOCK:
                    for next_lock, of_lock in held.next_locks.items():
                        yield Part(site, cause, next_lock, of_lock)
                    waited_ns -= held.next_locks.total()
                if waited_ns:
                    yield Part(site, cause, None, waited_ns)

    def rows(self) -> list[dict[str, Any]]:
        """The holders as /api/v1/locks has them, those that made threads wait longest first."""
        held, total = self._all, self.waited_ns
        return [
            {
                "site": site,
                "seconds": one.waited_ns / 1e9,
                "share": one.waited_ns / total,
                "samples": one.samples,
                "causes": {cause: ns / 1e9 for cause, ns in one.causes.most_common()},
                "stack": list(one.stack),
            }
            for site, one in sorted(held.items(), key=lambda item: item[1].waited_ns, reverse=True)
        ]
