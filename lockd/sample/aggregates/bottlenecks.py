"""Bottlenecks: the code that makes threads wait for locks in the end, and what it does meanwhile.

A thread that holds a lock may wait for another lock itself. The time for which others wait for the first lock
is then passed on to the holders of the second lock, in proportion to the time for which each of them makes
threads wait. These holders may wait for a third lock, and so on. A chain of locks ends at code that runs, has
no CPU, or is off the CPU for a reason other than a lock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from lockd.columns.table import Table
from lockd.names.labels.processes import Name
from lockd.sample.aggregates.contention import PROGRAMS
from lockd.sample.aggregates.lock_holders import HoldersOfLock
from lockd.sample.locks.releases import NextLock
from lockd.sample.series.ranking import rank

Item = TypeVar("Item")

IN_KERNEL = PROGRAMS.index("kernel_locks")
MOST_LOCKS = 8
"""Most locks of one chain. Time that the last lock would pass on stays with it, with the cause LOCK."""
MOST_FOLLOWED = 300
"""Most locks whose chains are followed: those for which threads waited longest. Up to half of the places are
shared out among the processes first, at most ranking.FLOOR places to each."""
LEAST_SHARE = 0.01
"""The smallest part of the time of a chain's first lock that is passed on. A smaller part stays with the lock
that it has reached, with the cause LOCK."""
MOST_STEPS = 20_000
"""Most steps for one answer of /api/v1/bottlenecks. In each step time is passed on to another lock. The steps
are shared out among the followed locks. After the last step of a lock, its chains end at the locks that they
have reached."""
SHOWN = 500
"""Most rows of the table behind /api/v1/bottlenecks: those with the most time. Up to half of the places are
shared out among the processes first, at most ranking.FLOOR places to each."""
SHOWN_CHAINS = 8
"""Most chains of a row: those with the most time."""


class Link(NamedTuple):
    """A lock of a chain: its row in the table of locks, and the code that held it."""

    row: int
    site: str


Chain = tuple[Link, ...]


@dataclass
class Bottleneck:
    """Code at which chains of locks end, and what it did."""

    process: Name
    """Unit and comm of the process that waits for the first lock of each chain."""
    end: Link
    cause: str
    """What the holder of the last lock of each chain did."""
    chains: dict[Chain, float] = field(default_factory=dict)
    """The time for which the process waited because of this code, in nanoseconds, by chain. A chain begins
    with the lock that the process waits for, and ends with `end`."""

    @property
    def waited_ns(self) -> float:
        return sum(self.chains.values())


class LockGraph:
    """The locks for which threads wait, and the locks for which their holders wait.

    `locks` is the table of locks.
    """

    def __init__(self, locks: Table) -> None:
        self.holders: dict[int, HoldersOfLock] = {
            int(row): locks["holders"][row] for row in np.flatnonzero(locks.used) if locks["holders"][row]
        }
        """The holders of each lock, by the lock's row in the table of locks."""
        rows = sorted(self.holders, key=lambda row: self.holders[row].waited_ns, reverse=True)
        self.rows = _fair_part(rows, [locks["process"][row] for row in rows], MOST_FOLLOWED)
        """The rows of the locks whose chains are followed, those with the longest waits first."""
        self.steps = 0
        """How often time was passed on to another lock so far."""
        self.last_step = MOST_STEPS
        """The number of steps at which chains end at the locks that they have reached."""
        self._row_of: dict[NextLock, int] = {}
        for row in rows:
            tgid = 0 if locks["program"][row] == IN_KERNEL else int(locks["tgid"][row])
            self._row_of.setdefault(NextLock(tgid, int(locks["address"][row])), row)

    def ends(self, row: int, before: Chain = (), share: float = 1.0) -> Iterator[tuple[Chain, str, float]]:
        """Yield (chain, cause, part) for each chain that begins with `before` and goes on with lock `row`.

        The cause is what the last holder of the chain did. The parts add up to `share`.
        """
        holders = self.holders[row]
        passed = {row, *(link.row for link in before)}
        waited_ns = holders.waited_ns
        for part in holders.parts():
            chain = (*before, Link(row, part.site))
            of_part = share * part.waited_ns / waited_ns
            following = self._row_of.get(part.next_lock) if part.next_lock else None
            is_too_far = len(chain) == MOST_LOCKS or of_part < LEAST_SHARE or self.steps == self.last_step
            if following is None or following in passed or is_too_far:
                yield chain, part.cause, of_part
            else:
                self.steps += 1
                yield from self.ends(following, chain, of_part)


