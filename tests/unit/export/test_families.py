"""Tests of the exposition: both formats have the values of a block as they are in the block."""

from __future__ import annotations

import array
import itertools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from lockd.export.catalog import CATALOG
from lockd.export.exposition import Exposition, SnapshotError, own_usage
from lockd.messages import pack, unpack
from tests.needs import need
from tests.support.exporter_process import EDGES, REPOSITORY, full_block

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


@pytest.fixture
def procfs(tmp_path: Path) -> Path:
    (tmp_path / "self").mkdir()
    before = " ".join(["S", *["0"] * 10])
    (tmp_path / "self" / "stat").write_text(f"7 (a) b) {before} 250 50 0 0 20 0 1 0 100 1 1\n")
    (tmp_path / "self" / "statm").write_text("1000 25 3 1 0 9 0\n")
    return tmp_path


def expose(block: bytes, procfs: Path, accept: str = "") -> str:
    return Exposition(choose_encoder(accept)[0], procfs).text(*unpack(memoryview(block))).decode()


def samples(text: str, accept: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    parse: Any = text_string_to_metric_families
    if accept:
        parse = openmetrics.text_string_to_metric_families
    found = {}
    for family in parse(text):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found
            found[key] = sample.value
    return found


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
def test_every_value_comes_out_as_it_went_in(procfs: Path, accept: str) -> None:
    found = samples(expose(full_block(), procfs, accept), accept)
    for at, metric in enumerate(CATALOG.values()):
        for row in range(2 if metric.labels else 1):
            labels = {label: f"{label}-{row}" for label in metric.labels}
            key = tuple(sorted(labels.items()))
            if metric.kind == "histogram":
                assert found.pop((f"{metric.name}_sum", key)) == at + row + 0.25
                total = 0
                for slot, edge in enumerate([*EDGES, float("inf")]):
                    total += at + row + slot
                    le = "+Inf" if slot == len(EDGES) else repr(edge)
                    bucket = tuple(sorted({**labels, "le": le}.items()))
                    assert found.pop((f"{metric.name}_bucket", bucket)) == total
                assert found.pop((f"{metric.name}_count", key)) == total
            else:
                expected = 1 if metric.kind == "info" else 1000.0 * at + row + 0.5
                assert found.pop((metric.name, key)) == expected
    own = (("process", "exporter"),)
    assert found == {
        ("lockd_cpu_seconds_total", own): 3.0,
        ("lockd_resident_bytes", own): 25 * 4096,
    }


def test_own_usage_without_anything_from_the_sampler(procfs: Path) -> None:
    text = expose(pack({"metrics": [], "buckets": EDGES}, {}), procfs)
    assert 'lockd_cpu_seconds_total{process="exporter"} 3.0' in text
    assert own_usage(Path("/proc"))["lockd_resident_bytes"] > 1 << 20


WITHOUT_COLLECTOR = """
import prometheus_client.core
del prometheus_client.registry.Collector
from lockd.export.exposition import Exposition
from lockd.messages import pack, unpack
block = memoryview(pack({"metrics": [], "buckets": []}, {}))
print(Exposition(prometheus_client.generate_latest).text(*unpack(block)).decode())
"""


def test_a_prometheus_client_without_the_class_collector_will_do() -> None:
    """The class came with prometheus_client 0.14, and Ubuntu 22.04 has 0.9."""
    text = subprocess.check_output([sys.executable, "-c", WITHOUT_COLLECTOR], cwd=REPOSITORY, text=True)
    assert '\nlockd_cpu_seconds_total{process="exporter"} ' in text


def test_promtool_has_nothing_to_say_but_about_microseconds(procfs: Path) -> None:
    need("promtool")
    checked = subprocess.run(
        ["promtool", "check", "metrics"],
        input=expose(full_block(), procfs).encode(),
        capture_output=True,
        check=False,
    )
    said = (checked.stdout + checked.stderr).decode().splitlines()
    # Names in _us are part of the contract (users' alerts are written on max_blocked_us).
    assert [line for line in said if not line.split()[0].endswith("_us")] == []


def test_every_metric_of_a_block_has_its_help_even_before_there_are_rows(procfs: Path) -> None:
    head = {"metrics": [{"name": name, "labels": []} for name in CATALOG], "buckets": EDGES}
    arrays: dict[str, Any] = {}
    for metric in CATALOG.values():
        for name in (metric.name, f"{metric.name}.buckets", f"{metric.name}.sum"):
            arrays[name] = array.array("d")
    text = expose(pack(head, arrays), procfs)
    for name, metric in CATALOG.items():
        assert f"# HELP {name} {metric.help}\n# TYPE {name} " in text


def test_help_names_the_unit() -> None:
    for metric in CATALOG.values():
        if "seconds" in metric.name:
            assert "in seconds" in metric.help, metric.name
        if metric.name.endswith("_us"):
            assert "in microseconds" in metric.help, metric.name


def test_help_is_one_or_two_sentences() -> None:
    for metric in CATALOG.values():
        assert metric.help.endswith("."), metric.name
        assert len(re.findall(r"\.(?=\s|$)", metric.help)) <= 2, metric.name


@pytest.mark.parametrize("name", ["a\\b", 'a"b', "a\nb", "a\rb", "Ünïcode", "\udc80\udcff", ""])
@pytest.mark.parametrize("accept", ["", OPENMETRICS])
def test_any_process_name_survives(procfs: Path, name: str, accept: str) -> None:
    text = expose(full_block(1, comm=name), procfs, accept)
    comms = {dict(key).get("comm") for _, key in samples(text, accept)}
    expected = "\\udc80\\udcff" if name.startswith("\udc80") else name
    assert comms == {None, f"{expected}-0"}


@pytest.mark.parametrize(
    ("head", "arrays", "says"),
    [
        ({"metrics": [{"name": "lockd_nonsense", "labels": []}]}, {}, "lockd_nonsense"),
        ({"metrics": [{"name": "lockd_ticks_total", "labels": [[]]}]}, {}, "lockd_ticks_total"),
        (
            {"metrics": [{"name": "lockd_series", "labels": [["a", "b"]]}]},
            {"lockd_series": array.array("d", [1])},
            "family",
        ),
        (
            {"metrics": [{"name": "lockd_tick_seconds", "labels": [[]]}]},
            {"lockd_tick_seconds.buckets": array.array("q", [1, 2])},
            "lockd_tick_seconds.buckets",
        ),
    ],
)
def test_a_wrong_block_is_an_error_that_names_what_is_wrong(
    procfs: Path, head: dict[str, Any], arrays: dict[str, Any], says: str
) -> None:
    with pytest.raises(SnapshotError, match=says):
        expose(pack({**head, "buckets": EDGES}, arrays), procfs)


class AsIs:
    """A collector of given families."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


ROWS = st.dictionaries(
    st.tuples(st.text(st.characters(codec="utf-8"), max_size=4), st.sampled_from(["a%sb", " 1.0", "#"])),
    st.tuples(
        st.lists(st.integers(0, 10**16), min_size=len(EDGES) + 1, max_size=len(EDGES) + 1),
        st.floats(0, allow_infinity=True),
    ),
    max_size=5,
)
COUNTER, HISTOGRAM = CATALOG["lockd_futex_wakes_total"], CATALOG["lockd_offcpu_runqueue_seconds"]


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
@given(blocks=st.lists(ROWS, min_size=1, max_size=4))
def test_block_after_block_the_text_is_what_prometheus_client_writes(
    accept: str, blocks: list[dict[tuple[str, str], tuple[list[int], float]]]
) -> None:
    """From block to block, rows are added, keep their labels with other numbers, and disappear."""
    encode, _ = choose_encoder(accept)
    exposition = Exposition(encode, Path("/proc"))
    for rows in blocks:
        counter = CounterMetricFamily(COUNTER.name, COUNTER.help, labels=COUNTER.labels)
        histogram = HistogramMetricFamily(HISTOGRAM.name, HISTOGRAM.help, labels=HISTOGRAM.labels)
        counts, sums = array.array("q"), array.array("d")
        for labels, (row, number) in rows.items():
            counts.extend(row)
            sums.append(number)
            counter.add_metric(labels, number)
            up_to = list(itertools.accumulate(row))
            edges = [*(repr(edge) for edge in EDGES), "+Inf"]
            histogram.add_metric(labels, list(zip(edges, up_to, strict=True)), number)
        registry = CollectorRegistry()
        registry.register(AsIs([counter, histogram]))  # type: ignore[arg-type]  # only collect() is called
        metrics = [{"name": one.name, "labels": [list(row) for row in rows]} for one in (COUNTER, HISTOGRAM)]
        arrays = {
            COUNTER.name: sums,
            f"{HISTOGRAM.name}.buckets": counts,
            f"{HISTOGRAM.name}.sum": sums,
        }
        block = pack({"metrics": metrics, "buckets": EDGES}, arrays)
        text = exposition.text(*unpack(memoryview(block))).decode()
        end = encode(CollectorRegistry()).decode()
        assert text.startswith(encode(registry).decode().removesuffix(end))
        assert text.endswith(end)
        other = text.removeprefix(encode(registry).decode().removesuffix(end)).removesuffix(end)
        samples_left = [line for line in other.splitlines() if not line.startswith("#")]
        assert all('{process="exporter"} ' in line for line in samples_left)
        assert len(samples_left) == 2


def test_only_the_lines_of_the_last_block_are_kept(procfs: Path) -> None:
    exposition = Exposition(choose_encoder("")[0], procfs)
    for comm in ("one", "two", "one"):
        text = exposition.text(*unpack(memoryview(full_block(1, comm=comm)))).decode()
        assert f'comm="{comm}-0"' in text
        kept = {row for rows in exposition._lines.values() for row in rows}
        assert {row[1] for row in kept if len(row) > 1 and row[1][:3] in ("one", "two")} == {f"{comm}-0"}
