"""Holders of locks: for how long the code that held a lock made threads wait for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockd.columns.index import Rows
from lockd.sample.aggregates.contention import ContentionTables
from lockd.sample.locks.releases import Release
from lockd.sample.series.block import Block
from lockd.sample.series.label_hash import hash_labels
from lockd.sample.series.limits import Limits, LineBudget
from lockd.sample.series.ranking import MEMORY_NS
from lockd.sample.series.series import OTHER, Series

SERIES_OF_LOCK = 4
"""Series for each lock that has series of its own: most locks have few holders that matter."""


class LockHolders:
    """The series of holders of user-space locks or of kernel locks, and their holders in the table of locks.

    `family` is the name of the family of series and a part of the metric's name. `kinds` are the names of the
    kinds, or types, of these locks, of which there are series called `other` for `others`.
    """

    def __init__(
        self, family: str, kinds: Sequence[str], others: int, limits: Limits, budget: LineBudget,
        contention: ContentionTables,
    ) -> None:  # fmt: skip
        self._kinds = kinds
        self._contention = contention
        self._metric = f"lockd_{family}_seconds_total"
        self.series = Series(
            family,
            {"waited_ns": np.int64},
            counters={"waited_ns": self._metric},
            names=(0, 1, 3, 4), lines=1, budget=budget, others=others,
            most=SERIES_OF_LOCK * limits.top_locks,
        )  # fmt: skip

    def add(self, lock_rows: Rows, releases: Sequence[Release], now: float) -> None:
        """Add releases of the locks in these rows of the table of locks; the row is -1 if it has no row."""
        table = self._contention.locks
        for row, release in zip(lock_rows.tolist(), releases, strict=True):
            if row < 0:
                continue
            if not table["holders"][row]:
                table["holders"][row] = HoldersOfLock()
            table["holders"][row].add(release)
        labels = [self._labels(row, release) for row, release in zip(lock_rows, releases, strict=True)]
        waited = np.array([release.weight_ns for release in releases], np.int64)
        keys = np.array([hash_labels(one) for one in labels], np.uint64)
        rows = self.series.rows(keys, labels.__getitem__, np.minimum(waited, MEMORY_NS), now)
        np.add.at(self.series["waited_ns"], rows, waited)

    def _labels(self, row: int, release: Release) -> tuple[str, ...]:
        locks = self._contention.locks
        if row < 0:
            return (OTHER, OTHER, self._kinds[release.kind], OTHER, OTHER)
        if locks["series_code"][row] == 0:  # its name is not known, as in the other series of locks
            return (OTHER, OTHER, locks["kind"][row], OTHER, OTHER)
        return (*locks["process"][row], locks["kind"][row], locks["lock"][row], release.holder)

    def export(self, block: Block) -> None:
        """Write every series to a block."""
        rows, labels = self.series.live()
        block.add(self._metric, labels, self.series["waited_ns"][rows] / 1e9)


MOST_HOLDERS = 8
"""Holders of one lock that are told apart, besides OTHER."""


@dataclass
class Held:
    """What is known of one holder of a lock."""

    waited_ns: int = 0
    samples: int = 0
    stack: tuple[str, ...] = ()

    def add(self, waited_ns: int, samples: int) -> None:
        self.waited_ns += waited_ns
        self.samples += samples


class HoldersOfLock:
    """The holders of one lock, by the site of their code. The least one makes room for a new one."""

    def __init__(self) -> None:
        self._by_site: dict[str, Held] = {}
        self._others = Held()

    def add(self, release: Release) -> None:
        """Count one sample."""
        held = self._by_site.get(release.holder)
        if held is None:
            if len(self._by_site) == MOST_HOLDERS:
                least = min(self._by_site, key=lambda site: self._by_site[site].waited_ns)
                gone = self._by_site.pop(least)
                self._others.add(gone.waited_ns, gone.samples)
            held = self._by_site[release.holder] = Held()
        held.add(release.weight_ns, 1)
        held.stack = release.stack or held.stack

    def rows(self) -> list[dict[str, Any]]:
        """The holders as /api/v1/locks has them, those that made threads wait longest first."""
        held = {**self._by_site, **({OTHER: self._others} if self._others.samples else {})}
        total = sum(one.waited_ns for one in held.values())
        return [
            {
                "site": site,
                "seconds": one.waited_ns / 1e9,
                "share": one.waited_ns / total,
                "samples": one.samples,
                "stack": list(one.stack),
            }
            for site, one in sorted(held.items(), key=lambda item: item[1].waited_ns, reverse=True)
        ]
