"""Tests of the formats of profiles. Parsers of other people, or made for these tests, read them back."""

from __future__ import annotations

import html
import json
import re
import subprocess
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockd.printable import printable
from lockd.trace.core.output import FORMATS
from lockd.views import flamegraph, pprof
from lockd.views.profile import KernelFrame, Mark, Profile, Sample, Value
from tests.needs import need
from tests.support.pprof_decoder import Decoded, fields

NASTY = "operator<<&\"';x\n\x1b[31m\x00\udc80\u202e]]>"
"""The name of a function in a program that wants to do harm."""
SAMPLES = [
    Sample("mysqld", 10, 11, ("main", "lock", KernelFrame("futex_wait")), (1_500_000, 3)),
    Sample("mysqld", 10, 12, ("main", "lock", KernelFrame("futex_wait")), (500_000, 1)),
    Sample("mysqld", 10, 11, ("main", "read", KernelFrame("read")), (250, 7), {"lock": "LOCK_open"}),
    Sample("mysqld", 10, 11, ("main", "read"), (10, 1)),
    Sample("kworker/0:1", 20, 20, (KernelFrame("worker_thread"), KernelFrame("schedule")), (2**40, 1)),
    Sample("a;b\n", 30, 30, (NASTY, Mark("[stack lost]")), (1000, 2)),
    Sample("idle", 40, 40, ("main", "nothing"), (0, 0)),
]
VALUES = (Value("off-CPU time", "microseconds"), Value("waits", "count"))
PROFILE = Profile("lockd trace <offcpu>", VALUES, SAMPLES, 1_700_000_000.25, 12.5)
SVG = "{http://www.w3.org/2000/svg}"


def test_pprof_by_a_decoder_of_its_own() -> None:
    data = pprof.encode(PROFILE)
    assert data == pprof.encode(PROFILE)
    decoded = Decoded(data)
    raw, strings, samples = decoded.raw, decoded.strings, decoded.samples
    assert strings[0] == ""
    assert len(set(strings)) == len(strings)
    assert decoded.types == [("off-CPU time", "nanoseconds"), ("waits", "count")]
    assert len(samples) == len(SAMPLES)
    user, kernel = "[user]", "[kernel]"
    assert (
        [("futex_wait", kernel), ("lock", user), ("main", user)],
        [1_500_000_000, 3],
        {"comm": "mysqld", "pid": 10, "tid": 11},
    ) in samples
    of_read = next(sample for sample in samples if "lock" in sample[2])
    assert of_read[2]["lock"] == "LOCK_open"
    assert of_read[0] == [("read", kernel), ("read", user), ("main", user)]
    assert ("[stack lost]", "") in [frame for stack, _, _ in samples for frame in stack]
    assert sum(values[0] for _, values, _ in samples) == 1000 * sum(sample.values[0] for sample in SAMPLES)
    assert raw[9] == [1_700_000_000_250_000_000]
    assert raw[10] == [12_500_000_000]
    assert [{n: strings[v] for n, v in fields(one)} for one in raw[11]] == [{1: "waits", 2: "count"}]
    assert raw[12] == [1]
    assert [strings[at] for at in raw[13]] == ["lockd trace <offcpu>"]
    assert [strings[at] for at in raw[14]] == ["off-CPU time"]


def test_pprof_names_of_times_have_no_unit_that_they_are_not_in() -> None:
    us = "microseconds"
    values = Value("off_cpu_us", us), Value("count", "count"), Value("max_us", us, is_maximum=True)
    decoded = Decoded(pprof.encode(Profile("", values, [Sample("app", 1, 1, ("main",), (7, 1, 7))])))
    ns = "nanoseconds"
    assert decoded.types == [("off_cpu", ns), ("count", "count"), ("max", ns)]
    assert [decoded.strings[at] for at in decoded.raw[14]] == ["off_cpu"]


