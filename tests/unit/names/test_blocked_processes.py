"""What the namer's answers say about whole processes: places in runtimes, advice, and waits in Go."""

from __future__ import annotations

from dataclasses import astuple, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from lockd import messages
from lockd.advice import GO, JAVA
from lockd.columns import wide_sums
from lockd.columns.index import mix
from lockd.kernel.maps import HashMap
from lockd.names.client import Resolver
from lockd.names.protocol import CPythonPlaces, GoWaitsAnswer, HotSpotPlaces, LockAnswer
from lockd.names.unwind.capture import REGISTERS
from lockd.sample.aggregates.go_waits import GoMutexWaits
from lockd.sample.locks.runtimes import CPYTHON, HOTSPOT, RuntimePlaces
from lockd.sample.locks.user_locks import MOST_ADVISED, UserLocks
from lockd.sample.series.block import Block
from lockd.sample.series.limits import Limits, LineBudget
from lockd.sample.series.series import OTHER
from tests.support.maps import Map

KINDS = ("none", "lock", "cond")
CLASS = 1 << 63
SEEN, LATER = 1000.0, 1060.0
CAPTURE = np.dtype(
    [("registers", [(name, "u8") for name in REGISTERS["x86_64"]]), ("thread_pointer", "u8"),
     ("frames", "u8", 24), ("tid", "u4"), ("tgid", "u4"), ("bytes", "u4"), ("stack", "u1", 64)]
)  # fmt: skip
PLACES = HotSpotPlaces(*range(1, 14))
FRAMES = CPythonPlaces(*range(1, 8))


class Namer:
    """A resolver that takes questions and gives no answers."""

    room = 1000

    def ask(self, question: object, is_needed: bool = True) -> bool:
        return True

    def watch(self, tgids: list[int]) -> None:
        """Do nothing: this resolver need not know which processes there are."""

    def forget_ended(self, alive: set[int]) -> None:
        """Do nothing: this resolver need not know which processes have ended."""


class Told:
    """The locks of some processes, as the sampler knows them; each process has waited for one."""

    def __init__(self, *tgids: int, number: int = CLASS, procfs: Path = Path("/proc")) -> None:
        self.known = Map(
            [("uaddr", "u8"), ("tgid", "u4"), ("guess", "u4")],
            [("captured", "u8"), ("kind", "u1"), ("is_many", "u1"), ("pad", "u1", 6)],
        )
        self.hotspots = Map("u4", [(name, "u8") for name in HOTSPOT])
        self.cpythons = Map("u4", [(name, "u8") for name in CPYTHON])
        self._hotspots = RuntimePlaces(cast("HashMap", self.hotspots), HOTSPOT)
        self._cpythons = RuntimePlaces(cast("HashMap", self.cpythons), CPYTHON)
        self.locks = UserLocks(
            cast("Resolver", Namer()), cast("HashMap", self.known), self._hotspots, self._cpythons,
            KINDS, lambda tgid: True, captured_again_ns=10**10, machine="x86_64", procfs=procfs,
        )  # fmt: skip
        self._keys: dict[int, int] = {}
        for tgid in tgids:
            wait = np.array([tgid]), np.array([number], np.uint64), np.array([KINDS.index("cond")])
            self.locks.answered_rows(*wait, np.zeros(1), SEEN)
            self._keys[tgid] = int(mix(*wait)[0])

    def answer(self, tgid: int, **about: Any) -> None:
        named = LockAnswer(self._keys[tgid], True, "[java]:Lock", "", kind="cond")
        self.locks.note_answer(replace(named, **about))

    def forget_ended(self, alive: set[int]) -> None:
        """Forget ended processes as the sampler does."""
        self.locks.forget_ended(alive, LATER)
        for _ in range(2):
            self._hotspots.keep(alive)
            self._cpythons.keep(alive)

    def advised(self) -> dict[tuple[str, ...], float]:
        block = Block((1,), 28)
        self.locks.export_advice(block, lambda tgid: ("", f"comm{tgid}"))
        return exported(block)


