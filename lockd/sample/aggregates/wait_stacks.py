"""Stacks of waits off the CPU: exact times by process and reason, which samples divide among stacks."""

from __future__ import annotations

import array
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lockd.columns import wide_sums
from lockd.columns.index import Groups, Hashes, Rows, mix
from lockd.columns.structs import Columns
from lockd.columns.table import Table
from lockd.columns.wide_sums import WIDE
from lockd.names.labels.processes import Name
from lockd.names.labels.reasons import REASONS
from lockd.sample.aggregates.contention import OFFCPU
from lockd.sample.aggregates.identities import ProcessNames
from lockd.sample.series.label_hash import hash_labels
from lockd.sample.series.series import OTHER

MOST_GROUPS = 5000
"""Most groups (unit, comm, reason) that are counted by themselves."""
KEPT_GROUPS = MOST_GROUPS * 3 // 4
"""The number of groups that stay when there are more than MOST_GROUPS: those with the latest waits."""
MOST_STACKS = 20_000
"""Most combinations of a group, stack, waker and stack of the waker that are kept. If there are more, the
half with the least weight counts as OTHER_STACKS."""
MOST_SENT = 5000
"""Most combinations (as in MOST_STACKS) that are sent in one answer, besides OTHER_STACKS of each group."""


class CallStack(NamedTuple):
    """The functions that a thread is in, innermost first."""

    user: tuple[str, ...]
    kernel: tuple[str, ...]


NO_STACK = CallStack((), ())
OTHER_STACKS = CallStack(("[other stacks]",), ())
"""Stands for all stacks of a group that are not kept, or not sent."""


class WaitSample(NamedTuple):
    """A sampled wait off the CPU that has ended."""

    process: Name
    reason: str
    """A key of REASONS."""
    weight_ns: int
    """The time of all waits for which the sample stands, in nanoseconds."""
    stack: CallStack
    """The stack of the thread that waited."""
    waker: str
    """The comm of the process that woke the thread; `irq` for an interrupt, empty if that was not seen."""
    waker_stack: CallStack
    """The stack of the thread that woke it; empty for an interrupt."""


class _Place(NamedTuple):
    """Where threads of a group waited, and who woke them up there."""

    group: int
    """The row of the group."""
    stack: CallStack
    waker: str
    waker_stack: CallStack


class _Weight(NamedTuple):
    """What the samples of one place add up to."""

    ns: int
    samples: int


