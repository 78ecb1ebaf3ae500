"""Tests of the budget of CPU time: when lockd restrains itself, when it stops that, and what lockd takes."""

from __future__ import annotations

import itertools
import logging
import os
import subprocess
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockd.config import schema
from lockd.kernel.pairs import Control
from lockd.load.source import assemble
from lockd.names.client import Resolver
from lockd.sample.budget import cpu_budget
from lockd.sample.budget.restraint import (
    CALM,
    DETAIL,
    LASTED,
    MOST_PATIENCE,
    NAMER_RETURNS,
    NAMER_SECONDS,
    NAMER_SHARE,
    PATIENCE,
    PROCESSES,
    SAMPLER_SECONDS,
    SAMPLER_SHARE,
    SAVED_SECONDS,
    SETTLED_SECONDS,
    STACKS,
    STEP_SECONDS,
    STEPS,
    Restraint,
)
from lockd.sample.budget.spending import (
    MEAN_SECONDS,
    NS,
    TIMED_SHARE,
    ProgramTimes,
    RestartedProcess,
    Spending,
    Spent,
)

BUDGET, CPUS = 0.02, 2
LAST = len(STEPS) - 1


def seconds_until(restraint: Restraint, level: int, used: float, at_most: int = 10_000) -> int:
    """Return after how many seconds the level is reached, if each second takes `used` of the budget."""
    for seconds in itertools.count():
        if restraint.level == level:
            return seconds
        assert seconds < at_most, f"never at {level}"
        restraint.judge(Spent(sampler=used * BUDGET), 1.0)
    raise AssertionError


def spend(restraint: Restraint, used: float, seconds: float) -> int:
    """Return the level after some seconds, each of which takes `used` of the budget."""
    for _ in range(round(seconds)):
        restraint.judge(Spent(programs=used * BUDGET), 1.0)
    return restraint.level


@pytest.fixture
def restraint() -> Restraint:
    return Restraint(BUDGET, CPUS)


# --- When -------------------------------------------------------------------------------------------


def test_the_steps_are_those_of_the_programs() -> None:
    steps = assemble(["include/common.bpf.h"], {}).enums["restraint"]
    assert len(steps) == len(STEPS)
    assert [steps.index(name) for name in ("stacks", "detail", "processes")] == [STACKS, DETAIL, PROCESSES]


