"""User-space locks by process and address: their names, and their kinds as the namer finds them out."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lockd.columns.index import Hashes, Rows, mix
from lockd.columns.structs import Columns
from lockd.columns.table import Table
from lockd.kernel.maps import HashMap
from lockd.names.client import Resolver
from lockd.names.labels.processes import Name
from lockd.names.protocol import LockAnswer, UserLockSeen
from lockd.names.unwind.capture import Capture, decode_captures
from lockd.sample.locks.runtimes import HOTSPOT, RuntimePlaces
from lockd.sample.series.block import Block
from lockd.sample.series.series import OTHER

HELD_BACK_SECONDS = 5.0
"""Seconds for which waits for a lock that was just captured are held back at most, until its name and kind
are known: a count is never moved to another series."""
UNCAPTURED_SECONDS = 2.0
"""Seconds after which a lock that was not captured is named without a stack."""
CAPTURES_AT_ONCE = 32
"""Most captured locks that are asked for in one tick. The namer answers for some hundreds in a second."""
MOST_POSTPONED = 128
"""Most captures that wait for a later tick, each of some 4 KiB. A program that starts can begin with hundreds
of locks, some of which threads wait for only once."""
ASKED_AT_ONCE = 100
"""Most locks without a capture that are asked for after one fold."""
LASTING_NS = 100_000_000
"""Nanoseconds after which the namer looks at a thread that waits for a lock in memory that is reused."""
LASTING_AT_ONCE = 8
"""Most threads that the namer looks at after one survey (see LASTING_NS), for some milliseconds each."""
PROVISIONAL_NS = 1_000_000_000
"""Nanoseconds after which a lock in reused memory is captured again if nothing certain was found about it."""
AGAIN_SECONDS = 3600.0
"""Seconds after which a doubtful answer about a lock is worth starting or keeping a namer, to ask again. An
answer is doubtful if the next one may tell more, or if the memory may be another lock's by now. A namer that
runs anyway is asked each time."""
FORGET_AFTER = 60.0
"""Seconds after which the locks of a process that has ended are forgotten."""
ROWS = 50_000
"""Most locks that are remembered."""
JAVA_WAIT_AT, JAVA_IS_NO_OBJECT_AT, JAVA_GENERATION_AT, JAVA_OBJECT_GENERATION_AT = 63, 62, 48, 60
"""Positions of bits in the number that a Java lock has in place of an address (bpf/daemon/hotspot.bpf.c)."""
MOST_ADVISED = 100
"""Most label sets of processes with advice that are exported; the rest count as `other`."""
SITES = 16
"""Most sites that are remembered for each lock."""


class UserLockName(NamedTuple):
    """The namer's answer for a lock."""

    lock: str
    site: str
    stack: tuple[str, ...]
    sites: Counter[str]
    """How often threads were seen to wait for the lock at each site. Later answers still add to it."""


