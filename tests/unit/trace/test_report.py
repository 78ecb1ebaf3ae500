"""lockd trace report, on files as lockd and locktrace write them (futex_traces)."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockd.errors import UsageError
from lockd.trace.futex.lock_rows import LockRow, as_csv, as_json, read
from lockd.trace.futex.summary import COLUMNS, FORMATS, GROUPINGS, add_kinds, select, summarise

ROOT = Path(__file__).resolve().parents[3]
TRACES = Path(__file__).parent / "futex_traces"
NAMES, PLAIN, LOCKTRACE = TRACES / "names.csv", TRACES / "plain.csv", TRACES / "locktrace.csv"
HEAD = PLAIN.read_text().splitlines()[0]


def report(*arguments: object, code: int = 0, given: str = "") -> tuple[str, str]:
    """Run the command, and return its standard output and standard error."""
    done = subprocess.run(
        [sys.executable, "-m", "lockd", "trace", "report", *map(str, arguments)],
        cwd=ROOT, capture_output=True, text=True, check=False, input=given,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout, done.stderr


def objects(*arguments: object) -> list[dict[str, Any]]:
    return [json.loads(line) for line in report("--format", "json", *arguments)[0].splitlines()]


def rows_of(path: Path) -> list[dict[str, str]]:
    """Return the rows of a file, by a reader that is not lockd's."""
    with path.open() as file:
        return list(csv.DictReader(file, strict=True))


def test_locks_are_those_with_names_and_in_order() -> None:
    found = objects(NAMES)
    assert [(one["lock"], one["kind"]) for one in found] == [
        ("stuck_mutex:stuck_mutex", "lock"),
        ("mutex_handover:handover_mutex", "lock"),
        ("rwlock:rwlock", "lock"),
        ("pi_mutex:mutex", "pi"),
    ]
    assert [one["blocked.sum"] for one in found] == [1049653, 38035, 12888 + 11508, 14699]
    assert [one["blocked.count"] for one in found] == [1, 20, 20, 10]
    assert found[2]["blocked.max"] == 2668
    assert found[2]["blocked.avg"] == pytest.approx((12888 + 11508) / 20, abs=0.1)
    assert found[-1]["cum%"] == 100
    assert sum(one["this%"] for one in found) == pytest.approx(100, abs=0.3)


@pytest.mark.parametrize(("column", "of"), [
    ("blocked.sum", "blocked_us"), ("blocked.count", "blocked_count"), ("sys.sum", "sys_us"),
    ("wait.count", "wait_count"), ("wake.count", "wake_count"), ("errors", "errors"), ("ongoing", "ongoing"),
])  # fmt: skip
@pytest.mark.parametrize("group", ["lock", "stack", "comm", "tid"])
def test_sums_of_all_groups_are_those_of_the_file(column: str, of: str, group: str, tmp_path: Path) -> None:
    path, rows = tmp_path / "trace.csv", rows_of(NAMES)
    with path.open("w") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        # The recorded file has no errors.
        writer.writerows({**row, "errors": number} for number, row in enumerate(rows))
    found = objects("-e", "all", "-g", group, "-s", column, "-c", column, "-n", 1000, path)
    assert sum(one[column] for one in found) == sum(int(row[of]) for row in rows_of(path)) > 0
    assert [one[column] for one in found] == sorted((one[column] for one in found), reverse=True)


def test_threads_are_summed_up() -> None:
    expected: dict[tuple[int, int], int] = defaultdict(int)
    for row in rows_of(NAMES):
        if row["kind"] == "cond":
            expected[int(row["pid"]), int(row["tid"])] += int(row["blocked_us"])
    found = objects("-e", "cond", "-g", "tid", NAMES)
    assert {(one["pid"], one["tid"]): one["blocked.sum"] for one in found} == expected


def test_without_names_the_stacks_tell_the_kind() -> None:
    locks = {row["addr"] for row in rows_of(NAMES) if row["kind"] in ("lock", "pi")}
    conds = {row["addr"] for row in rows_of(NAMES) if row["kind"] == "cond"}
    assert {one["lock"] for one in objects("-e", "lock", PLAIN)} == locks
    assert {one["lock"] for one in objects("-e", "cond", PLAIN)} == conds


