"""lockd trace report --by holder, on a file as --holders of lockd trace futex writes it (futex_traces)."""

from __future__ import annotations

import argparse
import csv
import io
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockd.kernel.manifest import Manifest
from lockd.names.protocol import NO_RELEASE, OWNER_ENDED, UNKNOWN_HOLDER
from lockd.trace.futex import futex
from lockd.trace.futex import report as tool
from lockd.trace.futex.holders import BY_HOLDER, COLUMNS, HolderRow, Holders, as_csv, read
from lockd.trace.futex.summary import as_table, judge_stack, summarise
from tests.unit.names.test_locking import RELEASES, frames
from tests.unit.trace.test_report import NAMES, TRACES, report

HOLDERS = TRACES / "holders.csv"
HEAD = ",".join(COLUMNS)
LINE = '1,0x10,5,5,1,"lock","m","holds(int, int)","main;holds(int, int)"'


def by_holder(*arguments: object, **given: Any) -> tuple[str, str]:
    return report("--by", "holder", *arguments, **given)


def objects(*arguments: object) -> list[dict[str, Any]]:
    return [json.loads(line) for line in by_holder("--format", "json", *arguments)[0].splitlines()]


def test_a_table_has_a_line_for_each_lock_and_holder() -> None:
    text, said = by_holder(HOLDERS)
    assert [line.rstrip() for line in text.splitlines()] == [
        "this%   cum%  waited.sum  releases  waited.avg  waited.max  kind  pid    lock                "
        "holder                   stack",
        " 89.0   89.0      4.50 s        65    69.23 ms      1.50 s  lock  4711   server:cache_mutex  "
        "Cache<int, long>::flush  Cache<int, long>::flush < Cache<int, long>::evict < serve < main < ...",
        "  9.9   98.9   500.00 ms     1,800      278 us     2.50 ms  lock  4711   server:cache_mutex  "
        "Cache<int, long>::get    Cache<int, long>::get < worker < start_thread < clone3",
        "  0.9   99.8    46.27 ms        20     2.31 ms     3.99 ms  pi    15110  pi_mutex:mutex      "
        "unlock                   unlock < hand_over < main < __libc_start_call_main < ...",
        "  0.2  100.0    10.00 ms         1    10.00 ms    10.00 ms  lock  4711   0x7f00aa            "
        "(no release)",
        "  0.0  100.0      700 us         2      350 us      500 us  lock  4711   0x7f00aa            "
        "Cache<int, long>::flush  Cache<int, long>::flush < timer < start_thread < clone3",
    ]
    assert said == ""
    assert by_holder("-n", 1, HOLDERS)[0].splitlines()[2:] == ["and 4 more"]


def test_stacks_of_one_holder_are_one_line_with_the_stack_of_most_time() -> None:
    first = objects("-c", "waited.sum,waited.max,waited.avg,releases,stacks", HOLDERS)[0]
    assert first == {
        "kind": "lock", "pid": 4711, "lock": "server:cache_mutex", "holder": "Cache<int, long>::flush",
        "stack": [
            "_start", "main", "serve", "Cache<int, long>::evict", "Cache<int, long>::flush",
            "std::mutex::unlock", "pthread_mutex_unlock",
        ],
        "this%": 89.0, "cum%": 89.0, "waited.sum": 4_500_000, "waited.max": 1_500_000,
        "waited.avg": 69230.8, "releases": 65, "stacks": 2,
    }  # fmt: skip


def test_csv_and_json_say_the_same_in_microseconds() -> None:
    columns = ("waited.sum", "releases", "waited.avg", "waited.max")
    rows = list(csv.DictReader(io.StringIO(by_holder("--format", "csv", HOLDERS)[0]), strict=True))
    found = objects(HOLDERS)
    assert list(rows[0]) == ["kind", "pid", "lock", "holder", "stack", "this%", "cum%", *columns]
    assert [row["waited.sum"] for row in rows] == ["4500000", "500000", "46266", "10000", "700"]
    for row, one in zip(rows, found, strict=True):
        assert all(float(row[column]) == one[column] for column in columns)
        assert (row["lock"], row["holder"], row["stack"]) == (
            one["lock"], one["holder"], ";".join(one["stack"])
        )  # fmt: skip