class UserLocks:
    """A table of locks: a row for each set of process, address and guess.

    The guess is the lock's kind by the arguments of its futex calls. Memory that is used again with another
    guess is another lock. Rows are found by a hash of these three. Row numbers are valid until the next call
    that adds rows.
    """

    def __init__(
        self,
        resolver: Resolver,
        known_locks: HashMap,
        hotspots: RuntimePlaces,
        cpythons: RuntimePlaces | None,
        kinds: Sequence[str],
        is_wanted: Callable[[int], bool],
        captured_again_ns: int,
        machine: str = os.uname().machine,
        procfs: Path = Path("/proc"),
    ) -> None:
        """`kinds` are the names of enum futex_kind. `is_wanted(tgid)` is whether to name the process's locks.

        `known_locks` is a map that the programs read. They capture a lock again `captured_again_ns` after its
        last capture. `hotspots` and `cpythons` take what the namer finds out about processes; the
        latter is None if the programs do not read the memory of CPython. `procfs` is the root of a proc file
        system.
        """
        self._resolver = resolver
        self._known_locks = known_locks
        self._hotspots, self._cpythons = hotspots, cpythons
        self.advice: dict[int, str] = {}
        """Advice on a process (lockd.advice), by its id."""
        self._advised_programs: dict[int, tuple[int, int]] = {}
        """Device and inode of the program that a process with advice ran when the advice came, by its id."""
        self._kinds = list(kinds)
        self._is_wanted = is_wanted
        self._captured_again_ns = captured_again_ns
        self._machine, self._procfs = machine, procfs
        self._postponed: list[tuple[Columns, Columns]] = []
        """The keys and values of captures that wait for the next tick."""
        self._corrections: set[tuple[int, int]] = set()
        """Pairs (guess, kind): the guess was wrong for some lock, which turned out to be of this kind."""
        self._is_corrected = np.zeros(len(kinds), np.bool_)
        """Whether each kind was ever a wrong guess."""
        self._changes: set[tuple[int, int]] = set()
        """Pairs (guess, kind): some lock with this guess was found to be of this kind, which no longer holds,
        because the memory has another lock now."""
        self._is_lock = np.array([kind in ("lock", "pi") for kind in kinds])
        self.refused_captures = 0
        """The number of captures that were thrown away because there were too many to ask the namer about."""
        self._table = Table(
            {
                "tgid": np.int64,
                "address": np.uint64,
                "guess": np.int16,
                "kind": np.int16,  # what the namer found out; until then the guess
                "former_kinds": np.int16,  # a bit for each kind that was found out and no longer holds
                "asked_at": np.float64,  # monotonic clock in seconds; 0: not asked for
                "is_answered": np.bool_,
                "is_provisional": np.bool_,  # the next answer may tell more
                "is_reused": np.bool_,  # the memory will soon belong to another lock
                "is_parked": np.bool_,  # a thread sleeps here whatever lock it waits for
                "is_many": np.bool_,  # a Java class whose objects are counted one by one
                "lock": object,
                "site": object,
                "stack": object,
                "family": object,
                "sites": object,  # Counter of sites
            },
            ROWS,
        )

    def ask_captured(self, drained: Sequence[tuple[Columns, Columns]], now: float) -> None:
        """Ask for the names of locks on which threads just blocked, given the keys and values of captures.

        Captures that are too many for one tick are asked for at the next call.
        """
        waiting = [*self._postponed, *drained]
        if not waiting:
            return
        keys, captures = (np.concatenate(columns) for columns in zip(*waiting, strict=True))
        chosen, rest = self._choose(keys["tgid"].tolist())
        postponed, refused = rest[:MOST_POSTPONED], rest[MOST_POSTPONED:]
        self._postponed = [(keys[postponed], captures[postponed])] if postponed else []
        self._refuse(keys[refused])
        if postponed:  # so that waits for their locks are held back, too
            later = keys[postponed]
            rows = self._rows(later["tgid"], later["uaddr"], later["guess"].astype(np.int16), now)
            self._table["asked_at"][rows[self._table["asked_at"][rows] == 0]] = now
        if not chosen:
            return
        keys, captures = keys[chosen], captures[chosen]
        rows = self._rows(keys["tgid"], keys["uaddr"], keys["guess"].astype(np.int16), now)
        self._write_forgotten_kinds(rows)
        decoded = decode_captures(captures, self._machine)
        for row, tid, capture in zip(rows.tolist(), captures["tid"].tolist(), decoded, strict=True):
            self._ask(row, now, tid, capture)
        self._resolver.watch(keys["tgid"].tolist())

    def _write_forgotten_kinds(self, rows: Rows) -> None:
        """Tell the programs again what the namer found out about captured locks, where they cannot guess it.

        They cannot guess that a lock is of another kind than its calls look like, or that a Java class is
        counted object by object.

        The programs have forgotten it if the entry of the lock was dropped for another one (`known_locks` is
        an LRU map) or deleted by _refuse(). A lock is also captured because its entry is old: then nothing
        changes.
        """
        table = self._table
        is_special = table["is_many"][rows] | (table["kind"][rows] != table["guess"][rows])
        for row in np.unique(rows[table["is_answered"][rows] & is_special]).tolist():
            self._write_kind(row, int(table["kind"][row]), is_many=bool(table["is_many"][row]))

    @property
    def has_postponed(self) -> bool:
        """Whether captures wait for the next call of ask_captured()."""
        return bool(self._postponed)

    def _choose(self, tgids: list[int]) -> tuple[list[int], list[int]]:
        """Return the positions of the captures that are asked for now, and of those without room.

        Captures of processes that the filter leaves out are in neither list. One lock of each process comes
        first, then a second of each. A process that begins with hundreds of locks, as a Java machine does,
        does not keep out the others.
        """
        room = min(CAPTURES_AT_ONCE, self._resolver.room)
        turns, turn = Counter[int](), []
        for tgid in tgids:
            turn.append(turns[tgid])
            turns[tgid] += 1
        processes = {tgid for tgid in turns if self._is_wanted(tgid)}
        wanted = [i for i in sorted(range(len(tgids)), key=turn.__getitem__) if tgids[i] in processes]
        return wanted[:room], wanted[room:]

    def _refuse(self, keys: Columns) -> None:
        """Have these locks captured again when a thread next blocks on them. So hot locks come first."""
        self.refused_captures += len(keys)
        self._known_locks.delete(keys)

    def note_answer(self, answer: LockAnswer) -> bool:
        """Note the name and kind of a lock that is still remembered, and write its kind for the programs.

        Returns whether the answer has changed the lock's kind, which is the guess at first.
        """
        row = int(self._table.find(np.array([answer.key], np.uint64))[0])
        if row < 0:
            return False
        table = self._table
        self._note_process(int(table["tgid"][row]), answer)
        kind = self._kinds.index(answer.kind) if answer.kind in self._kinds else int(table["guess"][row])
        is_certain = bool(table["is_answered"][row] and not table["is_provisional"][row])
        may_be_another = answer.is_reused or answer.is_parked
        may_be_another = may_be_another and is_certain and not answer.is_provisional
        is_other_kind = bool(kind != table["kind"][row])
        # A lock that several functions take has a name by each of them, and is one lock all the same. A word
        # on which one thread sleeps is no lock.
        is_other_name = answer.lock != table["lock"][row] and (answer.is_parked or not self._is_lock[kind])
        is_another = may_be_another and (is_other_kind or is_other_name)
        has_sites = not is_another or (answer.is_parked and not is_other_kind)
        sites = table["sites"][row] = (has_sites and table["sites"][row]) or Counter()
        if answer.site and (answer.site in sites or len(sites) < SITES):
            sites[answer.site] += 1
        if is_certain and not is_another:
            return False  # name and kind stay: such an answer only adds a site
        if answer.is_provisional and answer.is_reused:
            self._write_kind(row, int(table["kind"][row]), self._captured_again_ns - PROVISIONAL_NS)
        if answer.is_provisional and table["is_answered"][row]:
            return False
        table["is_many"][row] = answer.is_many
        table["lock"][row], table["site"][row], table["stack"][row] = answer.lock, answer.site, answer.stack
        table["family"][row], table["is_provisional"][row] = answer.family, answer.is_provisional
        table["is_reused"][row], table["is_parked"][row] = answer.is_reused, answer.is_parked
        table["is_answered"][row] = True
        is_corrected = kind != table["kind"][row]
        if is_corrected:
            self._change_kind(row, kind)
        if is_corrected or answer.is_many:
            self._write_kind(row, kind, is_many=answer.is_many)
        return bool(is_corrected)

    def _note_process(self, tgid: int, answer: LockAnswer) -> None:
        if answer.advice:
            self.advice[tgid] = answer.advice
            if program := self._program(tgid):
                self._advised_programs[tgid] = program
        elif answer.hotspot:  # locks of a Java machine have names now
            self.advice.pop(tgid, None)
        if answer.hotspot and self._hotspots.of(tgid) != answer.hotspot:
            self._forget_names(tgid, answer.hotspot[HOTSPOT.index("generation")])
            self._hotspots.write(tgid, answer.hotspot)
        if answer.cpython and self._cpythons:
            self._cpythons.write(tgid, answer.cpython)

    def _program(self, tgid: int) -> tuple[int, int] | None:
        """Device and inode of the program that a process runs; None if they cannot be read."""
        try:
            about = os.stat(self._procfs / str(tgid) / "exe")
        except OSError:
            return None
        return about.st_dev, about.st_ino

    def _runs_another_program(self, tgid: int) -> bool:
        """Whether a process has called exec since the last advice on it."""
        noted = self._advised_programs.get(tgid)
        return noted is not None and self._program(tgid) not in (None, noted)

    def _forget_names(self, tgid: int, generation: int) -> None:
        """Forget the names of a Java machine's locks whose numbers (JAVA_WAIT_AT) have this generation.

        There are only four generations: a new one uses the numbers of an old one again.
        """
        table, numbers = self._table, self._table["address"]
        generation_bits = np.where(
            numbers >> JAVA_IS_NO_OBJECT_AT & 1, JAVA_GENERATION_AT, JAVA_OBJECT_GENERATION_AT
        )
        is_old = table.used & (table["tgid"] == tgid) & (numbers >> JAVA_WAIT_AT > 0)
        is_old &= numbers >> generation_bits.astype(np.uint64) & 3 == generation
        for row in np.flatnonzero(is_old):
            self._known_locks.delete(self._map_key(int(row)))
        table["asked_at"][is_old], table["is_answered"][is_old] = 0, False

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

    def _write_kind(self, row: int, kind: int, ago_ns: int = 0, is_many: bool = False) -> None:
        """Have the programs count a lock's waits under this kind, as if it had been captured `ago_ns` ago."""
        known = np.zeros(1, self._known_locks.value)
        known["kind"], known["is_many"] = kind, is_many
        known["captured"] = max(time.monotonic_ns() - ago_ns, 0)
        self._known_locks.update(self._map_key(row), known)

    def ask_lasting(
        self, tids: Columns, tgids: Columns, addresses: Columns, guesses: Columns, waited_ns: Columns,
        thread_pointers: Columns, now: float,
    ) -> None:  # fmt: skip
        """Ask about locks in reused memory for which a thread has waited for LASTING_NS or longer.

        The known name may be that of a lock that was in the memory before. Each wait is asked about once,
        and if nothing certain is found, again whenever it has lasted twice as long. `thread_pointers` are 0
        where they are not known.
        """
        table = self._table
        if self._resolver.is_paused or not table["is_reused"].any():
            return
        rows = table.find(mix(tgids, addresses, guesses))
        waited = waited_ns / 1e9
        asked_after = table["asked_at"][rows] - (now - waited)
        is_due = (asked_after < 0) | (table["is_provisional"][rows] & (waited >= 2 * asked_after))
        is_due &= (rows >= 0) & table["is_reused"][rows] & (waited_ns >= LASTING_NS) & (thread_pointers > 0)
        due = np.flatnonzero(is_due)
        due = due[np.lexsort((-waited_ns[due], ~self._is_lock[table["kind"][rows[due]]]))]
        _, first = np.unique(rows[due], return_index=True)
        for i in due[np.sort(first)][: min(LASTING_AT_ONCE, self._resolver.room)].tolist():
            self._ask(int(rows[i]), now, int(tids[i]), sleeper=int(thread_pointers[i]))

    def correct_kinds(self, tgids: Columns, addresses: Columns, kinds: Columns) -> Columns:
        """Return the kinds of waits, corrected where a lock is of another kind than its calls look like."""
        corrected = kinds.copy()
        positions = np.flatnonzero(self._is_corrected[kinds])
        if len(positions):
            rows = self._table.find(mix(tgids[positions], addresses[positions], kinds[positions]))
            is_known = rows >= 0
            corrected[positions[is_known]] = self._table["kind"][rows[is_known]]
        for guess, former in self._changes:
            positions = np.flatnonzero(kinds == former)
            rows = self._find_guessed(tgids[positions], addresses[positions], guess)
            has_changed = (rows >= 0) & (self._table["former_kinds"][rows] >> former & 1 > 0)
            corrected[positions[has_changed]] = self._table["kind"][rows[has_changed]]
        return corrected

    def families(self, tgids: Columns, addresses: Columns, kinds: Columns) -> Columns:
        """Return the family of each lock, such as mutex or rwlock; empty if it is not known.

        `kinds` are corrected ones.
        """
        table = self._table
        rows = table.find(mix(tgids, addresses, kinds))
        is_other = ((rows < 0) | (table["kind"][rows] != kinds)) & self._is_lock[kinds]
        rows[is_other] = self._find_corrected(tgids[is_other], addresses[is_other], kinds[is_other])
        is_known = (rows >= 0) & table["is_answered"][rows] & (table["kind"][rows] == kinds)
        families = np.full(len(rows), "", object)
        families[is_known] = table["family"][rows[is_known]]
        return families

    def is_undecided(
        self, tgids: Columns, addresses: Columns, kinds: Columns, now: float
    ) -> npt.NDArray[np.bool_]:
        """Whether the name of each wait's lock was asked for in the last HELD_BACK_SECONDS, without answer so
        far."""
        table = self._table
        recent = (table["asked_at"] > 0) & (table["asked_at"] >= now - HELD_BACK_SECONDS)
        is_open = table.used & recent & ~table["is_answered"]
        if not is_open.any():
            return np.zeros(len(tgids), np.bool_)
        rows = table.find(mix(tgids, addresses, kinds))
        undecided: npt.NDArray[np.bool_] = (rows >= 0) & is_open[rows]
        return undecided

    def answered_rows(
        self, tgids: Columns, addresses: Columns, kinds: Columns, since: Columns, now: float
    ) -> Rows:
        """Return the row of each lock for name(), -1 where there is no answer; ask about uncaptured locks.

        `kinds` are corrected ones. `since` is when a wait for the lock was first counted (monotonic clock in
        seconds).
        """
        table = self._table
        rows = self._find_corrected(tgids, addresses, kinds)
        table["seen"][rows[rows >= 0]] = now
        is_answered = (rows >= 0) & table["is_answered"][rows]
        is_unsure = table["is_provisional"][rows] & table["is_reused"][rows]
        is_answered &= ~is_unsure | (since <= now - HELD_BACK_SECONDS)
        overdue = np.flatnonzero(~is_answered & (since <= now - UNCAPTURED_SECONDS))
        if len(overdue):
            self._ask_uncaptured(tgids[overdue], addresses[overdue], kinds[overdue], now)
        return np.where(is_answered, rows, -1)

    def _ask_uncaptured(self, tgids: Columns, addresses: Columns, kinds: Columns, now: float) -> None:
        """Ask for the names of some of these locks, without captures, unless they were asked for."""
        rows = self._table.find(mix(tgids, addresses, kinds))
        unasked = np.flatnonzero((rows < 0) | (self._table["asked_at"][rows] == 0))
        unasked = unasked[: min(ASKED_AT_ONCE, self._resolver.room // 2)]
        for row in np.unique(self._rows(tgids[unasked], addresses[unasked], kinds[unasked], now)):
            self._ask(int(row), now)

    def have_other_names(
        self, tgids: Columns, addresses: Columns, kinds: Columns, names: Columns
    ) -> npt.NDArray[np.bool_]:
        """Whether each lock has another name than in `names` by now, as another one is in the same memory.

        `kinds` are corrected ones.
        """
        table = self._table
        may_change = table["is_answered"] & (table["is_reused"] | table["is_parked"])
        if not may_change.any():
            return np.zeros(len(tgids), np.bool_)
        rows = self._find_corrected(tgids, addresses, kinds)
        known = np.flatnonzero((rows >= 0) & may_change[rows])
        known = known[table["kind"][rows[known]] == kinds[known]]
        have_others = np.zeros(len(rows), np.bool_)
        have_others[known] = table["lock"][rows[known]] != names[known]
        return have_others

    def name(self, row: int) -> UserLockName:
        """Return the answer for the lock in a row that answered_rows() has returned."""
        table = self._table
        return UserLockName(table["lock"][row], table["site"][row], table["stack"][row], table["sites"][row])

    def export_advice(self, block: Block, name: Callable[[int], Name]) -> None:
        """Write how many processes of each unit and comm have advice; `name(tgid)` returns these two."""
        counts = Counter((*name(tgid), advice) for tgid, advice in self.advice.items())
        shown = Counter(dict(counts.most_common(MOST_ADVISED)))
        for (_, _, advice), number in (counts - shown).items():
            shown[OTHER, OTHER, advice] += number
        block.add("lockd_advised_processes", list(shown), list(shown.values()))

    def forget_ended(self, alive: set[int], now: float) -> None:
        """Forget the locks of processes that have ended: their ids and addresses will be used again.

        Advice is also forgotten if the process runs another program than that which the advice is on.
        A process with a wait in the last HELD_BACK_SECONDS counts as alive. It may have begun after `alive`
        was made, and the waits of a process that has ended may be held back.
        """
        table = self._table
        recent = table.used & (table["seen"] >= now - HELD_BACK_SECONDS)
        alive = alive.union(table["tgid"][recent].tolist())
        ended = table.used & ~np.isin(table["tgid"], list(alive))
        for row in np.flatnonzero(ended & (table["asked_at"] > 0)):
            self._known_locks.delete(self._map_key(int(row)))
        table["asked_at"][ended] = 0
        table.drop(np.flatnonzero(ended & (table["seen"] < now - FORGET_AFTER)))
        self.advice = {
            tgid: advice
            for tgid, advice in self.advice.items()
            if tgid in alive and not self._runs_another_program(tgid)
        }
        self._advised_programs = {
            tgid: program for tgid, program in self._advised_programs.items() if tgid in self.advice
        }
        self._resolver.forget_ended(alive)

    def _find_corrected(self, tgids: Columns, addresses: Columns, kinds: Columns) -> Rows:
        """Return the row of each lock by its corrected kind, -1 if there is none.

        If two rows match, it is the row whose guess was corrected to this kind, not the row with this guess.
        """
        found = self._table.find(mix(tgids, addresses, kinds))
        for guess, kind in self._corrections:
            positions = np.flatnonzero(kinds == kind)
            rows = self._find_guessed(tgids[positions], addresses[positions], guess)
            is_corrected = (rows >= 0) & (self._table["kind"][rows] == kind)
            found[positions[is_corrected]] = rows[is_corrected]
        return found

    def _find_guessed(self, tgids: Columns, addresses: Columns, guess: int) -> Rows:
        """Return the row of each lock whose calls look like the kind `guess`, -1 if there is none."""
        return self._table.find(mix(tgids, addresses, np.full(len(tgids), guess)))

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
        is_doubtful = table["is_provisional"][row] or table["is_reused"][row] or table["is_parked"][row]
        is_old = table["asked_at"][row] < now - AGAIN_SECONDS
        is_needed = bool(not table["is_answered"][row] or (is_doubtful and is_old))
        if self._resolver.ask(seen, is_needed):
            table["asked_at"][row] = now
        elif is_needed:
            self._refuse(self._map_key(row))

    def _map_key(self, row: int) -> Columns:
        key = np.zeros(1, self._known_locks.key)
        for member, column in (("uaddr", "address"), ("tgid", "tgid"), ("guess", "guess")):
            key[member] = self._table[column][row]
        return key
