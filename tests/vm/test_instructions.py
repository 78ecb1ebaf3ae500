"""What lockd costs in instructions: the same on every host, however busy.

bench/emulated.py counts what tracing adds to a futex call and to a mutex, also for other variants.
bench/idle.py counts what lockd's processes take of a machine in which hardly anything happens.
"""

from __future__ import annotations

import statistics

import pytest

from bench.comparison import EVERY_CALL, FLOOR, LOCKD, UNTRACED, Comparison
from bench.emulated import measured
from bench.idle import measured_in_machine
from tests.vm.emulator import need_emulator

KERNEL = "6.12"
LOCKS = "lockd: kernel_locks"
CALLS = LOCKD + EVERY_CALL
CALL, PIPE, PING_PONG = "futex wake", "mutex, kernel (pipe)", "futex ping-pong"
OVER_FLOOR, PING_PONG_SLOWER = 1.6, 2.2
"""The largest ratios: of a call to one with empty programs, and of a round trip to an untraced one. They were
1.38 and 1.84 when this was written, both in mode `calls`."""
NO_COST = 1.01
BILLION = 1_000_000_000
QUIET = 0.008 * BILLION
"""The most instructions in a second of a quiet machine, of all processes. They were 6.8 million when this was
written, and twice as many before rows waited for ten seconds."""

pytestmark = [
    pytest.mark.timeout(0),  # the machine has limits of its own, as in test_kernels.py
    pytest.mark.thorough("a machine of its own for some minutes; a change of the programs' cost is rare"),
]


@pytest.fixture(scope="module")
def found() -> Comparison:
    need_emulator()
    return Comparison.from_json(measured(KERNEL, (UNTRACED, FLOOR + EVERY_CALL, LOCKD, CALLS, LOCKS)))


def test_nothing_is_missing(found: Comparison) -> None:
    assert not found.missing
    assert not found.failed


def test_a_call_that_does_not_block_costs_little_more_than_empty_programs(found: Comparison) -> None:
    ratio = found.over_floor(CALLS, CALL)
    assert ratio is not None
    assert 1 < ratio <= OVER_FLOOR


@pytest.mark.parametrize("variant", [LOCKD, CALLS])
def test_a_round_trip_of_two_threads(found: Comparison, variant: str) -> None:
    assert 1 < found.slower(variant, PING_PONG).median <= PING_PONG_SLOWER


@pytest.mark.parametrize(
    ("variant", "load"),
    [(LOCKD, "mutex, user space"), (LOCKD, PIPE), (LOCKD, CALL), (LOCKS, PIPE), (LOCKS, CALL)],
)
def test_what_is_not_traced_costs_nothing(found: Comparison, variant: str, load: str) -> None:
    assert found.slower(variant, load).median == pytest.approx(1, abs=NO_COST - 1)


def test_a_quiet_machine_costs_little() -> None:
    need_emulator()
    quiet = measured_in_machine(KERNEL, is_quick=False, quiet_after=300.0)[-1]
    every = [sum(of_round) * BILLION for of_round in zip(*quiet.shares.values(), strict=True)]
    assert 0 < statistics.median(every) <= QUIET
