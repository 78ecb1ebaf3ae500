"""Tests of lockd_unit_info: a line for each unit with series, within a share of all lines, for any name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from prometheus_client import generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from lockd import messages
from lockd.export.catalog import CATALOG
from lockd.export.exposition import Exposition
from lockd.names.labels.cgroup_paths import Unit, printable_path, unit_of
from lockd.names.labels.processes import Processes
from lockd.names.labels.units import Units
from lockd.sample.series.block import Block
from lockd.sample.series.limits import SHARES, Limits, LineBudget
from lockd.sample.series.ranking import Presence
from lockd.sample.series.series import Series
from lockd.sample.series.unit_info import UnitInfo, units_of
from tests.support.container_paths import CONTAINERS
from tests.support.small_procfs import Procfs

INFO = "lockd_unit_info"


class Host:
    """Units, each with a series in a family that has one line for each series."""

    def __init__(self, max_lines: int = 10_000) -> None:
        self.budget = LineBudget(Limits(max_lines=max_lines))
        self.info = UnitInfo(self.budget)
        self.series = Series(
            "futex", {"calls": np.int64}, counters={"calls": "calls"}, names=(0, 1), lines=1,
            budget=self.budget, others=1,
        )  # fmt: skip
        self.known: dict[str, Unit] = {}

    def add(self, unit: Unit) -> None:
        self.known[unit.name] = unit
        self.series.row((unit.name, "comm"), 0.0)

    def block(self) -> bytes:
        block = Block((1,), 28)
        self.lines = self.info.export(block, self.known, [self.series])
        return block.pack()

    def exported(self) -> list[Unit]:
        head, _ = messages.unpack(memoryview(self.block()))
        (metric,) = head["metrics"]
        units = [Unit(*labels) for labels in metric["labels"]]
        assert metric["name"] == INFO
        assert self.lines == len(units)
        return units


def test_the_fields_of_a_unit_are_the_labels() -> None:
    assert CATALOG[INFO].labels[1:] == Unit._fields[1:]


def test_each_unit_with_series_has_one_line_and_no_other_has_one() -> None:
    host = Host()
    host.add(Unit("a.service", slice="system.slice"))
    host.add(Unit("0123", "0123abcd", "uid", "kubepods.slice", "containerd"))
    host.known["gone.service"] = Unit("gone.service")
    for nameless in ("", "kernel", "other"):
        host.series.row((nameless, "comm"), 0.0)
    host.series.row(("a.service", "another"), 0.0)
    assert sorted(host.exported()) == sorted([host.known["a.service"], host.known["0123"]])


def test_a_unit_whose_series_are_retired_has_no_line() -> None:
    host = Host()
    host.add(Unit("a.service"))
    assert host.exported() == [Unit("a.service")]
    host.series.rearrange(Presence(), idle_seconds=60.0, now=1000.0)
    assert host.exported() == []
    assert units_of([host.series]) == set()


def test_the_lines_keep_to_their_share_and_pods_come_first_then_containers() -> None:
    host = Host(max_lines=2000)
    for number in range(200):
        host.add(Unit(f"{number:03}.service"))
    for number in range(20):
        pod = "" if number % 2 else "a-b-c"
        host.add(Unit(f"{number:012x}", f"{number:064x}", pod))
    shown = host.exported()
    assert len(shown) == int(SHARES["unit"] * (2000 - 400 - 1)) == 47
    assert [unit.name for unit in shown] == [
        *(f"{number:012x}" for number in (*range(0, 20, 2), *range(1, 20, 2))),
        *(f"{number:03}.service" for number in range(27)),
    ]
    assert host.exported() == shown


def test_other_families_have_the_same_room_however_many_units_there_are() -> None:
    host = Host(max_lines=2000)
    before = host.budget.room("futex")
    for number in range(200):
        host.known[f"{number}.service"] = Unit(f"{number}.service")
    host.exported()
    assert host.budget.room("futex") == before


def test_hostile_names_are_label_values_in_both_formats() -> None:
    host = Host()
    names = ['a"b', "a\\b", "a\nb", "a{b}=1", "%s%d", "x" * 240, "\x1b[31m", "\u2028", "é", "# HELP"]
    for number, name in enumerate(names):
        path = f"/system.slice/{name}.slice/{number}.service".encode()
        host.add(unit_of(printable_path(path)))
        host.add(unit_of(printable_path(f"/lxc.payload.{name}".encode())))
    host.add(unit_of(printable_path(b"/\xff\xfe.slice/b.service")))
    head, arrays = messages.unpack(memoryview(host.block()))
    for encode, parse in (
        (generate_latest, text_string_to_metric_families),
        (openmetrics.generate_latest, parse_openmetrics),
    ):
        text = Exposition(encode, Path("/proc")).text(head, arrays).decode()
        told = [each for family in parse(text) for each in family.samples if each.name == INFO]
        assert len(told) == 2 * len(names) + 1 == sum(line.startswith(INFO) for line in text.splitlines())
        labels = {tuple(sample.labels[label] for label in CATALOG[INFO].labels) for sample in told}
        assert labels == set(host.known.values())
        assert {sample.value for sample in told} == {1.0}


def test_a_process_tells_what_its_unit_is(tmp_path: Path) -> None:
    """The labels follow from /proc/PID/cgroup."""
    procfs, units = Procfs(tmp_path, mountinfo=""), Units(tmp_path)
    processes, host = Processes(units, tmp_path), Host()
    host.known = units.known
    expected = set()
    for tgid, (path, unit) in enumerate(CONTAINERS.items(), 1000):
        procfs.add(tgid, b"a", cgroup=f"0::{path}\n".encode())
        host.series.row(processes.name(tgid), 0.0)
        expected.add(unit.name)
    assert {unit.name for unit in host.exported()} == expected