def test_stacks_of_locktrace_are_not_quoted_and_have_commas() -> None:
    (server,) = (one for one in objects(LOCKTRACE) if one["comm"] == "server")
    assert server["lock"] == "0x7f0012345678"
    assert server["stack"] == [
        "__clone", "start_thread", "void* run<std::map<int, char> >(void*)",
        "Cache<std::string, long>::get(std::string, bool)", "std::mutex::lock()", "__pthread_mutex_lock",
        "__lll_lock_wait",
    ]  # fmt: skip
    assert (server["blocked.sum"], server["blocked.count"], server["wait.count"]) == (5_000_000, 2, 3)
    waits = {one["lock"]: one["stack"] for one in objects("-e", "cond", LOCKTRACE)}
    assert waits["0x7f00aa"][-1] == "pthread_cond_wait@@GLIBC_2.3.2"


def test_semicolons_in_names_divide_no_functions() -> None:
    waits = LockRow(1, 1, 0x10, "app", ("main", "<[u8; 16] as Hash>::hash"), blocked_ns=1)
    (row,) = csv.DictReader(FORMATS["csv"](summarise([waits], GROUPINGS["stack"])))
    assert row["stack"] == "main;<[u8: 16] as Hash>::hash"


def test_a_table_shows_who_waits_and_not_the_locking() -> None:
    text, said = report(NAMES)
    head, *lines = text.splitlines()
    assert head.split()[:3] == ["this%", "cum%", "blocked.sum"]
    assert "waiter < started < start_thread" in lines[0]
    assert "1.05 s" in lines[0]
    assert not any("lll_lock_wait" in line for line in lines)
    assert said == "left out: 100 waits of other kinds, 3.92 ms; -e all shows them\n"
    assert report("-n", 1, NAMES)[0].splitlines()[2:] == ["and 3 more"]


def test_csv_and_json_say_the_same() -> None:
    options = ("-e", "all", "-n", 1000, "-c", ",".join(COLUMNS))
    text, _ = report("--format", "csv", *options, NAMES)
    rows = list(csv.DictReader(io.StringIO(text), strict=True))
    found = objects(*options, NAMES)
    assert len(rows) == len(found) > 5
    for row, one in zip(rows, found, strict=True):
        for column in COLUMNS:
            assert float(row[column]) == one[column]
        assert row["stack"] == ";".join(one["stack"])


def test_standard_input_and_a_file_of_the_result(tmp_path: Path) -> None:
    report("-o", tmp_path / "out", "-", given=NAMES.read_text())
    assert (tmp_path / "out").read_text() == report(NAMES)[0]


def test_standard_input_is_read_as_a_file_is(tmp_path: Path) -> None:
    """The results are the same whatever bytes a comm has, and whatever the locale makes of them."""
    content = f"{HEAD}\n1,2,0x10,5,1,5,1,1,1,0,0,".encode() + b"\xff\xfe;f\n"
    (tmp_path / "trace.csv").write_bytes(content)
    command = [sys.executable, "-m", "lockd", "trace", "report", "--format", "csv", "-e", "all"]
    strict = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    given: dict[str, Any] = {"input": content, "env": strict, "cwd": ROOT, "capture_output": True}
    of_file, of_input = (
        subprocess.run([*command, path], check=True, **given).stdout for path in (tmp_path / "trace.csv", "-")
    )
    assert of_file == of_input
    assert b"\n" in of_file.strip()


