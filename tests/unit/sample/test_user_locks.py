"""The sampler asks the namer about some captured locks in each tick. The others wait, up to a limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from lockd.columns.index import mix
from lockd.kernel.maps import HashMap
from lockd.names.client import Resolver
from lockd.names.locks.user_locks import UserNames
from lockd.names.protocol import LockAnswer, UserLockSeen
from lockd.names.unwind.capture import REGISTERS
from lockd.sample.locks.runtimes import HOTSPOT, RuntimePlaces
from lockd.sample.locks.user_locks import AGAIN_SECONDS, CAPTURES_AT_ONCE, MOST_POSTPONED, UserLocks
from tests.support.busy_host import COND, BusyHost, Process

KEY = np.dtype([("uaddr", "u8"), ("tgid", "u4"), ("guess", "u1"), ("pad", "u1", 3)])
CAPTURE = np.dtype(
    [("registers", [(name, "u8") for name in REGISTERS["x86_64"]]), ("thread_pointer", "u8"),
     ("frames", "u8", 24), ("tid", "u4"), ("tgid", "u4"), ("bytes", "u4"), ("stack", "u1", 64)]
)  # fmt: skip
SEEN = 1000.0
KINDS = ("lock", "cond")


class Namer:
    """A resolver that keeps the questions."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []
        self.keys: list[int] = []
        self.room = 1000
        self.is_resting = self.is_paused = False

    def ask(self, question: UserLockSeen, is_needed: bool = True) -> bool:
        if self.is_resting and not is_needed:
            return False
        self.asked.append((question.tgid, question.address))
        self.keys.append(question.key)
        return True

    def watch(self, tgids: list[int]) -> None:
        """Ignore which processes the namer is to remember."""