def _fair_part(ordered: Sequence[Item], processes: Sequence[Name], most: int) -> list[Item]:
    """Return up to `most` of the `ordered` items, in their order; `processes` are those of the items.

    Up to half of them are the first ranking.FLOOR items of each process, so that a query for one unit finds
    it on a busy host as well. The others are the first of the rest.
    """
    if len(ordered) <= most:
        return list(ordered)
    numbers: dict[Name, int] = {}
    owners = np.array([numbers.setdefault(process, len(numbers)) for process in processes])
    alike, has_floor = np.zeros(len(ordered), np.int64), np.ones(len(ordered), np.bool_)
    chosen = rank(alike, -np.arange(len(ordered), dtype=np.float64), owners, has_floor, most // 2)[:most]
    return [ordered[at] for at in np.sort(chosen)]


def find_bottlenecks(locks: Table) -> list[Bottleneck]:
    """Return the ends of all chains, those with the most time first. `locks` is the table of locks."""
    graph = LockGraph(locks)
    found: dict[tuple[Name, Link, str], Bottleneck] = {}
    # The locks with the longest waits come last, as they have most use for the steps that others leave over.
    for left, row in zip(range(len(graph.rows), 0, -1), reversed(graph.rows), strict=True):
        graph.last_step = graph.steps + (MOST_STEPS - graph.steps) // left
        for chain, cause, share in graph.ends(row):
            end = locks["process"][row], chain[-1], cause
            chains = found.setdefault(end, Bottleneck(*end)).chains
            chains[chain] = chains.get(chain, 0.0) + share * graph.holders[row].waited_ns
    return sorted(found.values(), key=lambda one: one.waited_ns, reverse=True)


def bottlenecks_table(locks: Table, arrays: dict[str, npt.NDArray[Any]]) -> dict[str, Any]:
    """Return the table behind /api/v1/bottlenecks, and add its numbers to `arrays`."""
    found = find_bottlenecks(locks)
    of_unit: dict[str, float] = defaultdict(float)
    for one in found:
        of_unit[one.process[0]] += one.waited_ns
    shown = _fair_part(found, [one.process for one in found], SHOWN)
    arrays["bottlenecks.seconds"] = np.array([one.waited_ns / 1e9 for one in shown])
    arrays["bottlenecks.share"] = np.array([one.waited_ns / of_unit[one.process[0]] for one in shown])
    ends = [_described(locks, one.end) for one in shown]
    return {
        "text": {
            "unit": [one.process[0] for one in shown],
            "comm": [one.process[1] for one in shown],
            **{column: [end[column] for end in ends] for column in ("lock", "kind", "holder")},
            "cause": [one.cause for one in shown],
        },
        "numbers": ["seconds", "share"],
        "lists": {"chains": [_chains(locks, one.chains) for one in shown]},
    }


def _chains(locks: Table, chains: Mapping[Chain, float]) -> list[dict[str, Any]]:
    longest = sorted(chains.items(), key=lambda one: one[1], reverse=True)[:SHOWN_CHAINS]
    return [
        {"seconds": waited_ns / 1e9, "locks": [_described(locks, link) for link in chain]}
        for chain, waited_ns in longest
    ]


def _described(locks: Table, link: Link) -> dict[str, str]:
    name, kind = str(locks["lock"][link.row] or ""), str(locks["kind"][link.row])
    return {"lock": name, "kind": kind, "holder": link.site}
