"""lockd's own figures of its cost under load agree with the kernel's. bench/cost.py reports the figures."""

from __future__ import annotations

import os

import pytest

from bench.cost import Figures, Process, children_of, measure, quantile, table

SECONDS, THREADS, PAUSE_US, SCRAPE_EVERY = 20, 16, 200, 5.0
CPU_SHARE, CPU_SECONDS = 0.1, 0.2
RESIDENT_SHARE = 0.1
"""How far lockd's figures may be from the kernel's, which are taken a moment later."""


@pytest.fixture(scope="module")
def figures(host: None) -> Figures:
    return measure(SECONDS, THREADS, PAUSE_US, SCRAPE_EVERY)


@pytest.fixture(params=["sampler", "namer", "exporter"])
def process(request: pytest.FixtureRequest, figures: Figures) -> Process:
    (found,) = [one for one in figures.processes if one.name == request.param]
    return found


def test_it_ran_under_load(figures: Figures) -> None:
    assert all(count > 0 for count in figures.load["ops"].values())
    assert figures.events["futex"] > 0
    assert figures.events["offcpu"] > 0
    assert figures.ticks > 0
    for quantiles in (figures.late, figures.work):
        assert 0 <= quantiles[0.5] <= quantiles[0.99] <= quantiles[1.0]


def test_cpu_time_is_what_the_kernel_says(process: Process) -> None:
    low, high = process.cpu_stat
    slack = max(CPU_SHARE * high, CPU_SECONDS)
    assert low - slack <= process.cpu_told <= high + slack


def test_resident_memory_is_what_the_kernel_says(process: Process) -> None:
    assert process.resident_told == pytest.approx(process.resident_smaps, rel=RESIDENT_SHARE)
    assert 0 < process.pss <= process.resident_smaps


def test_the_compiler_has_left_with_the_loader(figures: Figures, process: Process) -> None:
    assert process.forbidden == []
    commands = figures.children.values()
    assert len(commands) == 2
    assert all("lockd.export" in command or "lockd.names" in command for command in commands)


def test_the_report_has_every_figure(figures: Figures) -> None:
    rows = [line.split("|") for line in table(figures)]
    assert {len(row) for row in rows} == {5}
    what = " ".join(row[1] for row in rows)
    for word in ("lateness", "work", "CPU of the sampler", "memory of the exporter", "loader", "libclang"):
        assert word in what


@pytest.mark.parametrize(("share", "value"), [(0.5, 1.5), (0.25, 1.0), (0.125, 0.5), (0.75, 2.0), (1.0, 2.0)])
def test_quantiles_are_interpolated(share: float, value: float) -> None:
    """The histogram has 8 values: two up to 1, four above 1 and up to 2, and two above 2."""
    assert quantile([1.0, 2.0, float("inf")], [2, 6, 8], share) == value


def test_children_are_found() -> None:
    assert os.getpid() in children_of(os.getppid())
