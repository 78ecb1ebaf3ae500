"""The daemon's profiles of waits off the CPU, against a program that knows in which code it waits for what.

The program is tests/workloads/wait_places.c. Its threads wait at a few places, in turns that differ too much
for the last wait to tell the next one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.kernel.test_holders import PROGRAMS, PYTHON, STANDARD_DEVIATIONS, name
from tests.support.lockd_process import IS_IN_MACHINE, PERIOD_SECONDS, Lockd, Metrics
from tests.support.pprof_decoder import Decoded
from tests.support.workload import OURS, Workload

SLEEPERS, PAIRS, SAMPLES_PER_SECOND = (20, 10, 50) if IS_IN_MACHINE else (200, 60, 200)
"""The numbers of threads that sleep and of pairs of a reader and a writer, and of samples per second.

An emulated processor is too slow for many threads, which then wait for it. The ring has room for the samples
of 0.4 s. For so long the host may hold the sampler up.
"""
UNEVEN = {"long_wait": 1.7, "answer_late": 1.3}
"""The variance of a function's time by its samples, divided by that of as many samples of equal weight.

If a wait of length x is longer than the usual length u of its thread's waits, its weight is in proportion to
x / u. So the quotient is E(x * x / u) * E(u) / E(x)**2 for the turns of wait_places.c.
"""
WIDEST = 0.06
"""The largest standard deviation that a share may have: with few samples the test would say little."""
SECONDS = 8
MOST_TIMES = 2
"""How many times as many samples as are wanted may be taken for a while, before the pace of samples changes
(SamplePace)."""
RING_SAMPLES = 80
"""The number of samples that the ring has room for."""
ROOM_SECONDS = RING_SAMPLES / (MOST_TIMES * SAMPLES_PER_SECOND) - PERIOD_SECONDS
"""The time for which the sampler may be held up, beyond its period, before the ring is full."""
LONG_TICK_SECONDS = 0.065536
"""An upper edge of a bucket: ticks that take no longer and are no later leave the ring room enough."""
EXACT = 0.002
"""The share by which the whole time of a profile may differ from the metric: profiles are in whole
microseconds.
"""
COUNTED = "lockd_offcpu_blocked_seconds_sum"


@pytest.fixture(scope="module")
def sampling(tmp_path_factory: pytest.TempPathFactory, host: None) -> Iterator[Lockd]:
    """A daemon that counts only the workloads of these tests, and samples many of their waits."""
    config = {"filter": {"comms": [OURS]}, "profile": {"waits_per_second": SAMPLES_PER_SECOND}}
    daemon = Lockd(tmp_path_factory.mktemp("sampling"), config)
    yield daemon
    assert daemon.stop() == 0, "".join(daemon.log)


def run(seconds: int = SECONDS) -> tuple[Workload, dict[str, Any]]:
    one = Workload("wait_places", SLEEPERS, PAIRS, seconds, comm=name("places"))
    return one, one.run()


@dataclass
class Seen:
    """A run of the program, and the daemon's metrics before and after it."""

    comm: str
    truth: dict[str, Any]
    before: Metrics
    after: Metrics


@pytest.fixture(scope="module")
def seen(sampling: Lockd) -> Iterator[Seen]:
    before = sampling.metrics()
    one, truth = run()
    yield Seen(one.comm, truth, before, sampling.metrics())
    one.kill()


def profile_of(lockd: Lockd, profile: str, comm: str) -> Decoded:
    return Decoded(lockd.get(f"/debug/pprof/{profile}?comm={comm}"))


def assert_shares(lockd: Lockd, profile: str, comm: str, truth: dict[str, float]) -> None:
    """Assert that each function has its share of the time, as exactly as the number of its samples allows."""
    decoded = profile_of(lockd, profile, comm)
    found = {function: decoded.within("blocked")[function] for function in truth}
    number = {function: decoded.within("samples")[function] for function in truth}
    total = sum(found.values())
    print(found, number, truth)
    variance = {
        function: UNEVEN.get(function, 1) * us * us / number[function] for function, us in found.items()
    }
    for function, told_us in truth.items():
        share, told = found[function] / total, told_us / sum(truth.values())
        rest = sum(variance.values()) - variance[function]
        deviation = math.sqrt((1 - share) ** 2 * variance[function] + share**2 * rest) / total
        assert deviation < WIDEST, (function, number)
        assert share == pytest.approx(told, abs=STANDARD_DEVIATIONS * deviation), function


def test_each_place_and_each_waker_has_its_share_of_the_time(sampling: Lockd, seen: Seen) -> None:
    assert_shares(sampling, "offcpu", seen.comm, blocked_us(seen.truth, "places"))
    assert_shares(sampling, "wakers", seen.comm, blocked_us(seen.truth, "wakers"))


