"""Tests of lockd's own cost: it exports never more than what the next start would go on with."""

from __future__ import annotations

import os
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np

from lockd.kernel.manifest import Hook
from lockd.sample.own_cost import OwnCost

HOOKS = (
    Hook("kernel_locks", "downgrade_write", "kprobe", attached=False, reason="busy"),
    Hook("kernel_locks", "downgrade_write", "kprobe", attached=True),
    Hook("kernel_locks", "up_read", "kprobe", attached=True),
    Hook("kernel_locks", "up_read", "kprobe", attached=True),
    Hook("kernel_locks", "up_read", "fentry", attached=False, reason="no BTF"),
)
MANIFEST = SimpleNamespace(constants={"SLOTS": 28}, enums={"loss": ("LOSSES",)}, hooks=HOOKS)


class Block:
    """Keeps the labels and values of each metric."""

    def __init__(self) -> None:
        self.labels: dict[str, list[Any]] = {}
        self.values: dict[str, list[float]] = {}

    def add(self, metric: str, labels: list[Any], values: list[float]) -> None:
        self.labels[metric], self.values[metric] = labels, values

    def add_histogram(self, *arguments: object) -> None:
        pass


def own_cost(seconds: Any) -> OwnCost:
    """Return the cost with a namer and exporters whose CPU time is more each time that it is asked for."""
    resolver = SimpleNamespace(restarts=0, refused=0, pid=os.getpid(), cpu_seconds=lambda: next(seconds))
    exporter = SimpleNamespace(ended_seconds=0.0, cpu_seconds=lambda: next(seconds))
    no_losses = SimpleNamespace(read=lambda: np.zeros(0, np.int64))
    collector = SimpleNamespace(losses=no_losses, entries={}, capacities={}, abandoned=0)
    return OwnCost(MANIFEST, collector, [], resolver, exporter)  # type: ignore[arg-type]


def exported(cost: OwnCost) -> list[float]:
    block = Block()
    cost.export(block, [], 0)  # type: ignore[arg-type]
    return block.values["lockd_cpu_seconds_total"]


def test_the_next_start_goes_on_with_what_was_exported() -> None:
    cost = own_cost(count(100))
    cost.read()
    saved = cost.save()
    sampler, namer = exported(cost)

    # This process is both samplers: the second one adds all its CPU time to what the first one saved.
    following = own_cost(count(0))
    following.restore(saved, is_end=False)
    sampler_then, namer_then = exported(following)
    assert namer_then >= namer == saved["others"]["namer_seconds"]
    assert sampler_then >= sampler == saved["others"]["sampler_seconds"]


def test_what_is_exported_is_as_new_as_what_was_read() -> None:
    cost = own_cost(count(100))
    _, before = exported(cost)
    cost.read()
    assert exported(cost)[1] > before


def test_a_hook_with_two_programs_is_one_line_and_attached_if_both_are() -> None:
    """Prometheus would drop one of two lines with the same labels, whichever of them says what is missing."""
    block = Block()
    own_cost(count(0)).export(block, [], 0)  # type: ignore[arg-type]
    labels, values = block.labels["lockd_hook_attached"], block.values["lockd_hook_attached"]
    assert dict(zip(labels, values, strict=True)) == {
        ("kernel_locks", "downgrade_write", "kprobe"): False,
        ("kernel_locks", "up_read", "kprobe"): True,
        ("kernel_locks", "up_read", "fentry"): False,
    }
    assert len(labels) == 3