@pytest.mark.parametrize(("column", "shared"), [
    ("waited.sum", "waited.sum"), ("releases", "releases"), ("waited.max", "waited.sum"),
    ("waited.avg", "waited.sum"), ("stacks", "waited.sum"),
])  # fmt: skip
def test_lines_are_sorted_by_any_column(column: str, shared: str) -> None:
    found = objects("-s", column, "-c", f"{column},{shared}", HOLDERS)
    assert [one[column] for one in found] == sorted((one[column] for one in found), reverse=True)
    total = sum(one[shared] for one in found)
    assert [one["this%"] for one in found] == [round(100 * one[shared] / total, 1) for one in found]


def test_group_is_the_same_option_and_files_may_be_standard_input(tmp_path: Path) -> None:
    report("-g", "holder", "-o", tmp_path / "out", "-", given=HOLDERS.read_text())
    assert (tmp_path / "out").read_text() == by_holder(HOLDERS)[0]
    assert report("--by", "comm", NAMES) == report("-g", "comm", NAMES)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", f": is empty; rule: a first line with the columns {HEAD}, as in a file of holders, which"),
        ("pid,addr\n", f":1: column waited_us: is missing; rule: a first line with the columns {HEAD}, as"),
        (f"{HEAD}\n{LINE}\n1,0x10,5\n", ":3: column max_waited_us: there are 3 fields; rule: 9, one for"),
        (f"{HEAD}\n{LINE},1\n", ":2: column stack: there are 10 fields; rule: 9, one for each column"),
        (f"{HEAD}\nx{LINE}\n", ":2: column pid: 'x1'; rule: a whole number, 0 or more"),
        (f"{HEAD}\n{LINE.replace('0x10', 'there')}\n", ":2: column addr: 'there'; rule: an address such as"),
        (f"{HEAD}\n{LINE.replace('0x10,5', '0x10,-5')}\n", ":2: column waited_us: '-5'; rule: a whole"),
        (f"{HEAD}\n{LINE.replace('5,5,', '5,5.5,')}\n", ":2: column max_waited_us: '5.5'; rule: a whole"),
        (f"{HEAD}\n{LINE.replace('5,1,', '5,,')}\n", ":2: column releases: ''; rule: a whole number"),
        (f"{HEAD}\n{LINE.replace('lock', 'cond')}\n", ":2: column kind: 'cond'; rule: lock or pi"),
        (f"{HEAD}\n{LINE}\n{LINE[:-7]}", ":3: unexpected end of data; rule: a line of CSV"),
        (f"{HEAD}\n{LINE.replace('holds', 'h' * 200_000)}\n", ":2: field larger than field limit"),
    ],
)
def test_bad_files_are_told_by_file_line_column_and_rule(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "held.csv"
    path.write_text(text)
    assert f"{path}{says}" in by_holder(path, code=2)[1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ("--by", "holder", NAMES),
            (f"{NAMES}:1: column waited_us: is missing", "`lockd trace futex --holders FILE` writes;"),
        ),
        (
            (HOLDERS,),
            (f"{HOLDERS}:1: column tid: is missing", "`lockd trace futex -o FILE` writes;", "--by holder"),
        ),
        (("--by", "holder", "/nowhere.csv"), ("/nowhere.csv: cannot be read: No such file or directory",)),
        (
            ("--by", "holder", "-e", "all", HOLDERS),
            ("-e all: only locks have holders; rule: -e lock with --by holder",),
        ),
        (("--by", "holder", "-e", "cond", HOLDERS), ("-e cond: only locks have holders",)),
        (
            ("--by", "holder", "-s", "blocked.sum", HOLDERS),
            ("-s: 'blocked.sum' is no column with --by holder; rule: waited.sum, waited.max, waited.avg,",),
        ),
        (
            ("--by", "holder", "-c", "waited.sum,threads", HOLDERS),
            ("-c: 'threads' is no column with --by holder; rule: waited.sum, waited.max, waited.avg,",),
        ),
        (
            ("-s", "waited.sum", NAMES),
            ("-s: 'waited.sum' is no column with --by lock; rule: blocked.sum, blocked.count,",),
        ),
        (("-c", "releases", NAMES), ("-c: 'releases' is no column with --by lock; rule: blocked.sum,",)),
        (("--by", "holder"), ("one of FILE and --live is needed",)),
    ],
)
def test_wrong_usage(arguments: tuple[object, ...], says: tuple[str, ...]) -> None:
    said = report(*arguments, code=2)[1]
    assert all(part in said for part in says), said


def test_nothing_to_report_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "held.csv"
    path.write_text(f"{HEAD}\n")
    for form in ("table", "csv", "json"):
        by_holder("--format", form, path)