def test_without_a_budget_from_now_on_everything_is_told(
    restraint: Restraint, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    seconds_until(restraint, DETAIL, 4.0)
    caplog.clear()
    restraint.set_budget(None, CPUS)
    assert restraint.level == 0
    (said,) = caplog.messages
    assert said.startswith(f"restraint from {DETAIL} to 0: nothing is left out;")
    assert said.endswith("budget.cpu is none from now on")
    assert spend(restraint, 100.0, 600) == 0


def test_another_budget_is_judged_by_from_now_on(restraint: Restraint) -> None:
    assert spend(restraint, 1.0, 60) == 0
    restraint.set_budget(BUDGET / 2, CPUS)
    assert spend(restraint, 1.0, 600) > 0
    restraint.set_budget(4 * BUDGET, CPUS)
    assert spend(restraint, 1.0, 600) == 0


def test_within_the_budget_nothing_happens(restraint: Restraint) -> None:
    assert spend(restraint, 1.0, 3600) == 0
    assert restraint.seconds == [3600.0, 0, 0, 0]


def test_a_burst_is_paid_from_what_was_saved(restraint: Restraint) -> None:
    for _ in range(100):  # a scrape that takes four times the budget for a second, every 15 seconds
        assert spend(restraint, 4.0, 1) == 0
        assert spend(restraint, 0.7, 14) == 0


def test_a_storm_has_it_go_up_within_seconds(restraint: Restraint) -> None:
    used = 20.0
    assert seconds_until(restraint, 1, used) == round(SAVED_SECONDS / (used - 1) + 0.5)
    assert seconds_until(restraint, 2, used) == SETTLED_SECONDS
    assert seconds_until(restraint, 3, used) == SETTLED_SECONDS
    assert spend(restraint, used, 1000) == LAST


def test_a_step_has_the_longer_to_show_what_it_saves_the_less_is_too_much(restraint: Restraint) -> None:
    seconds_until(restraint, 1, 20.0)
    assert seconds_until(restraint, 2, 1.5) == 2 * STEP_SECONDS
    assert seconds_until(restraint, 3, 1.1) == pytest.approx(10 * STEP_SECONDS, abs=1)


def test_what_came_before_a_step_is_no_reason_for_the_next(restraint: Restraint) -> None:
    """Rows that were drained before a step are folded after it, and must not cause the next step."""
    seconds_until(restraint, 1, 20.0)
    assert spend(restraint, 20.0, 1) == 1
    assert spend(restraint, 1.0, 1000) == 1


def test_slightly_too_much_has_it_go_up_later(restraint: Restraint) -> None:
    assert seconds_until(restraint, 1, 1.5) == 2 * SAVED_SECONDS


def test_it_stays_where_the_cost_fits_the_budget(restraint: Restraint) -> None:
    seconds_until(restraint, 2, 20.0)
    assert spend(restraint, (1 + CALM) / 2, 100) == 2


def test_it_comes_down_step_by_step(restraint: Restraint) -> None:
    seconds_until(restraint, LAST, 20.0)
    for level in reversed(range(LAST)):
        assert seconds_until(restraint, level, 0.1) == PATIENCE
    assert spend(restraint, 0.1, 1000) == 0


def test_a_moment_of_calm_is_not_enough(restraint: Restraint) -> None:
    seconds_until(restraint, LAST, 20.0)
    for _ in range(100):
        assert spend(restraint, 0.1, PATIENCE - 1) == LAST
        assert spend(restraint, 20.0, 1) == LAST


def test_it_comes_down_if_all_is_saved_again(restraint: Restraint) -> None:
    """A lockd that needs nearly all of the budget never takes clearly less: full savings bring it down."""
    seconds_until(restraint, 1, 20.0)
    used = (1 + CALM) / 2
    saved = SAVED_SECONDS - STEP_SECONDS
    assert seconds_until(restraint, 0, used) == pytest.approx(saved / (1 - used), abs=1)


def test_a_step_down_that_does_not_last_makes_it_more_patient(restraint: Restraint) -> None:
    """The storm costs a tenth of the budget at level 1, and twenty times the budget without restraint."""
    seconds_until(restraint, 1, 20.0)
    patience = []
    for _ in range(10):
        patience.append(seconds_until(restraint, 0, 0.1))
        seconds_until(restraint, 1, 20.0)
    assert patience[:4] == [PATIENCE, 2 * PATIENCE, 4 * PATIENCE, 8 * PATIENCE]
    assert patience[-1] <= MOST_PATIENCE
    assert patience == sorted(patience)


def test_patience_is_forgotten_after_a_long_peace(restraint: Restraint) -> None:
    for _ in range(4):
        seconds_until(restraint, 1, 20.0)
        seconds_until(restraint, 0, 0.1)
    spend(restraint, 0.1, MOST_PATIENCE)
    seconds_until(restraint, 1, 20.0)
    assert seconds_until(restraint, 0, 0.1) == PATIENCE


def test_a_storm_much_later_is_another_storm(restraint: Restraint) -> None:
    for _ in range(4):
        seconds_until(restraint, 1, 20.0)
        assert seconds_until(restraint, 0, 0.1) == PATIENCE
        spend(restraint, 0.1, LASTED)


def test_without_a_budget_it_never_goes_up() -> None:
    restraint = Restraint(None, CPUS)
    for _ in range(1000):
        assert not restraint.judge(Spent(programs=1.0), 1.0)
    assert restraint.level == 0
    assert restraint.spent == Spent(programs=1.0)


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0.5, 5)), max_size=200))
def test_one_step_at_a_time_and_only_with_reason(seconds: list[tuple[float, float]]) -> None:
    restraint = Restraint(BUDGET, CPUS)
    for used, lasted in seconds:
        before = restraint.level
        changed = restraint.judge(Spent(used * BUDGET), lasted)
        assert changed == (restraint.level != before)
        assert abs(restraint.level - before) <= 1
        assert 0 <= restraint.level <= LAST
        assert restraint.level <= before or used > 1
        assert restraint.level >= before or used <= 1
    assert sum(restraint.seconds) == pytest.approx(sum(lasted for _, lasted in seconds))