def test_pprof_values_stay_at_the_most_that_it_has_room_for() -> None:
    """Readers would take a time of many threads that needs all 64 bits for a negative one."""
    long = Sample("pool", 1, 1, ("main",), (2**63 // 1000 + 1, 1))
    ((_, values, _),) = Decoded(pprof.encode(replace(PROFILE, samples=[long]))).samples
    assert values == [2**63 - 1, 1]


def test_pprof_by_go(tmp_path: Path) -> None:
    go = need("go")
    file = tmp_path / "a.pb.gz"
    file.write_bytes(pprof.encode(PROFILE))

    def go_pprof(*how: str) -> str:
        command = [go, "tool", "pprof", *how, str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert "error" not in done.stderr.lower()
        return done.stdout

    raw = go_pprof("-raw")
    assert "off-CPU time/nanoseconds[dflt] waits/count" in raw
    assert "PeriodType: waits count\nPeriod: 1\n" in raw
    assert re.search(r"^ +1500000000 +3: \d+ \d+ \d+ $", raw, re.MULTILINE)
    assert "pid:[10] tid:[11]" in raw
    assert "Duration: 12.5" in raw
    top = go_pprof("-top", "-unit=us", "-tagfocus=comm=mysqld")
    rows = {line.split()[-1]: line.split() for line in top.splitlines() if line.endswith(("_wait", "main"))}
    assert (rows["futex_wait"][0], rows["main"][3]) == ("2000000us", "2000260us")
    assert "Type: waits" in go_pprof("-top", "-sample_index=waits")
    assert NASTY.splitlines()[1] not in go_pprof("-top")


def test_folded_by_the_rule_of_its_readers() -> None:
    """A line is a stack and its value, divided by the last blank. Semicolons divide the frames."""
    stacks: Counter[tuple[str, ...]] = Counter()
    for line in "".join(FORMATS["folded"](PROFILE)).splitlines():
        stack, _, value = line.rpartition(" ")
        assert line.isprintable()
        assert tuple(stack.split(";")) not in stacks
        stacks[tuple(stack.split(";"))] += int(value)
    assert stacks["mysqld", "main", "lock", "futex_wait"] == 2_000_000
    assert stacks["a:b\\n", printable(NASTY).replace(";", ":"), "[stack lost]"] == 1000
    assert sum(stacks.values()) == sum(sample.values[0] for sample in SAMPLES)


def test_json_lines() -> None:
    rows = [json.loads(line) for line in FORMATS["json"](PROFILE)]
    assert len(rows) == len(SAMPLES)
    assert {
        "comm": "mysqld", "pid": 10, "tid": 12, "stack": ["main", "lock", "futex_wait"],
        "off-CPU time": 500_000, "waits": 1,
    } in rows  # fmt: skip


def test_one_thread_at_one_stack_is_one_sample() -> None:
    values = Value("time", "microseconds"), Value("longest", "microseconds", is_maximum=True)
    samples = [
        Sample("p", 1, 1, ("read",), (5, 3)), Sample("p", 1, 1, ("read",), (7, 4)),
        Sample("p", 1, 1, (KernelFrame("read"),), (1, 1)), Sample("p", 1, 2, ("read",), (1, 1)),
        Sample("p", 1, 1, ("read",), (1, 1), {"lock": "a"}),
    ]  # fmt: skip
    merged = Profile("title", values, samples).sorted()
    assert [sample.values for sample in merged] == [(1, 1), (1, 1), (1, 1), (12, 4)]


@pytest.mark.parametrize("name", ["stacks", "table", "folded", "json"])
def test_names_cannot_change_a_terminal(name: str) -> None:
    text = "".join(FORMATS[name](PROFILE))
    assert "x1b[31m" in text
    assert not [c for c in text if not c.isprintable() and c != "\n"]


def boxes(svg: ET.Element) -> list[dict[str, Any]]:
    found = []
    for group in svg.findall(f"{SVG}g[@id='frames']/{SVG}g"):
        rect, title = group.find(f"{SVG}rect"), group.findtext(f"{SVG}title")
        assert rect is not None and title is not None
        name, about = title.split("\n")
        at = {side: float(rect.attrib[side]) for side in ("x", "y", "width", "height")}
        text = group.findtext(f"{SVG}text") or ""
        found.append({"name": name, "about": about, "class": group.attrib["class"], "text": text, **at})
    return found


def test_flame_graph_by_an_xml_parser() -> None:
    drawn = flamegraph.svg(PROFILE)
    others = Profile(PROFILE.title, VALUES, SAMPLES[::-1], PROFILE.began, PROFILE.seconds)
    assert drawn == flamegraph.svg(others)
    svg = ET.fromstring(drawn)
    found = boxes(svg)
    assert [box["name"] for box in found[:3]] == ["all", "kworker/0:1", "worker_thread"]
    assert (found[0]["x"], found[0]["width"]) == (10, 1180)
    said = "".join(svg.itertext())
    assert "lockd trace <offcpu>" in said
    assert "off-CPU time: 1,099,513.629 s in all · 12.5 s from 2023-11-14 22:13:20 UTC" in said


def flat(samples: list[Sample]) -> list[dict[str, Any]]:
    return boxes(ET.fromstring(flamegraph.svg(Profile("title", VALUES, samples))))


def test_widths_are_values_and_what_is_inside_is_within() -> None:
    samples = [sample for sample in SAMPLES if sample.comm == "mysqld"]
    found = flat(samples)
    by_name = {box["name"]: box for box in found}
    scale = 1180 / 2_000_260
    assert by_name["lock"]["width"] == pytest.approx(2_000_000 * scale, abs=0.001)
    assert by_name["lock"]["about"] == "2.000 s, 99.99%"
    assert (by_name["lock"]["class"][:-1], by_name["futex_wait"]["class"][:-1]) == ("user", "kernel")
    for box in found[1:]:
        parents = [
            one for one in found
            if one["y"] == box["y"] - 18 and one["x"] - 0.01 <= box["x"]
            and box["x"] + box["width"] <= one["x"] + one["width"] + 0.01
        ]  # fmt: skip
        assert len(parents) == 1, box


def test_what_is_too_narrow_is_one_box_and_still_counted() -> None:
    samples = [Sample("p", 1, 1, ("main", "wide"), (1_000_000, 1))]
    samples += [Sample("p", 1, 1, ("main", f"narrow{i}", "deeper"), (10, 1)) for i in range(100)]
    found = flat(samples)
    assert [box["name"] for box in found] == ["all", "p", "main", "wide", "[100 too narrow to be shown]"]
    assert sum(box["width"] for box in found[-2:]) == pytest.approx(1180, abs=0.002)
    assert found[-1]["about"] == "1.000 ms, 0.10%"
    assert found[-1]["class"].startswith("mark")


def test_names_are_cut_to_what_they_have_room_in() -> None:
    long = "std::" + "very_long_" * 40
    samples = [Sample("p", 1, 1, (long,), (10, 1)), Sample("p", 1, 1, ("b",), (90, 1))]
    box = next(box for box in flat(samples) if box["name"] == long)
    assert box["width"] == pytest.approx(118)
    assert box["text"] == long[:15] + "…"
    assert len(box["text"]) * flamegraph.LETTER <= box["width"]


def test_nasty_names_stay_text_in_both_files() -> None:
    samples = [Sample("<b>&", 1, 1, ("</svg><script>alert(1)</script>", NASTY), (5, 1))]
    profile = Profile("<script>", VALUES, samples)
    names = [box["name"] for box in boxes(ET.fromstring(flamegraph.svg(profile)))]
    assert names == ["all", "<b>&", "</svg><script>alert(1)</script>", printable(NASTY)]
    page = flamegraph.page(profile)
    assert page.count("<script") == 1
    assert "alert(1)</script>" not in page
    assert not re.search(r"(?:src|href)=|url\(|@import|https?://(?!www\.w3\.org/)", page)


def test_a_graph_of_nothing_says_so() -> None:
    for samples in ([], [Sample("p", 1, 1, ("main",), (0, 0))]):
        svg = ET.fromstring(flamegraph.svg(Profile("title", VALUES, samples)))
        assert "Nothing was measured." in "".join(svg.itertext())


@pytest.mark.parametrize(
    ("number", "unit", "says"),
    [
        (1234567, "count", "1,234,567"),
        (999, "microseconds", "999 us"),
        (1500, "microseconds", "1.500 ms"),
        (2**40, "microseconds", "1,099,511.628 s"),
        (1500, "nanoseconds", "1.500 us"),
        (7, "nanoseconds", "0.007 us"),
    ],
)
def test_amounts(number: int, unit: str, says: str) -> None:
    assert flamegraph.amount(number, Value("x", unit)) == says


CLICKS = """<script>
const all = [...document.querySelectorAll("#frames > g")];
const name = (group) => group.querySelector("title").textContent.split("\\n")[0];
const input = document.querySelector("input");
all.find((group) => name(group) === "outer").dispatchEvent(new MouseEvent("click", {bubbles: true}));
input.value = "^(inn|LEAF)";
input.dispatchEvent(new Event("input"));
document.title = JSON.stringify({
    match: document.querySelector("#matches").textContent,
    width: +document.querySelector("svg").getAttribute("width"),
    frames: all.filter((group) => group.style.display !== "none").map((group) => [
        name(group), Math.round(group.querySelector("rect").getAttribute("width")),
        group.classList.contains("match"), group.querySelector("text").textContent,
    ]),
});
</script></body>"""


def test_zoom_and_search_in_a_browser(tmp_path: Path) -> None:
    browser = need("chromium")
    samples = [
        Sample("p", 1, 1, ("outer", "inner", "leaf"), (30, 1)), Sample("p", 1, 1, ("outer",), (20, 1)),
        Sample("p", 1, 1, ("other", "leaf"), (50, 1)),
    ]  # fmt: skip
    file = tmp_path / "graph.html"
    file.write_text(flamegraph.page(Profile("title", VALUES, samples)).replace("</body>", CLICKS))
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/user"]
    command += ["--window-size=1000,600", "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    told = re.search(r"<title>(\{.*?\})</title>", done.stdout)
    assert told, done.stdout[:2000]
    seen = json.loads(html.unescape(told[1]))
    assert seen["match"] == "80.00 % match"  # what is within another match is counted once
    whole = seen["width"] - 20
    assert seen["frames"] == [
        ["all", whole, False, "all"], ["p", whole, False, "p"], ["outer", whole, False, "outer"],
        ["inner", round(0.6 * whole), True, "inner"], ["leaf", round(0.6 * whole), True, "leaf"],
    ]  # fmt: skip