class KnownLocks:
    """A stand-in for the map of captured locks. It notes the addresses of deleted entries."""

    key = KEY
    value = np.dtype([("captured", "u8"), ("kind", "u1"), ("is_many", "u1"), ("pad", "u1", 6)])

    def __init__(self) -> None:
        self.deleted: list[int] = []

    def update(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Ignore which kinds the programs are told."""

    def delete(self, keys: np.ndarray) -> None:
        self.deleted += keys["uaddr"].tolist()


class Bench:
    def __init__(self) -> None:
        self.namer, self.known, self.now = Namer(), KnownLocks(), SEEN
        self.locks = UserLocks(
            cast("Resolver", self.namer), cast("HashMap", self.known),
            RuntimePlaces(cast("HashMap", self.known), HOTSPOT), None,
            KINDS, lambda tgid: True, captured_again_ns=10**10, machine="x86_64",
        )  # fmt: skip

    def capture(self, locks: dict[int, list[int]]) -> None:
        """Run a tick that drains captures of these locks, which are addresses by process."""
        owners = [(tgid, address) for tgid, addresses in locks.items() for address in addresses]
        keys, captures = np.zeros(len(owners), KEY), np.zeros(len(owners), CAPTURE)
        keys["tgid"] = captures["tgid"] = captures["tid"] = [tgid for tgid, _ in owners]
        keys["uaddr"] = [address for _, address in owners]
        self.locks.ask_captured([(keys, captures)], self.now)

    def answer(self, **about: Any) -> None:
        """Give the sampler an answer to the last question; `about` are attributes of the answer."""
        self.locks.note_answer(LockAnswer(self.namer.keys[-1], True, **about))

    def kind(self, address: int, guess: str) -> str:
        """The kind under which a wait in process 7 counts whose calls look like `guess`."""
        wait = np.array([7]), np.array([address], np.uint64), np.array([KINDS.index(guess)])
        return KINDS[self.locks.correct_kinds(*wait)[0]]

    def tick(self) -> list[tuple[int, int]]:
        """Run a tick that drains no captures, and return its questions as pairs of process and address."""
        before = len(self.namer.asked)
        self.locks.ask_captured([], self.now)
        return self.namer.asked[before:]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_program_that_begins_with_many_locks_has_all_of_them_named(bench: Bench) -> None:
    """Threads may wait for some of them only once, so that they would not be captured again."""
    addresses = list(range(CAPTURES_AT_ONCE + MOST_POSTPONED))
    bench.capture({7: addresses})
    assert len(bench.namer.asked) == CAPTURES_AT_ONCE
    while bench.locks.has_postponed:
        assert 0 < len(bench.tick()) <= CAPTURES_AT_ONCE
    assert sorted(bench.namer.asked) == [(7, address) for address in addresses]
    assert not bench.known.deleted
    assert bench.locks.refused_captures == 0


def test_what_is_too_many_even_for_later_is_captured_again(bench: Bench) -> None:
    addresses = list(range(CAPTURES_AT_ONCE + MOST_POSTPONED + 5))
    bench.capture({7: addresses})
    assert bench.known.deleted == addresses[-5:]
    assert bench.locks.refused_captures == 5
    while bench.locks.has_postponed:
        bench.tick()
    assert len(bench.namer.asked) == CAPTURES_AT_ONCE + MOST_POSTPONED


def test_what_was_postponed_does_not_keep_out_other_processes(bench: Bench) -> None:
    bench.capture({7: list(range(100))})
    bench.capture({8: [1], 9: [1]})
    assert {(8, 1), (9, 1)} <= set(bench.namer.asked)


def test_a_namer_without_room_is_asked_later(bench: Bench) -> None:
    bench.namer.room = 0
    bench.capture({7: [1, 2]})
    assert bench.tick() == []
    bench.namer.room = 1000
    assert bench.tick() == [(7, 1), (7, 2)]
    assert not bench.locks.has_postponed


@pytest.mark.parametrize(
    ("about", "is_asked_later"),
    [({}, False), ({"is_provisional": True}, True), ({"is_reused": True}, True), ({"is_parked": True}, True)],
    ids=["certain", "without a name", "in reused memory", "on a thread's own word"],
)
def test_a_lock_with_an_answer_needs_no_namer_of_its_own(
    bench: Bench, about: dict[str, bool], is_asked_later: bool
) -> None:
    """Programs capture each lock again every ten seconds, whether or not its name is known."""
    bench.capture({7: [1]})
    bench.answer(lock="app:m", site="", kind="lock", **about)
    bench.namer.is_resting = True
    bench.capture({7: [1, 2]})
    assert bench.namer.asked == [(7, 1), (7, 2)], "only the other lock is asked for"
    assert not bench.known.deleted, "the programs capture the lock no sooner"
    bench.now += AGAIN_SECONDS + 1
    bench.capture({7: [1]})
    assert bench.namer.asked[2:] == [(7, 1)] * is_asked_later


def test_waits_for_locks_that_are_asked_for_later_are_held_back_too(bench: Bench) -> None:
    """A wait that has counted cannot move to the name of its lock."""
    addresses = list(range(64, 64 * (CAPTURES_AT_ONCE + 11), 64))
    bench.capture({7: addresses})
    assert len(bench.namer.asked) == CAPTURES_AT_ONCE
    columns = np.full(len(addresses), 7), np.array(addresses, np.uint64), np.zeros(len(addresses), np.int64)
    assert bench.locks.is_undecided(*columns, SEEN).all()


def test_the_kind_of_a_variable_is_certain_only_with_a_stack(bench: Bench, tmp_path: Path) -> None:
    """The calls of a rwlock look like those of a condition variable."""
    (tmp_path / "7").mkdir()
    (tmp_path / "7/maps").write_text("1000-2000 rw-p 00000000 08:01 10 /usr/bin/app\n")
    wait = np.array([7]), np.array([0x1010], np.uint64), np.array([KINDS.index("cond")])
    bench.locks.answered_rows(*wait, np.zeros(1), SEEN)
    nothing_captured = vars(UserNames(tmp_path).name_lock(7, 7, 0x1010, "cond", None))
    bench.answer(**nothing_captured)
    assert bench.kind(0x1010, "cond") == "cond"
    for now in (SEEN + 1, SEEN + 2):
        (row,) = bench.locks.answered_rows(*wait, np.zeros(1), now)
    assert bench.locks.name(row).lock == "app+0x10"
    assert bench.namer.asked == [(7, 0x1010)], "without a capture it is asked for only once"
    bench.answer(lock="app+0x10", site="app:read", kind="lock")
    assert bench.kind(0x1010, "cond") == "lock"
    bench.answer(**nothing_captured)
    assert bench.kind(0x1010, "cond") == "lock"


def test_a_wait_for_work_in_memory_that_is_used_again_has_the_name_of_the_present_one(bench: Bench) -> None:
    """CPython makes a lock for each wait in a queue. A lock that several functions take remains one lock."""
    bench.capture({7: [0x1000]})
    for kind, lasting in (("cond", "app.py:get"), ("lock", "app.py:add")):
        for lock in (lasting, "app.py:put"):
            bench.answer(lock=lock, site=lock, kind=kind, is_reused=True)
        wait = np.array([7]), np.array([0x1000], np.uint64), np.array([KINDS.index(kind)])
        (row,) = bench.locks.answered_rows(*wait, np.zeros(1), SEEN)
        found = bench.locks.name(row)
        assert found.lock == ("app.py:put" if kind == "cond" else lasting)
        assert found.sites.keys() == ({"app.py:put"} if kind == "cond" else {lasting, "app.py:put"})


def test_a_word_on_which_a_thread_sleeps_has_kind_and_name_of_the_last_wait_that_was_captured(
    bench: Bench,
) -> None:
    """With parking_lot each thread has one word, on which it waits for mutexes and condition variables."""
    bench.capture({7: [0x1000]})
    waits = [("cond", "app:idle"), ("lock", "app:put"), ("lock", "app:get"), ("cond", "app:idle")]
    for kind, lock in waits:
        bench.answer(lock=lock, site=lock, kind=kind, is_parked=True)
        assert bench.kind(0x1000, "cond") == kind
        wait = np.array([7]), np.array([0x1000], np.uint64), np.array([KINDS.index(kind)])
        (row,) = bench.locks.answered_rows(*wait, np.zeros(1), SEEN)
        assert bench.locks.name(row).lock == lock
        if lock == "app:get":
            assert bench.locks.name(row).sites == {"app:put": 1, "app:get": 1}
    thread = np.array([7]), *wait, np.array([10**9]), np.array([1 << 40])
    bench.locks.ask_lasting(*thread, SEEN + 10)
    assert bench.namer.asked == [(7, 0x1000)], "a thread that sleeps tells nothing for certain"


def test_each_of_two_locks_in_the_same_memory_counts_its_own_waits(tmp_path: Path) -> None:
    host, queue = BusyHost(tmp_path), Process(7, "pool.service", "pool")
    for _ in range(2):  # until the lock has a name
        host.step([queue], [])
    key = int(mix(np.array([7]), np.array([7 << 16 | 0xFFFF], np.uint64), np.array([COND]))[0])
    for lock in ("app.py:get", "app.py:put", "app.py:get"):
        answer = LockAnswer(key, True, lock, lock, kind="cond", is_reused=True)
        host._user_locks.note_answer(answer)
        host.step([queue], [])
    counted = host.exported()["lockd_futex_lock_blocked_total"]
    counts = {lock: counted["pool.service", "pool", "cond", lock] for lock in ("app.py:get", "app.py:put")}
    assert counts == {"app.py:get": 10, "app.py:put": 5}