class WaitStacks:
    """The waits off the CPU since lockd started, in groups by unit, comm and reason.

    The times and counts of groups are exact. The samples of a group tell how its time is divided among
    stacks. The numbers of groups and of stacks are bounded. The groups that have had no wait for the longest
    time count as (other, other, reason), and the stacks of least weight as OTHER_STACKS of their group.
    """

    def __init__(self) -> None:
        # The table never drops rows by itself: their times would be lost.
        self._groups = Table(
            {"process": object, "reason": np.int64, "blocked_ns": WIDE, "count": np.int64}, sys.maxsize
        )
        self._calls = 0
        """The number of calls of _rows(). The table of groups has it in `seen`, in place of a time."""
        self.waits = 0
        """The number of waits that were counted."""
        self._weights: dict[_Place, _Weight] = {}
        self._stacks: dict[CallStack, CallStack] = {}
        """The stacks of `_weights`, so that equal ones share memory."""
        self._functions: dict[str, str] = {}
        """The functions of `_stacks`, so that equal ones share memory."""

    def count(
        self, codes: Hashes, names: ProcessNames, reasons: Columns, blocked_ns: Columns, count: Columns
    ) -> None:
        """Count waits that have ended; the arrays have one item for each row of a window.

        `codes` and `names` are those of the processes, and `reasons` are positions in REASONS.
        """
        rows = self._rows(codes, reasons, names)
        self._add_times(rows, blocked_ns, count)
        self.waits += int(count.sum())
        self._fold_surplus_groups()

    def add(self, samples: Sequence[WaitSample]) -> None:
        """Add samples of waits, which count() counts as well."""
        if not samples:
            return
        numbers = {reason: number for number, reason in enumerate(REASONS)}
        codes = np.array([hash_labels(sample.process) for sample in samples], np.uint64)
        reasons = np.array([numbers[sample.reason] for sample in samples], np.int64)
        names = np.empty(len(samples), object)
        names[:] = [sample.process for sample in samples]
        rows = self._rows(codes, reasons, names)
        for row, sample in zip(rows.tolist(), samples, strict=True):
            stack, waker_stack = self._shared(sample.stack), self._shared(sample.waker_stack)
            _add(self._weights, _Place(row, stack, sample.waker, waker_stack), _Weight(sample.weight_ns, 1))
            if len(self._weights) > MOST_STACKS:
                self._merge_light_stacks()
        self._fold_surplus_groups()

    def block(self, threads: Table) -> tuple[dict[str, Any], dict[str, array.array[int]]]:
        """Everything as JSON and an array: {"functions": [name, ...], "stacks": [[user, kernel], ...],
        "groups": [[unit, comm, reason, blocked_ns, count, waiting], ...], "samples": [[group, stack, waker,
        stack of the waker, weight_ns, samples], ...]} and {"waiting_ns": ...}.

        `user` and `kernel` are lists of positions in `functions`. Groups and stacks of samples are positions
        too. The samples with the most weight come first. `waiting` is the number of threads whose waits have
        not ended, according to `threads` (ContentionTables.threads). The array has how long each of them has
        waited so far: the first `waiting` numbers are those of the first group, and so on. A sum would not
        do, because a profile of N seconds counts each wait with N seconds at most. The times are an array
        because there may be as many as threads.
        """
        rows = np.flatnonzero(self._groups.used)
        number_of = {row: number for number, row in enumerate(rows.tolist())}
        stacks: dict[CallStack, int] = {}
        samples = [
            [
                number_of[place.group],
                stacks.setdefault(place.stack, len(stacks)),
                place.waker,
                stacks.setdefault(place.waker_stack, len(stacks)),
                *weight,
            ]
            for place, weight in _heaviest_first(self._sent_weights().items())
        ]
        functions = _functions(stacks)
        number = {name: number for number, name in enumerate(functions)}.__getitem__
        groups, waiting_ns = self._group_lines(rows, _waits_now(threads))
        return {
            "functions": functions,
            "stacks": [[list(map(number, names)) for names in stack] for stack in stacks],
            "groups": groups,
            "samples": samples,
        }, {"waiting_ns": waiting_ns}

    def _group_lines(
        self, rows: Rows, waiting: dict[tuple[Name, str], array.array[int]]
    ) -> tuple[list[list[Any]], array.array[int]]:
        """The groups of a block, with the ongoing waits of each.

        The groups are those in `rows`, in this order, and then those that have only ongoing waits.
        """
        groups, reasons = self._groups, list(REASONS)
        lines, waiting_ns, none = [], array.array("q"), array.array("q")
        for name, reason, blocked_ns, count in zip(
            groups["process"][rows], groups["reason"][rows].tolist(),
            wide_sums.to_ints(groups["blocked_ns"][rows]), groups["count"][rows].tolist(), strict=True,
        ):  # fmt: skip
            now = waiting.pop((name, reasons[reason]), none)
            lines.append([*name, reasons[reason], blocked_ns, count, len(now)])
            waiting_ns += now
        for (name, reason), now in waiting.items():
            lines.append([*name, reason, 0, 0, len(now)])
            waiting_ns += now
        return lines, waiting_ns

    def _sent_weights(self) -> dict[_Place, _Weight]:
        """The MOST_SENT places with the most weight, and the other places of each group as one."""
        if len(self._weights) <= MOST_SENT:
            return self._weights
        ordered = _heaviest_first(self._weights.items())
        sent = dict(ordered[:MOST_SENT])
        for place, weight in ordered[MOST_SENT:]:
            _add(sent, _rest_of(place), weight)
        return sent

    def _rows(self, codes: Hashes, reasons: Columns, names: ProcessNames | Columns) -> Rows:
        """Return the row of each group; a group without a row gets one."""
        self._calls += 1
        return self._groups.find_or_add(
            mix(codes, reasons),
            self._calls,
            lambda positions: {"process": names[positions], "reason": reasons[positions]},
        )

    def _add_times(self, rows: Rows, blocked_ns: Columns, count: Columns) -> None:
        of_rows = Groups(rows)
        wide_sums.add(self._groups["blocked_ns"], of_rows, blocked_ns)
        self._groups["count"][of_rows.rows] += of_rows.sum(count)

    def _shared(self, stack: CallStack) -> CallStack:
        """Return the equal stack in `_stacks`. If there is none, add an equal one."""
        known = self._stacks.get(stack)
        if known is None:
            share = self._functions.setdefault
            user, kernel = (tuple(share(name, name) for name in names) for names in stack)
            known = CallStack(user, kernel)
            self._stacks[known] = known
        return known

    def _merge_light_stacks(self) -> None:
        """Merge the half of the stacks with the least weight into OTHER_STACKS of their groups."""
        ordered = _heaviest_first(
            (place, weight) for place, weight in self._weights.items() if place.stack != OTHER_STACKS
        )
        for place, weight in ordered[len(ordered) // 2 :]:
            del self._weights[place]
            _add(self._weights, _rest_of(place), weight)
        self._stacks = {stack: stack for place in self._weights for stack in (place.stack, place.waker_stack)}
        self._functions = {name: name for name in _functions(self._stacks)}

    def _fold_surplus_groups(self) -> None:
        """If there are too many groups, let those whose latest wait is the oldest count as (other, other)."""
        groups = self._groups
        if len(groups) <= MOST_GROUPS:
            return
        rows = np.flatnonzero(groups.used)
        rows = rows[[name != (OTHER, OTHER) for name in groups["process"][rows]]]
        rows = rows[np.lexsort((wide_sums.to_floats(groups["blocked_ns"][rows]), groups["seen"][rows]))]
        gone = rows[: max(len(rows) - KEPT_GROUPS, 0)]
        others = self._other_rows(groups["reason"][gone])
        self._add_times(others, groups["blocked_ns"][gone], groups["count"][gone])
        groups.drop(gone)
        moved = dict(zip(gone.tolist(), others.tolist(), strict=True))
        weights, self._weights = self._weights, {}
        for place, weight in weights.items():
            _add(self._weights, place._replace(group=moved.get(place.group, place.group)), weight)

    def _other_rows(self, reasons: npt.NDArray[np.int64]) -> Rows:
        """The row of (other, other) for each reason."""
        names = np.empty(len(reasons), object)
        names[:] = [(OTHER, OTHER)] * len(reasons)
        return self._rows(np.full(len(reasons), hash_labels((OTHER, OTHER)), np.uint64), reasons, names)


def _add(weights: dict[_Place, _Weight], place: _Place, weight: _Weight) -> None:
    ns, samples = weights.get(place, (0, 0))
    weights[place] = _Weight(ns + weight.ns, samples + weight.samples)


def _rest_of(place: _Place) -> _Place:
    """The place that stands for those of the same group that are merged."""
    return _Place(place.group, OTHER_STACKS, "", NO_STACK)


def _heaviest_first(weights: Iterable[tuple[_Place, _Weight]]) -> list[tuple[_Place, _Weight]]:
    return sorted(weights, key=lambda item: item[1].ns, reverse=True)


def _functions(stacks: Iterable[CallStack]) -> list[str]:
    """Every function of the stacks once."""
    return list(dict.fromkeys(chain.from_iterable(chain.from_iterable(stacks))))


def _waits_now(threads: Table) -> dict[tuple[Name, str], array.array[int]]:
    """By process and reason, how long each of the threads off the CPU has waited so far, in ns."""
    found: dict[tuple[Name, str], array.array[int]] = defaultdict(lambda: array.array("q"))
    rows = np.flatnonzero(threads.used & (threads["program"] == OFFCPU) & (threads["waiting_ns"] > 0))
    for name, reason, waiting_ns in zip(
        threads["process"][rows], threads["kind"][rows], threads["waiting_ns"][rows].tolist(), strict=True
    ):
        found[name, reason].append(waiting_ns)
    return found
