"""The cost of a tick, in counts: it has no loop over keys, its work is bounded, and nothing is lost."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from bench.sampler import CONFIG, Filled, steady
from lockd.sample.drain import FOLDED_ROWS

FEW, MANY = 1000, 3000
"""Numbers of entries, both of which are folded in one go."""
BURST = 10_000
FULL = 16_000
"""The number of entries that nearly fills the map."""


@pytest.fixture(scope="module")
def filled(host: None) -> Iterator[Filled]:
    filled = Filled(CONFIG)
    for count in (FEW, FULL, FULL, FULL):  # until the tables are as large as they will be
        drain(filled, count)
        filled.sampler.fold()
    yield filled
    filled.sampler.close()


def drain(filled: Filled, count: int, is_fresh: bool = True) -> None:
    filled.settle()
    filled.fill(count, is_fresh)
    filled.drain()


def tick(filled: Filled, count: int = 0) -> None:
    filled.settle()
    if count:
        filled.fill(count)
    filled.sampler.tick()


def calls_of(what: Callable[[], object]) -> int:
    """Return how many calls of functions, of Python or of C, `what` makes."""
    calls = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        what()
    finally:
        sys.setprofile(None)
    return calls


def counted(filled: Filled) -> int:
    """Return the number of futex waits in all series."""
    assert filled.sampler.futex
    return int(filled.sampler.futex.by_kind["slots"].sum())


@pytest.mark.parametrize("is_fresh", [True, False])
def test_folding_is_no_loop_over_keys(filled: Filled, is_fresh: bool) -> None:
    drain(filled, FEW, is_fresh)
    few = calls_of(filled.sampler.fold)
    if not is_fresh:  # the last drain repeats known keys, so there must be MANY of them
        drain(filled, MANY)
        filled.sampler.fold()
    drain(filled, MANY, is_fresh)
    many = calls_of(filled.sampler.fold)
    assert many < 1.7 * few
    assert many < MANY


def test_a_burst_is_folded_over_several_ticks_and_counted_whole(filled: Filled) -> None:
    filled.sampler.fold()
    before = counted(filled)
    tick(filled, BURST)
    assert counted(filled) == before  # a tick that drains so many entries folds none
    tick(filled)
    assert counted(filled) - before == FOLDED_ROWS
    while filled.unfolded_rows:
        tick(filled)
    assert counted(filled) - before == BURST


def test_what_comes_faster_than_it_is_folded_is_not_lost(filled: Filled) -> None:
    filled.sampler.fold()
    before, ticks = counted(filled), 8
    for _ in range(ticks):
        tick(filled, FULL)
    filled.sampler.metrics()
    assert counted(filled) - before == ticks * FULL


@pytest.mark.thorough("ten seconds of nothing else")
def test_a_tick_that_finds_nothing_leaves_no_memory_behind(filled: Filled) -> None:
    filled.sampler.fold()
    calm = steady(filled.sampler, 60)
    assert calm.blocks < 10
    assert calm.peak_bytes < 20_000