@pytest.mark.parametrize(("group", "has_holders"), [("holder", True), ("lock", False)])
def test_a_live_trace_is_with_holders_if_they_are_asked_for(
    group: str, has_holders: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[float | None, bool, bool]] = []

    def trace_calls(
        title: str, args: argparse.Namespace, duration: float | None, with_names: bool, with_holders: bool
    ) -> futex.FutexTrace:
        asked.append((duration, with_names, with_holders))
        return futex.FutexTrace([], read(HOLDERS), {}, 0.0, 10.0)

    monkeypatch.setattr(futex, "trace_calls", trace_calls)
    parser = argparse.ArgumentParser()
    tool.add_options(parser)
    written = tmp_path / "out"
    assert tool.run(parser.parse_args(["--by", group, "--live", "10", "-p", "1234", "-o", str(written)])) == 0
    assert asked == [(10.0, True, has_holders)]
    assert (written.read_text() == by_holder(HOLDERS)[0]) == has_holders


NAME = st.text(st.characters(codec="utf-8"), min_size=1, max_size=30)
TIME = st.integers(0, 2**63).map(lambda ns: ns // 1000 * 1000)
ROWS = st.lists(
    st.builds(
        HolderRow,
        releases=st.integers(0, 2**63), waited_ns=TIME, max_waited_ns=TIME, pid=st.integers(0, 2**22),
        address=st.integers(0, 2**64 - 1), kind=st.sampled_from(["lock", "pi"]), lock=NAME,
        holder=NAME | st.sampled_from([NO_RELEASE, OWNER_ENDED, UNKNOWN_HOLDER]),
        frames=st.lists(NAME, max_size=5).map(tuple),
    ),
    max_size=5,
)  # fmt: skip


@given(rows=ROWS)
def test_the_report_reads_what_is_written(
    rows: list[HolderRow], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Names may be anything; those with characters that cannot be printed have escapes in the file."""
    path = tmp_path_factory.mktemp("trace") / "held.csv"
    path.write_text("".join(as_csv(rows)), encoding="utf-8")
    found = read(path)
    numbers = ("pid", "address", "kind", "releases", "waited_ns", "max_waited_ns")
    assert [[getattr(row, name) for name in numbers] for row in found] == [
        [getattr(row, name) for name in numbers] for row in rows
    ]
    assert [len(row.frames) for row in found] == [len(row.frames) for row in rows]
    assert list(as_csv(found)) == list(as_csv(rows))


@pytest.mark.parametrize(
    "unlocking",
    [("pthread_mutex_unlock", "libc.so.6+0x86180"), ("libc.so.6+0x8d810",), ("ld-musl-x86_64.so.1+0x5b1f0",)],
)
def test_functions_of_the_c_library_without_a_name_are_locking_code(unlocking: tuple[str, ...]) -> None:
    """Most hosts do not have the C library's debugging symbols."""
    assert judge_stack(("main", "unlock", *unlocking)).site == "unlock"


def test_other_functions_without_a_name_may_hold_a_lock() -> None:
    assert judge_stack(("main", "server+0x1234", "pthread_mutex_unlock")).site == "server+0x1234"


def test_the_holder_is_the_code_around_what_unlocks() -> None:
    """The daemon names the same holders. A trace has no names of object files, by which the daemon knows the
    locks that the C library takes for itself."""
    cases = [case for case in RELEASES.replace("\n    ", " ").strip().split("\n") if ":free" not in case]
    sites, stacks = zip(*(case.split(": ") for case in cases), strict=True)
    functions = [tuple(frame.function for frame in frames(stack)) for stack in stacks]
    keys = np.zeros(len(cases), [(name, np.int64) for name in ("tgid", "address", "kind", "end", "stack")])
    keys["address"] = keys["stack"] = np.arange(1, len(cases) + 1)
    values = np.ones(len(cases), [(name, np.int64) for name in ("releases", "waited_ns", "max_waited_ns")])
    enums = {"futex_kind": ("lock",), "wait_end": ("release",)}
    held = Holders(cast("Manifest", SimpleNamespace(enums=enums)))
    held.add({Holders.PAIR: (keys, values)})
    rows = held.rows(lambda number: functions[number - 1], lambda tgid, address, kind: (kind, ""))
    holders = {row.address: row.holder for row in rows}
    assert [holders[number] for number in keys["address"]] == [site.partition(":")[2] for site in sites]
    for line in list(as_table(summarise(rows, BY_HOLDER)))[1:]:
        *_, holder, stack = re.split("  +", line.strip())
        assert stack.split(" < ")[0] == holder