LINE = "1,2,0x10,5,1,5,1,1,1,0,0,comm;f"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", ": is empty; rule: a first line with the columns pid,tid,addr,"),
        ("pid,tid\n", ":1: column addr: is missing; rule: a first line with the columns pid,tid,addr,"),
        (f"{HEAD}\n{LINE}\n1,2,0x10,5\n", ":3: column sys_us: there are 4 fields; rule: 12, one for each"),
        (f"{HEAD}\n{LINE.replace('comm;', chr(34))}", ":2: unexpected end of data; rule: a line of CSV"),
        (f"{HEAD}\nx{LINE}\n", ":2: column pid: 'x1'; rule: a whole number, 0 or more"),
        (f"{HEAD}\n{LINE.replace('0x10', 'there')}\n", ":2: column addr: 'there'; rule: an address such as"),
        (f"{HEAD}\n{LINE.replace(',5,', ',-5,')}\n", ":2: column blocked_us: '-5'; rule: a whole number"),
        (f"{HEAD}\n{LINE.replace(',5,', ',5.5,')}\n", ":2: column blocked_us: '5.5'; rule: a whole number"),
        (f"{HEAD},kind,lock,ongoing\n{LINE},lock,m\n", ":2: column ongoing: there are 14 fields; rule: 15"),
        (
            f"{HEAD},\x1b[2Jx\n{LINE}\n",
            ":2: column \\x1b[2Jx: there are 12 fields; rule: 13",
        ),
        (f"{HEAD},kind,lock,ongoing\n{LINE},lock,m,x\n", ":2: column ongoing: 'x'; rule: a whole number"),
    ],
)
def test_bad_files_are_told_by_file_line_column_and_rule(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    _, said = report(path, code=2)
    assert f"{path}{says}" in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("/nowhere.csv",), "/nowhere.csv: cannot be read: No such file or directory"),
        (("/",), "/: cannot be read: Is a directory"),
        ((), "one of FILE and --live is needed"),
        (("-p", "1", NAMES), "-p limits a trace, and a file is not traced; rule: -p with --live"),
        (("-c", "blocked.sum,nonsense", NAMES), "'nonsense' is no column"),
        (("-s", "nonsense", NAMES), "nonsense"),
        (("-g", "nonsense", NAMES), "nonsense"),
        (("-o", "/nowhere/file", NAMES), "/nowhere/file: cannot be written"),
    ],
)
def test_wrong_usage(arguments: tuple[object, ...], says: str) -> None:
    assert says in report(*arguments, code=2)[1]


def test_nothing_to_report_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(f"{HEAD}\n")
    found = {form: report("--format", form, path)[0] for form in ("table", "csv", "json")}
    columns = next(csv.reader([found["csv"]]))
    assert columns == next(csv.reader(report("--format", "csv", NAMES)[0].splitlines()))
    assert found["csv"].count("\n") == 1
    assert not found["json"]


NAME = st.text(st.characters(codec="utf-8"), min_size=1, max_size=30)
COUNT = st.integers(0, 2**63)
TIME = COUNT.map(lambda us: us // 1000 * 1000)
ROWS = st.lists(
    st.builds(
        LockRow,
        pid=st.integers(0, 2**22), tid=st.integers(0, 2**22), address=st.integers(0, 2**64 - 1), comm=NAME,
        frames=st.lists(NAME, max_size=5).map(tuple), lock=NAME, blocked_ns=TIME, sys_ns=TIME,
        kind=st.sampled_from(["", "lock", "cond", "pi", "other"]),
        wait_count=COUNT, blocked_count=COUNT, wake_count=COUNT, errors=COUNT, ongoing=COUNT,
    ),
    max_size=5,
)  # fmt: skip


@given(ROWS)
def test_whatever_is_written_is_read_back(rows: list[LockRow]) -> None:
    """The csv module reads the rows back, and JSON has the same numbers. Names may be anything."""
    lines = list(as_csv(rows, with_names=True))
    assert all(line.count("\n") == 1 and line.endswith("\n") for line in lines)
    by_module = list(csv.DictReader(io.StringIO("".join(lines)), strict=True))
    by_json = [json.loads(line) for line in as_json(rows)]
    assert len(by_module) == len(by_json) == len(rows)
    for row, one in zip(by_module, by_json, strict=True):
        assert row["stack"].count(";") == len(one["stack"])
        for column in ("pid", "tid", "blocked_us", "sys_us", "wait_count", "blocked_count", "ongoing"):
            assert int(row[column]) == one[column]
        assert row["addr"] == one["addr"]


@given(rows=ROWS)
def test_the_report_reads_what_is_written(
    rows: list[LockRow], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("trace") / "trace.csv"
    path.write_text("".join(as_csv(rows, with_names=True)), encoding="utf-8")
    found = read(path)
    key = ("pid", "tid", "address", "kind", "blocked_ns", "sys_ns", "wait_count", "wake_count", "ongoing")
    assert sorted([getattr(row, name) for name in key] for row in found) == sorted(
        [getattr(row, name) for name in key] for row in rows
    )
    add_kinds(found)
    assert len(select(found, "all")) == len(rows)
    assert sum(values["wait.count"] for _, values in summarise(found, GROUPINGS["lock"]).lines) == sum(
        r.wait_count for r in rows
    )


def test_a_file_that_cannot_be_read_names_itself(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="absent"):
        read(tmp_path / "absent")
