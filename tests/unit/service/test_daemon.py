"""Tests of what the daemon does after ticks, without a sampler, which would need BPF."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from lockd.config.schema import default
from lockd.names.client import Resolver
from lockd.sample.budget.cpu_budget import CpuBudget
from lockd.sample.budget.spending import ProgramTimes
from lockd.sample.sampler import SamplerSettings
from lockd.service import daemon as daemon_module
from lockd.service.daemon import Daemon, sampler_settings
from lockd.service.systemd import Systemd


class Judging:
    """Stands for a sampler: it has a budget, and notes the settings that it is given."""

    def __init__(self, settings: SamplerSettings) -> None:
        times, resolver = ProgramTimes(lambda: 0, 8), cast(Resolver, SimpleNamespace(cpu_seconds=lambda: 0.0))
        budget, control = settings.cpu_budget, cast(Any, SimpleNamespace(restraint=0))
        self.cpu_budget = CpuBudget(budget, control, times, resolver, settings.cpus)
        self.taken: list[SamplerSettings] = []

    def reload(self, settings: SamplerSettings) -> None:
        self.taken.append(settings)
        self.cpu_budget.set_budget(settings.cpu_budget, settings.cpus)


@pytest.fixture
def cpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of processors of this machine, as a list of one number."""
    number = [2]
    monkeypatch.setattr(daemon_module.os, "cpu_count", lambda: number[0])
    monkeypatch.setattr(daemon_module, "COUNT_SECONDS", 0.0)
    return number


def test_costs_are_judged_by_the_processors_that_there_are_now(cpus: list[int]) -> None:
    sampler = Judging(sampler_settings(default()))
    fakes: list[Any] = [sampler, default(), default, [], None, Systemd(), None]
    daemon = Daemon(*fakes)
    idle = SimpleNamespace(exporter=None, check_exporter=lambda: None)
    daemon._supervisor = cast(Any, idle)
    daemon._after_tick()
    assert sampler.taken == []
    cpus[0] = 16
    for _ in range(3):
        daemon._after_tick()
    assert sampler.taken == [sampler_settings(default())]
    assert sampler.cpu_budget.cpus == 16
    assert sampler.cpu_budget.restraint.budget == default().budget.share(16)
