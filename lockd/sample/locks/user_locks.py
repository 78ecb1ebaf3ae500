"""Locks in user space by process and address: what each is called, and of what kind it really is."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt

from lockd.columns.index import Hashes, Rows, mix
from lockd.columns.structs import Columns
from lockd.columns.table import Table
from lockd.kernel.maps import HashMap
from lockd.names.client import Resolver
from lockd.names.labels.processes import Name
from lockd.names.protocol import HotSpotPlaces, LockAnswer, UserLockSeen
from lockd.names.unwind.capture import Capture, captures_of
from lockd.sample.series.block import Block
from lockd.sample.series.series import OTHER

HELD_BACK_SECONDS = 5.0
"""At most so long the waits for a lock that was just captured are not counted, until its name and kind are
known: a count is never moved to another series."""
UNCAPTURED_SECONDS = 2.0
"""A lock that was not captured by then is named without its stack."""
CAPTURES_AT_ONCE = 32
"""Locks asked about in one tick; a namer answers for some hundreds in a second."""
ASKED_AT_ONCE = 100
"""Names asked for after one fold of locks that were not captured."""
LASTING_NS = 100_000_000
"""A wait in memory that is used again that has lasted for so long is looked at as it goes on."""
LOOKED_AT_AGAIN = 8
"""Of these at most so many in a second: each takes the namer some milliseconds."""
PROVISIONAL_NS = 1_000_000_000
"""After so long, such a lock is captured again of which nothing certain was found."""
FORGET_AFTER = 60.0
"""Seconds after which the locks of a process that has ended are forgotten."""
ROWS = 50_000
HOTSPOT = tuple(field.name for field in fields(HotSpotPlaces))
"""Members of struct hotspot that the namer tells, in its order."""
JAVA_WAIT_AT, JAVA_IS_NO_OBJECT_AT, JAVA_GENERATION_AT, JAVA_OBJECT_GENERATION_AT = 63, 62, 48, 60
"""Bits of what stands for the address of a lock of Java, see bpf/daemon/hotspot.bpf.c."""
MOST_ADVISED = 100
"""Names of processes with advice that are exported; further ones are `other`."""
SITES = 16
"""Places remembered of each lock."""


class UserLocks:
    """A row for each address and kind by the calls' arguments, the guess: what is used again is another lock.

    `kinds` are the names of enum futex_kind; `is_wanted(tgid)` tells whether to name the process's locks.
    The programs capture a lock again after `captured_again_ns`.
    """

    def __init__(
        self,
        resolver: Resolver,
        known_locks: HashMap,
        hotspots: HashMap,
        kinds: Sequence[str],
        is_wanted: Callable[[int], bool],
        captured_again_ns: int,
        machine: str = os.uname().machine,
    ) -> None:
        self._resolver = resolver
        self._known_locks, self._hotspots = known_locks, hotspots
        self._hotspots_put: dict[int, tuple[int, ...]] = {}
        self.advice: dict[int, str] = {}
        """What is to be known of a process, by its id."""
        self._kinds = list(kinds)
        self._is_wanted = is_wanted
        self._captured_again_ns = captured_again_ns
        self._machine = machine
        self._looked: set[int] = set()
        self._corrections: set[tuple[int, int]] = set()
        """Guesses that were ever wrong, each with the kind that it turned out to be."""
        self._is_corrected = np.zeros(len(kinds), np.bool_)
        """Of each kind, whether it was such a guess."""
        self._changes: set[tuple[int, int]] = set()
        """Guesses and such a kind, where the memory turned out later to be a lock of yet another kind."""
        self._is_lock = np.array([kind in ("lock", "pi") for kind in kinds])
        self.refused = 0
        """Captures that were thrown away, as too much was being asked for."""
        self._table = Table(
            {
                "tgid": np.int64,
                "address": np.uint64,
                "guess": np.int16,
                "kind": np.int16,
                "former_kinds": np.int16,
                "asked_at": np.float64,
                "is_answered": np.bool_,
                "is_provisional": np.bool_,
                "is_reused": np.bool_,
                "lock": object,
                "site": object,
                "stack": object,
                "family": object,
                "sites": object,
            },
            ROWS,
        )

    def capture(self, keys: Columns, captures: Columns, now: float) -> None:
        """Ask for the names of locks that threads were just seen to block on."""
        chosen, too_many = self._chosen(keys["tgid"].tolist())
        self._refuse(keys[too_many])
        if not chosen:
            return
        keys, captures = keys[chosen], captures[chosen]
        fresh = set(keys["tgid"].tolist()) - self._looked
        if fresh:
            self._resolver.look(tuple(fresh))
            self._looked |= fresh
        rows = self._rows(keys["tgid"], keys["uaddr"], keys["guess"].astype(np.int16), now)
        taken = captures_of(captures, self._machine)
        for row, tid, capture in zip(rows.tolist(), captures["tid"].tolist(), taken, strict=True):
            self._ask(row, now, tid, capture)

    def _chosen(self, tgids: list[int]) -> tuple[list[int], list[int]]:
        """Positions of what is to be asked now, and of what there is no room for.

        First one lock of each process, then another of each: one that begins with hundreds of them, as a
        Java machine does, must not keep out all others.
        """
        room = min(CAPTURES_AT_ONCE, self._resolver.room)
        turns, turn = Counter[int](), []
        for tgid in tgids:
            turn.append(turns[tgid])
            turns[tgid] += 1
        processes = {tgid for tgid in turns if self._is_wanted(tgid)}
        wanted = [at for at in sorted(range(len(tgids)), key=turn.__getitem__) if tgids[at] in processes]
        return wanted[:room], wanted[room:]

    def _refuse(self, keys: Columns) -> None:
        """Have these captured again, when a thread next blocks there: what is hot has its turn first."""
        self.refused += len(keys)
        self._known_locks.delete(keys)

    def answer(self, answer: LockAnswer) -> bool:
        """Note what a lock is, if it is still remembered, and let the programs know its kind.

        Whether that is another than was known, or its calls look like.
        """
        row = int(self._table.find(np.array([answer.key], np.uint64))[0])
        if row < 0:
            return False
        table = self._table
        self._note_process(int(table["tgid"][row]), answer)
        kind = self._kinds.index(answer.kind) if answer.kind in self._kinds else int(table["guess"][row])
        is_certain = bool(table["is_answered"][row] and not table["is_provisional"][row])
        is_another = is_certain and answer.is_reused and not answer.is_provisional
        is_another = is_another and kind != table["kind"][row]
        sites = table["sites"][row] = (not is_another and table["sites"][row]) or Counter()
        if answer.site and (answer.site in sites or len(sites) < SITES):
            sites[answer.site] += 1
        if is_certain and not is_another:
            if answer.is_many:  # the programs may have forgotten it
                self._tell_kind(row, int(table["kind"][row]), is_many=True)
            return False  # that a thread waits for it elsewhere changes neither its name nor its kind
        if answer.is_provisional and answer.is_reused:
            self._tell_kind(row, int(table["kind"][row]), self._captured_again_ns - PROVISIONAL_NS)
        if answer.is_provisional and table["is_answered"][row]:
            return False
        table["lock"][row], table["site"][row], table["stack"][row] = answer.lock, answer.site, answer.stack
        table["family"][row], table["is_provisional"][row] = answer.family, answer.is_provisional
        table["is_answered"][row], table["is_reused"][row] = True, answer.is_reused
        is_corrected = kind != table["kind"][row]
        if is_corrected:
            self._change_kind(row, kind)
        if is_corrected or answer.is_many:
            self._tell_kind(row, kind, is_many=answer.is_many)
        return bool(is_corrected)

    def _note_process(self, tgid: int, answer: LockAnswer) -> None:
        if answer.advice:
            self.advice[tgid] = answer.advice
        elif answer.hotspot:  # its names have come; what says nothing of the process takes nothing back
            self.advice.pop(tgid, None)
        if answer.hotspot and self._hotspots_put.get(tgid) != answer.hotspot:
            self._forget_names(tgid, answer.hotspot[HOTSPOT.index("generation")])
            self._hotspots_put[tgid] = answer.hotspot
            key, value = np.zeros(1, self._hotspots.key), np.zeros(1, self._hotspots.value)
            key.view(np.uint32)[0] = tgid
            for name, number in zip(HOTSPOT, answer.hotspot, strict=True):
                value[name] = number
            self._hotspots.update(key, value)

    def _forget_names(self, tgid: int, generation: int) -> None:
        """That a Java machine's locks had when its waits had numbers of this generation, which begins again:
        there are few."""
        table, numbers = self._table, self._table["address"]
        bits = np.where(numbers >> JAVA_IS_NO_OBJECT_AT & 1, JAVA_GENERATION_AT, JAVA_OBJECT_GENERATION_AT)
        is_its = table.used & (table["tgid"] == tgid) & (numbers >> JAVA_WAIT_AT > 0)
        is_its &= numbers >> bits.astype(np.uint64) & 3 == generation
        for row in np.flatnonzero(is_its):
            self._known_locks.delete(self._key_of(int(row)))
        table["asked_at"][is_its], table["is_answered"][is_its] = 0, False

    def _change_kind(self, row: int, kind: int) -> None:
        guess, before = int(self._table["guess"][row]), int(self._table["kind"][row])
        self._table["kind"][row] = kind
        self._is_corrected[guess] = True
        if kind != guess:
            self._corrections.add((guess, kind))
            self._table["former_kinds"][row] &= ~(1 << kind)
        if before != guess:
            self._changes.add((guess, before))
            self._table["former_kinds"][row] |= 1 << before

    def _tell_kind(self, row: int, kind: int, ago_ns: int = 0, is_many: bool = False) -> None:
        """Have the programs count its waits so, as if it had been captured so long ago."""
        known = np.zeros(1, self._known_locks.value)
        known["kind"], known["is_many"] = kind, is_many
        known["captured"] = max(time.monotonic_ns() - ago_ns, 0)
        self._known_locks.update(self._key_of(row), known)

    def look_again(
        self, tids: Columns, tgids: Columns, addresses: Columns, guesses: Columns, waited_ns: Columns,
        thread_pointers: Columns, now: float,
    ) -> None:  # fmt: skip
        """Look at some waits that go on, where what is known may be of a lock that was in that memory before.

        At each once, and if nothing certain was found, again whenever it has lasted twice as long.
        """
        table = self._table
        if self._resolver.is_paused or not table["is_reused"].any():
            return
        rows = table.find(mix(tgids, addresses, guesses))
        waited = waited_ns / 1e9
        looked_after = table["asked_at"][rows] - (now - waited)
        is_due = (looked_after < 0) | (table["is_provisional"][rows] & (waited >= 2 * looked_after))
        is_due &= (rows >= 0) & table["is_reused"][rows] & (waited_ns >= LASTING_NS) & (thread_pointers > 0)
        due = np.flatnonzero(is_due)
        due = due[np.lexsort((-waited_ns[due], ~self._is_lock[table["kind"][rows[due]]]))]
        _, first = np.unique(rows[due], return_index=True)
        for at in due[np.sort(first)][: min(LOOKED_AT_AGAIN, self._resolver.room)].tolist():
            self._ask(int(rows[at]), now, int(tids[at]), sleeper=int(thread_pointers[at]))

    def correct(self, tgids: Columns, addresses: Columns, kinds: Columns) -> Columns:
        """The kinds of waits, where a lock has turned out to be of another than its calls look like."""
        corrected = kinds.copy()
        some = np.flatnonzero(self._is_corrected[kinds])
        if len(some):
            rows = self._table.find(mix(tgids[some], addresses[some], kinds[some]))
            known = rows >= 0
            corrected[some[known]] = self._table["kind"][rows[known]]
        for guess, former in self._changes:
            some = np.flatnonzero(kinds == former)
            rows = self._table.find(mix(tgids[some], addresses[some], np.full(len(some), guess)))
            has_changed = (rows >= 0) & (self._table["former_kinds"][rows] >> former & 1 > 0)
            corrected[some[has_changed]] = self._table["kind"][rows[has_changed]]
        return corrected

    def families(self, tgids: Columns, addresses: Columns, kinds: Columns) -> Columns:
        """What the code of each of these locks is, as its waits' kinds are corrected; empty if not known."""
        table = self._table
        rows = table.find(mix(tgids, addresses, kinds))
        unknown = ((rows < 0) | (table["kind"][rows] != kinds)) & self._is_lock[kinds]
        rows[unknown] = self._corrected(tgids[unknown], addresses[unknown], kinds[unknown])
        known = (rows >= 0) & table["is_answered"][rows] & (table["kind"][rows] == kinds)
        families = np.full(len(rows), "", object)
        families[known] = table["family"][rows[known]]
        return families

    def is_undecided(
        self, tgids: Columns, addresses: Columns, kinds: Columns, now: float
    ) -> npt.NDArray[np.bool_]:
        """Whether the lock of each of these waits may be known in a moment."""
        table = self._table
        recent = (table["asked_at"] > 0) & (table["asked_at"] >= now - HELD_BACK_SECONDS)
        is_open = table.used & recent & ~table["is_answered"]
        if not is_open.any():
            return np.zeros(len(tgids), np.bool_)
        rows = table.find(mix(tgids, addresses, kinds))
        undecided: npt.NDArray[np.bool_] = (rows >= 0) & is_open[rows]
        return undecided

    def known(
        self, tgids: Columns, addresses: Columns, kinds: Columns, since: Columns, now: float
    ) -> Rows:  # fmt: skip
        """The row of each of these locks, -1 where there is no answer. Asks for what was not captured.

        `since` is when a thread was first seen to wait for it.
        """
        table = self._table
        rows = self._corrected(tgids, addresses, kinds)
        table["seen"][rows[rows >= 0]] = now
        is_answered = (rows >= 0) & table["is_answered"][rows]
        is_unsure = table["is_provisional"][rows] & table["is_reused"][rows]
        is_answered &= ~is_unsure | (since <= now - HELD_BACK_SECONDS)
        overdue = np.flatnonzero(~is_answered & (since <= now - UNCAPTURED_SECONDS))
        if len(overdue):
            self._ask_uncaptured(tgids[overdue], addresses[overdue], kinds[overdue], now)
        return np.where(is_answered, rows, -1)

    def _ask_uncaptured(self, tgids: Columns, addresses: Columns, kinds: Columns, now: float) -> None:
        """Ask for the names of some of these locks, unless that was done."""
        rows = self._table.find(mix(tgids, addresses, kinds))
        never = np.flatnonzero((rows < 0) | (self._table["asked_at"][rows] == 0))
        never = never[: min(ASKED_AT_ONCE, self._resolver.room // 2)]
        for row in np.unique(self._rows(tgids[never], addresses[never], kinds[never], now)):
            self._ask(int(row), now)

    def column(self, name: str, row: int) -> Any:
        """`lock`, `site`, `stack` or `family` of a row."""
        return self._table[name][row]

    def export_advice(self, block: Block, name: Callable[[int], Name]) -> None:
        """How many processes there are of each name that somebody has to know something of."""
        found = Counter((*name(tgid), advice) for tgid, advice in self.advice.items())
        shown = Counter(dict(found.most_common(MOST_ADVISED)))
        for (_, _, advice), number in (found - shown).items():
            shown[OTHER, OTHER, advice] += number
        block.add("lockd_advised_processes", list(shown), list(shown.values()))

    def keep(self, alive: set[int], now: float) -> None:
        """Forget the locks of processes that have ended; their ids and addresses will be used again.

        A process that waited a moment ago counts as alive: it may be newer than `alive` is, and waits of one
        that has ended may be held back.
        """
        table = self._table
        recent = table.used & (table["seen"] >= now - HELD_BACK_SECONDS)
        alive = alive.union(table["tgid"][recent].tolist())
        ended = table.used & ~np.isin(table["tgid"], list(alive))
        for row in np.flatnonzero(ended & (table["asked_at"] > 0)):
            self._known_locks.delete(self._key_of(int(row)))
        table["asked_at"][ended] = 0
        table.drop(np.flatnonzero(ended & (table["seen"] < now - FORGET_AFTER)))
        for tgid in (self.advice.keys() | self._hotspots_put.keys()) - alive:
            self.advice.pop(tgid, None)
            if self._hotspots_put.pop(tgid, None):
                key = np.zeros(1, self._hotspots.key)
                key.view(np.uint32)[0] = tgid
                self._hotspots.delete(key)
        if gone := self._looked - alive:
            self._resolver.look((), tuple(gone))
            self._looked -= gone

    def _corrected(self, tgids: Columns, addresses: Columns, kinds: Columns) -> Rows:
        """The row of each lock, first of all the one whose kind has turned out to be this; -1: none."""
        found = self._table.find(mix(tgids, addresses, kinds))
        for guess, kind in self._corrections:
            some = np.flatnonzero(kinds == kind)
            rows = self._table.find(mix(tgids[some], addresses[some], np.full(len(some), guess)))
            is_it = (rows >= 0) & (self._table["kind"][rows] == kind)
            found[some[is_it]] = rows[is_it]
        return found

    def _rows(self, tgids: Columns, addresses: Columns, guesses: Columns, now: float) -> Rows:
        keys: Hashes = mix(tgids, addresses, guesses)

        def describe(positions: Rows) -> dict[str, Any]:
            return {
                "tgid": tgids[positions],
                "address": addresses[positions],
                "guess": guesses[positions],
                "kind": guesses[positions],
            }

        return self._table.find_or_add(keys, now, describe)

    def _ask(
        self, row: int, now: float, tid: int = 0, capture: Capture | None = None, sleeper: int = 0
    ) -> None:  # fmt: skip
        table = self._table
        guess = self._kinds[table["guess"][row]]
        tgid, address = int(table["tgid"][row]), int(table["address"][row])
        seen = UserLockSeen(int(table["key"][row]), tgid, tid or tgid, address, guess, capture, sleeper)
        if self._resolver.ask(seen):
            table["asked_at"][row] = now
        else:
            self._refuse(self._key_of(row))

    def _key_of(self, row: int) -> Columns:
        key = np.zeros(1, self._known_locks.key)
        for member, column in (("uaddr", "address"), ("tgid", "tgid"), ("guess", "guess")):
            key[member] = self._table[column][row]
        return key