def exported(block: Block) -> dict[tuple[str, ...], float]:
    """Return the values of the one metric in the block, by label set."""
    head, arrays = messages.unpack(memoryview(block.pack()))
    (metric,) = head["metrics"]
    return dict(zip(map(tuple, metric["labels"]), arrays[metric["name"]], strict=True))


def test_programs_are_told_where_a_java_machine_has_its_waits() -> None:
    told = Told(7)
    told.answer(7, hotspot=astuple(PLACES))
    (held,) = told.hotspots.held.values()
    assert tuple(held.tolist()) == astuple(PLACES)
    told.answer(7, hotspot=astuple(replace(PLACES, generation=1)))  # names of its functions have become known
    (held,) = told.hotspots.held.values()
    assert held["generation"] == 1
    told.forget_ended(set())
    assert not told.hotspots.held


def test_programs_are_told_where_cpython_has_its_frames() -> None:
    told = Told(7)
    told.answer(7, cpython=astuple(FRAMES))
    (held,) = told.cpythons.held.values()
    assert tuple(held.tolist()) == astuple(FRAMES)
    told.answer(7)  # an answer without places takes none back
    told.cpythons.held.clear()  # as the kernel does when it needs the room
    told.answer(7, cpython=astuple(FRAMES))
    assert len(told.cpythons.held) == 1 and not told.hotspots.held
    told.forget_ended(set())
    assert not told.cpythons.held


@pytest.mark.parametrize(
    ("number", "generation"),
    [
        (0b10 << 62 | 2 << 60 | 5 << 32 | 7, 2),
        (0b110 << 61 | 1 << 48 | 0x7F0000001000, 1),
        (0b111 << 61 | 3 << 48 | 0x7F0000002000, 3),
        (0x7F0000003000, -1),
    ],
    ids=["object", "word", "monitor", "address"],
)
def test_numbers_that_stand_for_waits_again_are_named_anew(number: int, generation: int) -> None:
    """There are only four generations: the name of a lock from four readings of a perf map ago is no use."""
    told = Told(7, number=number)
    wait = np.array([7]), np.array([number], np.uint64), np.array([KINDS.index("cond")])
    told.answer(7, hotspot=astuple(replace(PLACES, generation=generation - 1 & 3)))
    for begins in (0, 1, 2, 3):
        (row,) = told.locks.answered_rows(*wait, np.full(1, SEEN), SEEN)
        assert told.locks.name(row).lock == "[java]:Lock"
        told.known.update(told.locks._map_key(row), np.zeros(1, told.known.value))  # as the programs do
        told.locks._note_process(7, LockAnswer(0, True, "", "", hotspot=(*astuple(PLACES)[:-1], begins)))
        is_named = told.locks.answered_rows(*wait, np.full(1, SEEN), SEEN)[0] >= 0
        assert is_named == (begins != generation)
        assert bool(told.known.held) == is_named
        told.answer(7)


@pytest.mark.parametrize("is_many", [False, True], ids=["a kind", "a class whose objects are told apart"])
def test_programs_that_forgot_what_a_lock_is_are_told_again(is_many: bool) -> None:
    """The entry of the lock may have made room for another one. When the lock is captured again, there may be
    no namer."""
    told = Told(7)
    told.answer(7, is_many=is_many, kind="lock")
    told.known.held.clear()
    keys, captures = np.zeros(1, told.known.key), np.zeros(1, CAPTURE)
    keys["tgid"], keys["uaddr"], keys["guess"] = 7, CLASS, KINDS.index("cond")
    told.locks.ask_captured([(keys, captures)], SEEN)
    (held,) = told.known.held.values()
    assert (held["is_many"], held["kind"]) == (is_many, KINDS.index("lock"))


def test_advice_lasts_until_it_has_been_taken() -> None:
    told = Told(7, 8)
    told.answer(7, advice=JAVA, hotspot=astuple(PLACES))
    told.answer(8, advice=GO)
    for tgid in (7, 8):  # without a capture nothing is known about advice
        told.answer(tgid, is_provisional=True)
    assert told.advised() == {("", "comm7", JAVA): 1, ("", "comm8", GO): 1}
    told.answer(7, hotspot=astuple(PLACES))
    assert told.advised() == {("", "comm8", GO): 1}
    told.locks.forget_ended({7}, LATER)
    assert not told.advised()


