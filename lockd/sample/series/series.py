"""The exported series: which label sets have a series of their own, and the numbers of each series.

Totals are exact and the number of series is bounded. A label set without a series of its own counts in the
series of its unit, or else in the series whose name labels are all `other`. Each increment goes to one
series, which is chosen when it happens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from lockd.columns import wide_sums
from lockd.columns.index import Hashes, Index, Rows
from lockd.process.clock import NS
from lockd.sample.series.limits import OPEN_SHARE, LineBudget
from lockd.sample.series.maxima import Maxima
from lockd.sample.series.ranking import (
    EARNED_NS,
    GONE,
    HALF_LIFE,
    LASTS,
    MEMORY_NS,
    STAYS,
    THERE,
    Presence,
    rank,
)

OTHER = "other"
SHOWN_SECONDS = 30.0
"""Seconds for which a displaced series is still exported with its last numbers, so that every scrape sees
them."""
REMEMBERED_SECONDS = 120.0
"""Seconds without an event after which a label set without a series is forgotten."""
MOST_REFUSED = 20_000
"""Most label sets without a series that are remembered: a host can have any number of names in time."""
MOST_RETIRED = 1000
"""Most retired series whose counts are remembered. A series that returns goes on with its counts."""

_FREE, _OTHER, _NAMED = range(3)
_NOWHERE = -1
_ENTRY = {
    "state": (np.int8, _FREE),
    "seen": (np.float64, 0.0),  # when the label set last had an event or ongoing wait
    "waited": (np.float64, 0.0),  # ns of waits that have ended; halved every HALF_LIFE
    "going_on": (np.float64, 0.0),  # ns of the ongoing waits, as last noted
    "row": (np.int64, _NOWHERE),  # the label set's own row
    "displaced": (np.float64, np.inf),  # when the label set last counted in its own row, if no longer
    "unit": (np.int64, _NOWHERE),  # the entry of the label set's unit
    "other": (np.int64, _NOWHERE),  # the row to count in if the unit too has no row
    "target": (np.int64, _NOWHERE),  # the row in which the label set counts at present
}
"""The columns of an entry: the type of each, and its value where there is no entry."""


class Series:
    """One family of metrics with the same labels: one row for each label set that has a series of its own.

    - `columns` are the numpy columns with the numbers of each row. `counters` are those that only grow, with
      the name of the metric that each is exported as. Counters of times are called `..._ns` and are wide sums
      (lockd/columns/wide_sums.py).
    - `names` are the positions of the labels that become `other`; the first is that of the unit.
    - `lines` is how many lines of /metrics one row takes of `budget`. Lines for `others` rows called `other`
      are always there.
    - `maxima` are the names of sliding maxima, each kept over every window in `windows` (seconds by label).
    - `most` is given for series of locks: the most rows besides `other`. They go to the locks that are waited
      for most. Without `most` the rows are for processes: processes without a row count in one row of their
      unit. Label sets whose third label is one of `uncontended` rank behind others.

    Every label set has an entry, with or without a row of its own. Its `target` is the row in which it
    counts.
    """

    def __init__(
        self,
        family: str,
        columns: Mapping[str, Any],
        *,
        counters: Mapping[str, str],
        names: tuple[int, ...],
        lines: int,
        budget: LineBudget,
        others: int,
        most: int | None = None,
        uncontended: Collection[str] = (),
        maxima: tuple[str, ...] = (),
        windows: Mapping[str, float] | None = None,
    ) -> None:
        self.family = family
        self.lines = lines
        self.overflowed = 0
        """How often a label set got no series of its own."""
        self.retired = 0
        """How many series have been retired."""
        self.labels: list[tuple[str, ...] | None] = []
        """The labels of each row; None for a free row."""
        self.columns = {name: np.zeros((64, *_shape(kind)), _dtype(kind)) for name, kind in columns.items()}
        self.maxima = {
            name: {window: Maxima(seconds) for window, seconds in (windows or {}).items()} for name in maxima
        }
        self.names = names
        self._counters = counters
        self._most = most
        self._uncontended = uncontended
        self._budget = budget
        budget.enter(family, others * lines)
        self._row_of: dict[tuple[str, ...], int] = {}
        self._free_rows: list[int] = []
        self._retired_counts: dict[tuple[str, ...], npt.NDArray[np.int64]] = {}
        """The counts of retired rows by label set, the oldest first."""
        self._retired_values = dict.fromkeys(counters, 0)
        self._index = Index()
        self._entry_of: dict[tuple[str, ...], int] = {}
        self._entry_labels: list[tuple[str, ...]] = []
        self._entries: dict[str, npt.NDArray[Any]] = {
            name: np.full(64, empty, dtype) for name, (dtype, empty) in _ENTRY.items()
        }
        self._free_entries: list[int] = []
        self._own = 0
        """The number of label sets that count in rows of their own, without those called `other`."""
        self._decayed_at = 0.0
        """When the column `waited` was last decayed (monotonic clock in seconds)."""

    def __getitem__(self, column: str) -> npt.NDArray[Any]:
        return self.columns[column]

    def __len__(self) -> int:
        return len(self._row_of)

    @property
    def exported_lines(self) -> int:
        return len(self) * self.lines

    @property
    def size(self) -> int:
        """One more than the highest row."""
        return len(self.labels)

    def rows(
        self, keys: Hashes, labels: Callable[[int], tuple[str, ...]], weights: npt.NDArray[Any], now: float
    ) -> Rows:
        """The row in which each label set counts, for waits that have ended.

        `keys` are hashes of the label sets, and `labels(i)` returns the i-th one. `weights` are what
        the waits add to the merits (ranking.merits()), in nanoseconds.
        """
        return self._rows(keys, labels, weights, now, "waited")

    def waiting_rows(
        self, keys: Hashes, labels: Callable[[int], tuple[str, ...]], waited_ns: npt.NDArray[Any], now: float
    ) -> Rows:
        """The row in which each label set counts, for one ongoing wait each. Call clear_waiting() before.

        `keys` and `labels` are as in rows(). `waited_ns` are the times so far, which count in the merits.
        """
        return self._rows(keys, labels, np.minimum(waited_ns, MEMORY_NS), now, "going_on")

    def row(self, labels: tuple[str, ...], now: float) -> int:
        """The row in which one label set counts."""
        entry = self._entry(labels)
        self._entries["seen"][entry] = now
        return int(self._entries["target"][entry])

    def find(self, keys: Hashes) -> Rows:
        """The row in which each label set counts at present, by its hash; -1 for an unknown label set."""
        entries = self._index.find(keys)
        return np.where(entries >= 0, self._entries["target"][entries], _NOWHERE)

    def rearrange(self, presence: Presence, idle_seconds: float, now: float) -> None:
        """Retire series of ended processes and series that were displaced SHOWN_SECONDS ago. Give rows to
        the label sets that rank first. Call it every few seconds."""
        entries = self._entries
        entries["waited"] *= 0.5 ** ((now - self._decayed_at) / HALF_LIFE)
        self._decayed_at = now
        named = np.flatnonzero(entries["state"] == _NAMED)
        if not len(named):
            self._budget.note_lack(self.family, 0)
            return
        self._update_units(named)
        stays = np.array([_presence_of(self._entry_labels[entry], presence) for entry in named], np.int64)
        is_shown = entries["row"][named] >= 0
        displaced, seen = entries["displaced"][named], entries["seen"][named]
        has_faded = displaced <= now - SHOWN_SECONDS
        has_ended = (seen < now - idle_seconds) & (stays == GONE)
        self._retire(named[is_shown & (has_faded | has_ended)])
        stays = np.maximum(stays, np.where(seen >= now - SHOWN_SECONDS, THERE, GONE))
        self._yield_lines(named[stays == GONE])
        self._compete(named, stays)
        self._forget_refused(named, now)
        self._choose_targets()

    def seconds(self, column: str, rows: Rows) -> npt.NDArray[np.float64]:
        """The values of a counter of times, given by its column, in these rows, in seconds."""
        nanoseconds: npt.NDArray[np.float64] = wide_sums.to_floats(self.columns[column])[rows]
        return nanoseconds / NS

    def retired_values(self) -> dict[str, float]:
        """By metric, the total that retired series had counted; times are in seconds."""
        values = self._retired_values
        return {
            metric: values[column] / (NS if column.endswith("_ns") else 1)
            for column, metric in self._counters.items()
        }

    def note_max(self, name: str, rows: Rows, values: npt.NDArray[np.int64]) -> None:
        for maxima in self.maxima[name].values():
            maxima.note(rows, values)

    def keep_windows(self, windows: Mapping[str, float]) -> None:
        """Keep maxima over these windows from now on. New windows begin empty.

        There must be no more windows than at first: `lines` counts those.
        """
        for name, by_window in self.maxima.items():
            self.maxima[name] = {
                window: by_window.get(window) or Maxima(seconds) for window, seconds in windows.items()
            }

    def advance(self, now: float) -> None:
        for windows in self.maxima.values():
            for maxima in windows.values():
                maxima.advance(now)

    def clear_waiting(self) -> None:
        """Forget all ongoing waits, before those that go on now are noted."""
        self.columns["waiting"][:] = 0
        self.columns["waiting_ns"][:] = 0
        self._entries["going_on"][:] = 0

    def current_max(self, name: str, rows: Rows) -> dict[str, npt.NDArray[np.int64]]:
        """By window, the maximum `name` of each row, in nanoseconds.

        Ongoing waits count as well. They are in the column `waiting_ns`, which not every family has.
        """
        waiting = self.columns["waiting_ns"][rows] if "waiting_ns" in self.columns else 0
        return {
            window: np.maximum(maxima.values(rows), waiting) for window, maxima in self.maxima[name].items()
        }

    def live(self) -> tuple[Rows, list[tuple[str, ...]]]:
        """The rows in use, and the label set of each, in the same order."""
        labels = list(self._row_of)
        return np.fromiter(self._row_of.values(), np.int64, len(labels)), labels

    @property
    def form(self) -> list[Any]:
        """The names and widths of the counters, and the names and windows of the maxima.

        restore() can take over only what was saved by series of the same form.
        """
        return [
            list(self._counters),
            self._widths,
            [[name, list(maxima)] for name, maxima in self.maxima.items()],
        ]

    def save(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        """All counts and the label sets they belong to, as a JSON head and arrays for restore()."""
        rows, labels = self.live()
        entries = np.array([self._entry_of[label] for label in labels], np.int64)
        arrays = {
            "counted": self._counted(rows),
            "gone": np.array(list(self._retired_counts.values()), np.int64),
            "waited": self._entries["waited"][entries],
            "displaced": np.nan_to_num(self._entries["displaced"][entries], posinf=-1.0),
        }
        for name, windows in self.maxima.items():
            for window, maxima in windows.items():
                arrays[f"{name} {window}"] = maxima.save(rows)
        return {
            "labels": labels,
            "gone": list(self._retired_counts),
            "retired": self.retired,
            "overflowed": self.overflowed,
            "retired_values": self._retired_values,
            "parts": {name: {w: m.part for w, m in ms.items()} for name, ms in self.maxima.items()},
        }, arrays

    def restore(self, head: dict[str, Any], arrays: Mapping[str, npt.NDArray[Any]], now: float) -> None:
        """Take over what save() returned for series with the same `form`.

        Call this before anything is counted. `now` is the monotonic clock in seconds.
        """
        entries = []
        for labels in map(tuple, head["labels"]):
            entries.append(self._new_entry(labels))
            self._give_row(entries[-1])
        which = np.array(entries, np.int64)
        rows = self._entries["row"][which]
        self._entries["seen"][which] = self._decayed_at = now
        self._entries["waited"][which] = arrays["waited"]
        self._set_counted(rows, arrays["counted"].reshape(len(rows), sum(self._widths)))
        displaced = arrays["displaced"] >= 0
        self._displace(which[displaced])
        self._entries["displaced"][which[displaced]] = arrays["displaced"][displaced]
        gone = arrays["gone"].reshape(len(head["gone"]), sum(self._widths))
        self._retired_counts = {
            # A view would keep everything that was saved in memory.
            tuple(labels): values.copy()
            for labels, values in zip(head["gone"], gone, strict=True)
        }
        self.retired, self.overflowed = head["retired"], head["overflowed"]
        self._retired_values = dict(head["retired_values"])
        for name, windows in self.maxima.items():
            for window, maxima in windows.items():
                maxima.restore(rows, arrays[f"{name} {window}"], head["parts"][name][window])

    def _counted(self, rows: Rows) -> npt.NDArray[np.int64]:
        """The counts of rows as an array with one row for each, its counters one after another."""
        columns = zip(self._counters, self._widths, strict=True)
        return np.concatenate([self.columns[name][rows].reshape(len(rows), w) for name, w in columns], axis=1)

    @property
    def _widths(self) -> list[int]:
        """How many numbers one row has in each counter."""
        return [self.columns[name][0].size for name in self._counters]

    def _set_counted(self, rows: Rows, counted: npt.NDArray[np.int64]) -> None:
        at = 0
        for name, width in zip(self._counters, self._widths, strict=True):
            column = self.columns[name]
            column[rows] = counted[:, at : at + width].reshape(len(rows), *column.shape[1:])
            at += width

    def _is_other(self, labels: tuple[str, ...]) -> bool:
        return all(labels[position] == OTHER for position in self.names)

    def _rows(
        self, keys: Hashes, labels: Callable[[int], tuple[str, ...]], weights: npt.NDArray[Any], now: float,
        column: str,
    ) -> Rows:  # fmt: skip
        found = self._index.find(keys)
        if (found < 0).any():
            unknown = np.flatnonzero(found < 0)
            fresh, first, inverse = np.unique(keys[unknown], return_index=True, return_inverse=True)
            numbers = np.array([self._entry(labels(int(unknown[position]))) for position in first], np.int64)
            self._index.add(fresh, numbers)
            found[unknown] = numbers[inverse]
        entries = self._entries
        entries["seen"][found] = now
        entries[column] += np.bincount(found, weights, minlength=len(entries[column]))
        targets: Rows = entries["target"][found]
        return targets

    def _entry(self, labels: tuple[str, ...]) -> int:
        """The entry of a label set. A new entry gets a row of its own if _is_open(), or if it is called
        `other`."""
        entry = self._entry_of.get(labels)
        if entry is None:
            entry = self._new_entry(labels)
            if self._is_other(labels) or self._is_open():
                self._give_row(entry)
            else:
                self.overflowed += 1
                self._share_row(entry)
        return entry

    def _is_open(self) -> bool:
        """Whether there is so much room that every new label set gets a row of its own at once."""
        if self._most is not None and self._own >= self._most:
            return False
        return self._budget.room(self.family, OPEN_SHARE) >= self.lines

    def _new_entry(self, labels: tuple[str, ...]) -> int:
        if self._free_entries:
            entry = self._free_entries.pop()
            self._entry_labels[entry] = labels
        else:
            entry = len(self._entry_labels)
            self._entry_labels.append(labels)
            if entry >= len(self._entries["seen"]):
                for name, (_, empty) in _ENTRY.items():
                    column = self._entries[name]
                    self._entries[name] = np.concatenate([column, np.full_like(column, empty)])
        self._entry_of[labels] = entry
        self._entries["state"][entry] = _OTHER if self._is_other(labels) else _NAMED
        return entry

    def _give_row(self, entry: int) -> None:
        """Let an entry count in a row of its own. The counts of a row that it had before go on there."""
        entries = self._entries
        if entries["row"][entry] < 0:
            entries["row"][entry] = self._new_row(self._entry_labels[entry])
        entries["target"][entry] = entries["row"][entry]
        entries["displaced"][entry] = np.inf
        self._own += entries["state"][entry] == _NAMED

    def _new_row(self, labels: tuple[str, ...]) -> int:
        if self._free_rows:
            row = self._free_rows.pop()
            self.labels[row] = labels
        else:
            row = len(self.labels)
            self.labels.append(labels)
            for name, column in self.columns.items():
                if row >= len(column):
                    self.columns[name] = np.concatenate([column, np.zeros_like(column)])
        self._row_of[labels] = row
        if not self._is_other(labels):
            self._budget.take(self.family, self.lines)
        if (counts := self._retired_counts.pop(labels, None)) is not None:
            self._set_counted(np.array([row]), counts[None])
            self._add_to_retired_values(counts[None], -1)
        return row

    def _share_row(self, entry: int) -> None:
        """Let an entry count in the row of its unit if there is one, else in the row called `other`."""
        labels, entries = self._entry_labels[entry], self._entries
        other = self._entry(tuple(OTHER if i in self.names else label for i, label in enumerate(labels)))
        entries = self._entries  # _entry() may have replaced the arrays
        entries["other"][entry] = entries["target"][entry] = entries["row"][other]
        of_unit = tuple(OTHER if i in self.names[1:] else label for i, label in enumerate(labels))
        if self._most is not None or of_unit == labels:
            return
        unit = self._entry_of.get(of_unit)
        if unit is None:
            unit = self._new_entry(of_unit)
            self._share_row(unit)
            entries = self._entries
        entries["unit"][entry] = unit
        # The unit's `other` is not set yet if the unit has always had its own row, as after restore().
        entries["other"][unit] = entries["other"][entry]
        if entries["row"][unit] >= 0 and np.isinf(entries["displaced"][unit]):
            entries["target"][entry] = entries["row"][unit]

    def _choose_targets(self) -> None:
        """Set the target of every entry without a row of its own."""
        entries = self._entries
        is_own = (entries["row"] >= 0) & np.isinf(entries["displaced"])
        shares = np.flatnonzero((entries["state"] == _NAMED) & ~is_own)
        units = entries["unit"][shares]
        in_unit = (units >= 0) & is_own[units]
        entries["target"][shares] = np.where(in_unit, entries["row"][units], entries["other"][shares])

    def _update_units(self, named: Rows) -> None:
        """Raise `seen` of each unit's entry to the latest `seen` of the unit's entries without rows of their
        own to count in."""
        entries = self._entries
        members = named[(entries["unit"][named] >= 0) & (entries["target"][named] != entries["row"][named])]
        np.maximum.at(entries["seen"], entries["unit"][members], entries["seen"][members])

    def _merits(self) -> npt.NDArray[np.float64]:
        """The merit of each entry (ranking.py), in nanoseconds. The merit of a unit's entry includes those of
        the unit's entries that do not count in rows of their own."""
        entries = self._entries
        merits: npt.NDArray[np.float64] = entries["waited"] + entries["going_on"]
        members = np.flatnonzero((entries["unit"] >= 0) & (entries["target"] != entries["row"]))
        np.add.at(merits, entries["unit"][members], merits[members])
        return merits

    def _yield_lines(self, gone: Rows) -> None:
        """Retire series of ended processes, to give other families the lines that they have a right to."""
        due = -(-self._budget.due_to_others(self.family) // self.lines)
        if due > 0:
            shown = gone[self._entries["row"][gone] >= 0]
            self._retire(shown[np.argsort(self._merits()[shown], kind="stable")][:due])

    def _compete(self, named: Rows, stays: npt.NDArray[np.int64]) -> None:
        """Give the rows to the entries that rank first. `stays` is the presence of each of the entries
        `named`."""
        entries, merits = self._entries, self._merits()
        is_own = (entries["row"][named] >= 0) & np.isinf(entries["displaced"][named])
        has_earned = merits[named] >= EARNED_NS
        wants = ~is_own & (has_earned if self._most is not None else stays == LASTS)
        self._budget.note_lack(self.family, 0)
        if not wants.any():
            return
        chosen = np.flatnonzero(is_own | wants)
        which, is_own, stays = named[chosen], is_own[chosen], stays[chosen]
        labels = [self._entry_labels[entry] for entry in which]
        merit = np.where(is_own, STAYS * merits[which], np.where(has_earned[chosen], merits[which], -1.0))
        contended = merit >= EARNED_NS
        if self._uncontended:
            contended &= np.array([label[2] not in self._uncontended for label in labels])
        owners = np.unique([label[0] or label[1] for label in labels], return_inverse=True)[1]
        fading = np.count_nonzero(np.isfinite(entries["displaced"][named])) * self.lines
        limit = self._own + int((self._budget.room(self.family) + fading) // self.lines)
        if self._most is not None:
            limit = min(limit, self._most)
            tiers, has_floor, floors = 3 * contended + stays, contended, limit // 2
        else:
            is_unit = np.array([label[1] == OTHER for label in labels])
            tiers, has_floor, floors = 2 * stays + contended, (stays == LASTS) & ~is_unit, limit
        order = rank(tiers, merit, owners, has_floor, floors)
        first, last = order[: max(limit, 0)], order[max(limit, 0) :]
        winners = first[~is_own[first]]
        losers = last[is_own[last]][::-1][: max(len(winners) - max(limit - self._own, 0), 0)]
        self._displace(which[losers[stays[losers] != GONE]])
        self._retire(which[losers[stays[losers] == GONE]])
        for entry in which[winners].tolist():
            if entries["row"][entry] >= 0 or self._budget.room(self.family) >= self.lines:
                self._give_row(entry)
        lacking = which[winners if self._most is not None else ~is_own]
        self._budget.note_lack(self.family, np.count_nonzero(entries["row"][lacking] < 0) * self.lines)

    def _displace(self, which: Rows) -> None:
        """Let entries count in rows that are not their own. Their own rows stay for SHOWN_SECONDS, so that
        scrapes see the last numbers."""
        self._own -= len(which)
        self._entries["displaced"][which] = self._entries["seen"][which]
        for entry in which.tolist():
            self._share_row(entry)

    def _retire(self, which: Rows) -> None:
        """Take the rows from entries, and remember the counts."""
        if not len(which):
            return
        self._move_maxima(which)
        entries = self._entries
        rows = entries["row"][which].copy()
        counted = self._counted(rows)
        self._add_to_retired_values(counted, 1)
        for row, counts in zip(rows.tolist(), counted, strict=True):
            labels = self.labels[row]
            assert labels is not None
            del self._row_of[labels]
            self.labels[row] = None
            self._retired_counts[labels] = counts.copy()  # a view would keep the counts of all rows in memory
        while len(self._retired_counts) > MOST_RETIRED:
            del self._retired_counts[next(iter(self._retired_counts))]
        for column in self.columns.values():
            column[rows] = 0
        self._free_rows += rows.tolist()
        self.retired += len(rows)
        self._budget.take(self.family, -len(rows) * self.lines)
        self._own -= int(np.count_nonzero(np.isinf(entries["displaced"][which])))
        entries["row"][which] = _NOWHERE
        entries["displaced"][which] = np.inf

    def _move_maxima(self, which: Rows) -> None:
        """Move the maxima of entries that lose their rows into the rows in which their next events count."""
        entries, all_maxima = self._entries, [one for by in self.maxima.values() for one in by.values()]
        lost = entries["row"][which]
        has_any = np.zeros(len(which), np.bool_)
        for maxima in all_maxima:
            has_any |= maxima.values(lost) > 0
        which, rows = which[has_any], lost[has_any]
        for entry in which[np.isinf(entries["displaced"][which])].tolist():  # the others share a row already
            self._share_row(entry)
        shared = entries["target"][which]
        into = np.where(
            np.isin(shared, lost), entries["other"][which], shared
        )  # a unit can lose its row, too
        for maxima in all_maxima:
            maxima.move(rows, into)

    def _add_to_retired_values(self, counted: npt.NDArray[np.int64], sign: int) -> None:
        """Add the counts of rows to the totals of retired series, or subtract them if `sign` is -1."""
        parts = np.split(counted, np.cumsum(self._widths)[:-1], axis=1)
        for name, values in zip(self._counters, parts, strict=True):
            total = sum(wide_sums.to_ints(values)) if name.endswith("_ns") else int(values.sum())
            self._retired_values[name] += sign * total

    def _forget_refused(self, named: Rows, now: float) -> None:
        """Forget entries without rows that had no event for REMEMBERED_SECONDS, and the oldest ones above
        MOST_REFUSED. If there is room, forget all entries without rows: at their next event they get rows."""
        entries = self._entries
        refused = named[(entries["row"][named] < 0) & (entries["state"][named] == _NAMED)]
        if not len(refused):
            return
        seen = entries["seen"][refused]
        if not self._is_open():
            oldest = np.sort(seen)[-MOST_REFUSED] if len(seen) > MOST_REFUSED else -np.inf
            never_shared = entries["other"][refused] < 0  # just retired, without maxima
            refused = refused[(seen < now - REMEMBERED_SECONDS) | (seen < oldest) | never_shared]
        is_wanted = np.ones(len(entries["state"]), np.bool_)
        is_wanted[refused] = False
        self._index.keep(is_wanted)
        entries["unit"][np.isin(entries["unit"], refused)] = _NOWHERE
        for name, (_, empty) in _ENTRY.items():
            entries[name][refused] = empty
        for entry in refused.tolist():
            del self._entry_of[self._entry_labels[entry]]
        self._free_entries += refused.tolist()


def _presence_of(labels: tuple[str, ...], presence: Presence) -> int:
    unit, comm = labels[:2]
    return presence.unit_state(unit) if comm == OTHER else presence.state((unit, comm))


def _shape(kind: Any) -> tuple[int, ...]:
    return kind[1] if isinstance(kind, tuple) else ()


def _dtype(kind: Any) -> Any:
    return kind[0] if isinstance(kind, tuple) else kind