def test_each_step_is_said_once_with_its_figures(
    restraint: Restraint, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(50):
        restraint.judge(Spent(programs=0.3, sampler=0.05, namer=0.02, exporter=0.01), 1.0)
    seconds_until(restraint, 0, 0.1)
    told = [vars(record) for record in caplog.records]
    assert [(one["LOCKD_RESTRAINT_BEFORE"], one["LOCKD_RESTRAINT"]) for one in told] == [
        (0, 1), (1, 2), (2, 3), (3, 2), (2, 1), (1, 0),
    ]  # fmt: skip
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3 + ["INFO"] * 3
    assert told[0]["LOCKD_CPU_PROGRAMS"] == "0.300000"
    assert told[0]["LOCKD_CPU_BUDGET"] == "0.020000"
    up, down = caplog.messages[0], caplog.messages[-1]
    assert up == (
        "restraint from 0 to 1: no stacks are taken and no names looked up; lockd takes 38.00% of the machine"
        " (programs 30.00%, sampler 5.00%, namer 2.00%, exporter 1.00%): programs and sampler took more than"
        " budget.cpu, 2.00%, in 1.0 s, and nothing is saved"
    )
    assert down.endswith("programs and sampler took less than 75% of budget.cpu, 2.00%, for 5 s")


# --- For what ---------------------------------------------------------------------------------------


def with_namer(restraint: Restraint, namer: float, used: float, seconds: float) -> list[int]:
    """Return the level in each second.

    The namer takes `namer` of the budget unless it is stopped; programs and sampler take `used`.
    """
    levels = []
    for _ in range(round(seconds)):
        takes = namer if restraint.level < STACKS else 0.0
        restraint.judge(Spent(used / 2 * BUDGET, used / 2 * BUDGET, takes * BUDGET), 1.0)
        levels.append(restraint.level)
    return levels


def test_symbols_that_are_read_for_seconds_are_no_reason(restraint: Restraint) -> None:
    for _ in range(10):  # every ten minutes, a new program takes ten times the budget for ten seconds
        assert max(with_namer(restraint, 10.0, 0.6, 10)) == 0
        assert max(with_namer(restraint, 0.1, 0.6, 590)) == 0


def test_for_the_namer_no_more_is_done_than_to_stop_it(restraint: Restraint) -> None:
    """A mean over a minute would stay high long after the namer was stopped, and cause every step."""
    levels = with_namer(restraint, 10.0, 0.7, 10_000)
    assert set(levels) == {0, STACKS}


def test_the_namer_goes_on_when_enough_is_saved_for_it_and_takes_what_is_left(restraint: Restraint) -> None:
    used, namer = 0.6, 1.2
    running = with_namer(restraint, namer, used, 1000).index(STACKS)
    assert running == pytest.approx(NAMER_SECONDS / (namer + used - 1), abs=2)
    restraint = Restraint(BUDGET, CPUS)
    with_namer(restraint, namer, used, running + 1)
    stopped = with_namer(restraint, namer, used, 10_000).index(0)
    assert stopped == pytest.approx(NAMER_RETURNS / (1 - used), abs=2)
    levels = with_namer(restraint, namer, used, 50_000)
    taken = namer * levels.count(0) / len(levels)
    assert taken + used == pytest.approx(1.0, abs=0.02), "in the mean, all of the budget and no more"
    changes = sum(before != after for before, after in itertools.pairwise(levels))
    assert changes < 2 * len(levels) / (stopped + NAMER_RETURNS), "it does not flap"


def test_the_namer_has_a_share_where_hardly_anything_is_left(restraint: Restraint) -> None:
    assert max(with_namer(restraint, NAMER_SHARE, 0.99, 10_000)) == 0
    assert max(with_namer(restraint, 2 * NAMER_SHARE, 0.99, 10_000)) == STACKS


def test_who_scrapes_takes_no_names_away(restraint: Restraint) -> None:
    """The cost of scrapes causes no step, because no step makes a scrape cheaper."""
    for _ in range(10_000):
        assert not restraint.judge(Spent(0.4 * BUDGET, 0.4 * BUDGET, 0.1 * BUDGET, 50 * BUDGET), 1.0)
    assert restraint.level == 0


CONTROL = np.dtype([(name, "u4") for name in ("window", "restraint", "is_timed", "sampler")])


def control_at(level: int) -> Control:
    """Return the map by which the programs learn the level, as another sampler may have left it."""
    words = np.zeros(1, CONTROL)
    words["restraint"] = level
    return Control(memoryview(words.view(np.uint32)), CONTROL)


@pytest.mark.parametrize("budget", [None, BUDGET])
def test_the_level_of_a_sampler_that_has_ended_does_not_stay(budget: float | None) -> None:
    control, resolver = control_at(LAST), Resolver()
    assert control.restraint == LAST
    one = cpu_budget.CpuBudget(budget, control, ProgramTimes(lambda: 0, 8), resolver, CPUS)
    assert control.restraint == one.restraint.level == 0
    assert not resolver.is_paused


def test_what_the_sampler_takes_to_answer_counts_for_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    resolver = SimpleNamespace(cpu_seconds=lambda: 0.0)
    now = [1000.0]
    monkeypatch.setattr(cpu_budget.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(cpu_budget.time, "process_time", lambda: now[0] - 999.0)  # always on a CPU
    times = ProgramTimes(lambda: 0, 8)
    one = cpu_budget.CpuBudget(0.2, control_at(0), times, cast(Any, resolver), CPUS)
    for _ in range(1000):
        now[0] += 0.05
        with one.charge_exporter():
            now[0] += 0.95
        one.judge_costs(now[0])
    assert one.restraint.level == 0
    assert one.restraint.spent.sampler == pytest.approx(0.05 / CPUS)
    assert one.restraint.spent.exporter == pytest.approx(0.95 / CPUS)


def test_after_a_reload_spending_is_measured_of_the_machine_that_the_budget_is_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A virtual machine of two processors gets 14 more. What lockd takes is less than the budget of 16."""
    resolver = SimpleNamespace(cpu_seconds=lambda: 0.0)
    now, used = [1000.0], [0.0]
    monkeypatch.setattr(cpu_budget.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(cpu_budget.time, "process_time", lambda: used[0])
    share = schema.Budget().share
    one = cpu_budget.CpuBudget(share(2), control_at(0), ProgramTimes(lambda: 0, 8), cast(Any, resolver), 2)
    one.set_budget(share(16), 16)
    for _ in range(600):
        now[0] += 1.0
        used[0] += 0.15
        one.judge_costs(now[0])
    assert one.restraint.spent.sampler == pytest.approx(0.15 / 16)
    assert one.restraint.level == 0


class Load:
    """The cost of each second: in shares of the machine at level 0, and what is left of that at each level.

    What is left is as measured for each wait in docs/restraint.md. A storm does not make more waits because
    lockd saves time.
    """

    PROGRAMS, SAMPLER = (1.0, 0.78, 0.60, 0.59), (1.0, 0.78, 0.28, 0.07)

    def __init__(self, programs: float, sampler: float, namer: float = 0.0, exporter: float = 0.0) -> None:
        self._parts = programs, sampler, namer, exporter

    def at(self, level: int) -> Spent:
        programs, sampler, namer, exporter = self._parts
        return Spent(
            programs * self.PROGRAMS[level], sampler * self.SAMPLER[level], 0.0 if level else namer, exporter
        )


def levels_under(restraint: Restraint, load: Load, seconds: int) -> list[int]:
    levels = []
    for _ in range(seconds):
        restraint.judge(load.at(restraint.level), 1.0)
        levels.append(restraint.level)
    return levels


DATABASE = Load(0.035, 0.025, 0.015, 0.001)
"""The mean cost beside a MariaDB with 32 sysbench threads on two processors, at 56,000 switches a second.

The host did other work too. With the whole host for themselves, MariaDB and sysbench would cost lockd more.
"""
NAMER_BY_SECOND = (8, 9, 3, 2, 2, 3, 5, 4, 3, 2, 2, 5, 4, 2, 4, 2, 2, 4, 1, 2, 2, 7, 2, 3, 1, 3, 2, 3, 4, 2)
"""What the namer took of one processor in each second from its start beside DATABASE, in per cent."""


@pytest.mark.parametrize("more", [1.0, 1.5])
def test_a_database_at_work_keeps_its_names(more: float) -> None:
    """The default budget of two processors is enough for lockd to keep the names."""
    restraint = Restraint(schema.Budget().share(2), 2)
    load = DATABASE.at(0)
    for second in range(3600):
        namer = NAMER_BY_SECOND[second % len(NAMER_BY_SECOND)] / 200
        restraint.judge(Spent(more * load.programs, more * load.sampler, more * namer, load.exporter), 1.0)
    assert restraint.seconds == [3600.0, 0, 0, 0]


def test_where_programs_take_little_and_the_namer_much_nothing_but_names_is_left_out() -> None:
    """The load was seen beside a contended database: programs take 0.3%, and the namer takes 30%.

    It must not bring lockd to the last step within seconds.
    """
    restraint = Restraint(0.05, CPUS)
    levels = levels_under(restraint, Load(0.003, 0.01, 0.3, 0.02), 3600)
    assert max(levels) == STACKS
    assert levels.index(STACKS) > 10, "what it has saved is for this"


def test_a_sampler_that_needs_a_whole_processor_is_relieved(caplog: pytest.LogCaptureFixture) -> None:
    """The sampler is one thread: of 192 processors it can never take 2%."""
    cpus = 192
    restraint = Restraint(schema.Budget().share(cpus), cpus)
    busy = Spent(programs=0.005, sampler=1.0 / cpus)
    assert levels_until_change(restraint, busy) == pytest.approx(
        SAMPLER_SECONDS / (1 / SAMPLER_SHARE - 1), abs=1
    )
    assert levels_until_change(restraint, busy) == pytest.approx(
        STEP_SECONDS / (1 / SAMPLER_SHARE - 1), abs=1
    )
    assert restraint.level == DETAIL
    assert caplog.messages[0].endswith(
        ": the sampler took more than 75% of one processor in 1.0 s, and nothing is saved"
    )
    enough = Spent(programs=0.005, sampler=0.9 * SAMPLER_SHARE / cpus)
    restraint.judge(enough, 1.0)
    assert restraint.level == DETAIL
    assert (
        levels_until_change(restraint, Spent(programs=0.005, sampler=0.5 * SAMPLER_SHARE / cpus)) <= PATIENCE
    )
    assert restraint.level == STACKS


def test_a_burst_of_the_sampler_changes_nothing() -> None:
    restraint = Restraint(BUDGET, 192)
    for _ in range(100):
        assert max(levels_under(restraint, Load(0.0, 1.0 / 192), 10)) == 0
        assert max(levels_under(restraint, Load(0.0, 0.3 / 192), 10)) == 0


def test_without_a_budget_the_sampler_may_take_a_whole_processor() -> None:
    restraint = Restraint(None, 192)
    assert max(levels_under(restraint, Load(0.0, 1.0 / 192), 1000)) == 0


def levels_until_change(restraint: Restraint, spent: Spent) -> int:
    """Return after how many seconds the level changes, if each of them takes `spent`."""
    return next(seconds for seconds in itertools.count(1) if restraint.judge(spent, 1.0))


def test_no_step_is_taken_whose_saving_is_not_needed(restraint: Restraint) -> None:
    """The load exceeds the budget by a quarter, which the first step saves."""
    assert max(levels_under(restraint, Load(0.9 * BUDGET, 0.35 * BUDGET, 0.3 * BUDGET), 10_000)) == 1


def test_a_storm_of_ten_budgets_is_at_the_last_step_within_ten_seconds(restraint: Restraint) -> None:
    levels = levels_under(restraint, Load(8 * BUDGET, 2 * BUDGET, 0.5 * BUDGET), 1000)
    assert levels.index(LAST) < 10
    assert set(levels[levels.index(LAST) :]) == {LAST}


# --- What it takes ----------------------------------------------------------------------------------


class Clock:
    """A simulated clock, with windows in which programs take a share of one CPU."""

    def __init__(self, share: float, timed_runs: int) -> None:
        self.ns = 0
        self._share, self._timed_runs, self._told = share, timed_runs, 0.0
        self.timed = 0
        self.times = ProgramTimes(lambda: int(self._told), timed_runs, lambda: self.ns)

    def window(self, ns: int) -> bool:
        self.ns += 1
        is_timed = self.times.begin_period()
        self.ns += ns
        if is_timed:
            self.timed += ns
            self._told += ns * self._share / self._timed_runs
        return is_timed


@pytest.mark.parametrize("window_ns", [10_000_000, 50_000_000, 200_000_000, 10 * NS])
def test_programs_are_timed_now_and_then(window_ns: int) -> None:
    clock = Clock(0.25, 8)
    for _ in range(1 + 100 * NS // window_ns):
        clock.window(window_ns)
    clock.times.begin_period()
    assert clock.times.busy_cpus() == pytest.approx(0.25, rel=0.01)
    assert 0 < clock.timed <= (TIMED_SHARE + 0.01) * clock.ns + window_ns
    assert clock.times.busy_cpus() == pytest.approx(0.25, rel=0.01), "what was told last"


def test_programs_are_timed_again_soon_after_a_stall() -> None:
    """The host may have been stopped in the middle of a timed period."""
    clock = Clock(0.25, 8)
    assert clock.window(600 * NS)
    began = clock.ns
    while not clock.window(50_000_000):
        assert clock.ns - began < NS


def test_nothing_is_told_before_a_window_was_timed() -> None:
    assert Clock(0.25, 8).times.busy_cpus() == 0


def test_shares_are_of_the_whole_machine() -> None:
    clock = Clock(0.4, 1)
    sampler, namer, exporter = [0.0], [0.0], [0.0]
    spending = Spending(clock.times, lambda: sampler[0], lambda: namer[0], lambda: exporter[0], cpus=4)
    clock.window(NS)
    clock.window(NS)
    sampler[0], namer[0], exporter[0] = 0.5, 2.0, 1.0
    spent = spending.measure(2.0)
    assert spent.programs == pytest.approx(0.1)
    assert (spent.sampler, spent.namer, spent.exporter) == (0.0625, 0.25, 0.125)
    assert spent.by_events == spent.programs + spent.sampler
    assert spent.total == spent.by_events + spent.namer + spent.exporter


def test_what_is_stopped_takes_nothing_from_then_on_and_its_mean_is_told() -> None:
    """The mean hardly shows a single second in which the namer reads symbols, but it shows a minute of it."""
    namer = [0.0]
    spending = Spending(Clock(0, 1).times, lambda: 0.0, lambda: namer[0], lambda: 0.0, cpus=1)
    namer[0] += 1.0
    assert spending.measure(1.0).namer == 1.0
    assert spending.mean.namer == pytest.approx(1 / MEAN_SECONDS, rel=0.05)
    for _ in range(5 * round(MEAN_SECONDS)):
        namer[0] += 1.0
        spending.measure(1.0)
    assert spending.mean.namer == pytest.approx(1.0, abs=0.02)
    assert spending.measure(1.0).namer == 0.0
    assert spending.mean.namer > 0.9


@pytest.fixture
def busy() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Return two processes that never sleep."""
    started = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(2)]
    yield started
    for one in started:
        one.kill()
        one.wait()


def test_a_process_that_takes_anothers_place_goes_on_with_its_time(
    busy: list[subprocess.Popen[bytes]],
) -> None:
    followed = RestartedProcess()
    assert followed.cpu_seconds() == 0
    told = [0.0]
    for one in busy:
        followed.follow(one.pid)
        deadline = time.monotonic() + 30
        while followed.cpu_seconds() < told[-1] + 0.05:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        told.append(followed.cpu_seconds())
        os.kill(one.pid, 9)
        one.wait()
        assert followed.cpu_seconds() >= told[-1], "what it had taken when it ended"
        followed.follow(0)
        assert followed.cpu_seconds() >= told[-1]