def test_advice_ends_with_the_program_that_it_is_on(tmp_path: Path) -> None:
    """The first process of a container is often a wrapper in Go, which executes the service."""
    for name in ("wrapper", "nginx", "7", "8"):
        (tmp_path / name).mkdir()
    for tgid in ("7", "8"):
        (tmp_path / tgid / "exe").symlink_to(tmp_path / "wrapper")
    told = Told(7, 8, procfs=tmp_path)
    for tgid in (7, 8):
        told.answer(tgid, advice=GO)
    told.locks.forget_ended({7, 8}, LATER)
    assert told.locks.advice == {7: GO, 8: GO}
    for tgid in ("7", "8"):
        (tmp_path / tgid / "exe").unlink()
    (tmp_path / "7/exe").symlink_to(tmp_path / "nginx")
    told.locks.forget_ended({7, 8}, LATER)
    assert told.locks.advice == {8: GO}, "what process 8 runs cannot be read"
    (tmp_path / "8/exe").symlink_to(tmp_path / "nginx")
    told.answer(8, advice=GO)
    told.locks.forget_ended({8}, LATER)
    assert told.locks.advice == {8: GO}, "which another capture showed"


def test_processes_with_advice_are_all_counted_but_not_all_named() -> None:
    told = Told(*range(1, MOST_ADVISED + 21))
    for tgid in range(1, MOST_ADVISED + 21):
        told.answer(tgid, advice=GO)
    advised = told.advised()
    assert len(advised) == MOST_ADVISED + 1
    assert advised[OTHER, OTHER, GO] == 20


def test_what_go_has_counted_since_it_was_first_read() -> None:
    waits = GoMutexWaits(LineBudget(Limits()), lambda tgid: ("", f"comm{tgid}"))

    def seconds() -> dict[tuple[str, ...], float]:
        block = Block((1,), 28)
        waits.export(block)
        return exported(block)

    waits.note_answer(GoWaitsAnswer((7, 8), (10**9, -1)), 0.0)
    assert seconds() == {("", "comm7"): 0}  # process 8, which cannot be read, has no series
    waits.note_answer(GoWaitsAnswer((7, 8), (3 * 10**9, -1)), 10.0)
    waits.note_answer(GoWaitsAnswer((7, 8), (-1, -1)), 20.0)
    waits.note_answer(GoWaitsAnswer((7,), (4 * 10**9,)), 30.0)
    assert seconds() == {("", "comm7"): 3}
    waits.forget_ended(set())
    waits.note_answer(GoWaitsAnswer((7,), (10**9,)), 40.0)  # another process with the same id and name
    waits.note_answer(GoWaitsAnswer((7,), (2 * 10**9,)), 50.0)
    assert seconds() == {("", "comm7"): 4}


def test_a_program_that_says_that_it_waited_for_ever_takes_no_total_back() -> None:
    waits = GoMutexWaits(LineBudget(Limits()), lambda tgid: ("", "made-up"))
    totals = []
    for waited in (0, 2**63 - 1, 0, 2**63 - 1, 0, 10**9):
        waits.note_answer(GoWaitsAnswer((7,), (waited,)), 0.0)
        totals += wide_sums.to_ints(waits.series["waited_ns"][:1])
    assert totals == sorted(totals)
    assert totals[-1] == 2 * (2**63 - 1) + 10**9


def test_a_program_that_has_waited_for_longer_than_the_world_waits_no_more() -> None:
    """A total that has reached the largest sum stays there, since a program can claim any wait, and other
    programs may share the total."""
    waits = GoMutexWaits(LineBudget(Limits()), lambda tgid: ("", "made-up"))
    for waited in (0, 2**200, 0, 2**200):
        waits.note_answer(GoWaitsAnswer((7,), (waited,)), 0.0)
    assert wide_sums.to_ints(waits.series["waited_ns"][:1]) == [wide_sums.MOST]