def blocked_us(truth: dict[str, Any], sort: str) -> dict[str, float]:
    """Return the microseconds waited in each function, without the time on the run queue, which the truth
    includes.

    The time on the run queue is shared out equally to all waits: a woken thread waits for a processor for
    about as long wherever it slept.
    """
    of_sort = truth[sort]
    queued_us = of_sort["queued_us"] / sum(each["waits"] for each in of_sort["in"].values())
    return {function: each["us"] - queued_us * each["waits"] for function, each in of_sort["in"].items()}


@pytest.mark.parametrize("profile", ["offcpu", "wakers"])
def test_the_time_in_all_is_that_of_the_metric(sampling: Lockd, seen: Seen, profile: str) -> None:
    counted = seen.after.sum(COUNTED, comm=seen.comm)
    blocked = profile_of(sampling, profile, seen.comm).within("blocked")
    assert blocked[seen.comm] / 1e9 == pytest.approx(counted, rel=EXACT)
    assert counted > 0.9 * sum(blocked_us(seen.truth, "places").values()) / 1e6


def test_frames_are_the_whole_stack(sampling: Lockd, seen: Seen) -> None:
    """The frames are the function, its caller, the C library, and the kernel down to where the thread leaves
    its CPU.
    """
    found = profile_of(sampling, "offcpu", seen.comm).within("blocked")
    for frame in ("long_wait", "sleep_in_turns", "answered_wait", "read_pipe", "sleep"):
        assert found[frame] > 0, found
    assert any("nanosleep" in frame for frame in found), found
    assert any(re.search(r"schedule$", frame) for frame in found), found
    page = sampling.get(f"/flamegraph?program=offcpu&by=waker&comm={seen.comm}").decode()
    for frame in ("answered_wait", "answer_late", "irq"):
        assert f"<title>{frame}\n" in page, frame


def test_functions_of_python_are_in_the_profile(sampling: Lockd) -> None:
    """Threads sleep in three functions of Python, in turns of random length. Their C stacks are all equal."""
    first = Workload(PYTHON, PROGRAMS / "sleeps.py", PAIRS, 2, comm=name("first"))
    first.run()
    first.kill()
    one = Workload(PYTHON, PROGRAMS / "sleeps.py", PAIRS, SECONDS, comm=name("python"))
    truth = {f"sleeps.py:{function}": float(us) for function, us in one.run().items()}
    assert_shares(sampling, "offcpu", one.comm, truth)
    us = profile_of(sampling, "offcpu", one.comm).within("blocked")
    one.kill()
    named = sum(us[function] for function in truth)
    assert us["sleeps.py:sleep_by_turns"] >= named > 0.5 * us["sleep"]


def held_up_seconds(seen: Seen) -> float:
    """Return for how long the sampler was held up at most, in ticks that began late or took long."""

    def more(metric: str, **labels: str) -> float:
        return seen.after.sum(metric, **labels) - seen.before.sum(metric, **labels)

    seconds = 0.0
    for metric in ("lockd_tick_late_seconds", "lockd_tick_seconds"):
        edges = sorted((float(one["le"]), one["le"]) for one in seen.after.labels(f"{metric}_bucket"))
        counts = [(edge, more(f"{metric}_bucket", le=le)) for edge, le in edges]
        long = [(edge, to - below) for (_, below), (edge, to) in pairwise(counts) if edge > LONG_TICK_SECONDS]
        most = sum(edge * count for edge, count in long if count)
        seconds += min(most, more(f"{metric}_sum"))
    return seconds


def test_samples_are_few_and_are_counted(seen: Seen) -> None:
    taken, refused = (
        seen.after.sum(metric) - seen.before.sum(metric)
        for metric in ("lockd_wait_samples_total", "lockd_wait_samples_refused_total")
    )
    beyond = max(held_up_seconds(seen) - ROOM_SECONDS, 0)
    print(taken, refused, beyond, seen.after.sum("lockd_wait_seconds_per_sample"))
    assert 0 < taken <= 3 * SAMPLES_PER_SECOND * SECONDS
    assert refused <= 0.02 * taken + beyond * MOST_TIMES * SAMPLES_PER_SECOND


def test_it_is_off_with_one_key(tmp_path: Path) -> None:
    config = {"filter": {"comms": [OURS]}, "profile": {"waits_per_second": 0}}
    with Lockd(tmp_path, config) as daemon:
        one, _ = run(seconds=1)
        daemon.settle()
        found = profile_of(daemon, "offcpu", one.comm).within("blocked")
        one.kill()
        assert found["[not sampled]"] == found[one.comm] > 0
        assert "lockd_wait_samples_total" not in daemon.get("/metrics").decode()
        assert daemon.stop() == 0
