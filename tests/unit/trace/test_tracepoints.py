"""Tracepoints as tracefs describes them, what is said if there is none, and names of results."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from lockd.errors import UsageError
from lockd.trace.probes import hist, latency
from lockd.trace.probes.tracepoints import Field, fields_of, find

COMMON = """\
\tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;
\tfield:unsigned char common_flags;\toffset:2;\tsize:1;\tsigned:0;
\tfield:unsigned char common_preempt_count;\toffset:3;\tsize:1;\tsigned:0;
\tfield:int common_pid;\toffset:4;\tsize:4;\tsigned:1;

"""
EXEC = f"""\
name: sched_process_exec
ID: 300
format:
{COMMON}\tfield:__data_loc char[] filename;\toffset:8;\tsize:4;\tsigned:0;
\tfield:pid_t pid;\toffset:12;\tsize:4;\tsigned:1;
\tfield:char comm[16];\toffset:16;\tsize:16;\tsigned:0;
\tfield:__u8 saddr[4];\toffset:32;\tsize:4;\tsigned:0;
\tfield:unsigned long long blocks;\toffset:40;\tsize:8;\tsigned:0;
\tfield:s8 level;\toffset:48;\tsize:1;\tsigned:1;
\tfield:const char * where;\toffset:56;\tsize:8;\tsigned:0;
\tfield:__data_loc u64[] args;\toffset:64;\tsize:4;\tsigned:0;

print fmt: "filename=%s pid=%d", __get_str(filename), REC->pid
"""
OPENAT = f"""\
name: sys_enter_openat
ID: 782
format:
{COMMON}\tfield:int __syscall_nr;\toffset:8;\tsize:4;\tsigned:1;
\tfield:int dfd;\toffset:16;\tsize:8;\tsigned:0;
\tfield:const char * filename;\toffset:24;\tsize:8;\tsigned:0;
\tfield:umode_t mode;\toffset:40;\tsize:8;\tsigned:0;
\tfield:size_t count;\toffset:48;\tsize:8;\tsigned:0;
"""


@pytest.fixture
def tracefs(tmp_path: Path) -> Path:
    formats = {
        "sched/sched_process_exec": EXEC,
        "syscalls/sys_enter_openat": OPENAT,
        "raw_syscalls/sys_enter": COMMON,
    }
    for name, text in formats.items():
        (tmp_path / "events" / name).mkdir(parents=True)
        (tmp_path / "events" / name / "format").write_text(text)
    return tmp_path


def test_fields_are_where_and_what_the_format_says() -> None:
    assert fields_of(EXEC) == (
        Field("filename", "__data_loc char[]", 8, 4, False),
        Field("pid", "pid_t", 12, 4, True),
        Field("comm", "char[16]", 16, 16, False),
        Field("saddr", "__u8[4]", 32, 4, False),
        Field("blocks", "unsigned long long", 40, 8, False),
        Field("level", "s8", 48, 1, True),
        Field("where", "const char *", 56, 8, False),
        Field("args", "__data_loc u64[]", 64, 4, False),
    )


def test_what_can_be_counted() -> None:
    fields = {field.name: field for field in fields_of(EXEC)}
    assert {name for name, field in fields.items() if field.is_number} == {
        "pid", "blocks", "level", "where",
    }  # fmt: skip
    assert {name for name, field in fields.items() if field.is_text} == {"filename", "comm"}
    assert {name for name, field in fields.items() if field.is_dynamic} == {"filename"}


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [("pid", -(2**31), 2**31 - 1), ("blocks", 0, 2**64 - 1), ("level", -128, 127)],
)
def test_range(name: str, least: int, most: int) -> None:
    (field,) = (field for field in fields_of(EXEC) if field.name == name)
    assert field.range == (least, most)


def test_arguments_of_system_calls_are_as_wide_as_their_types(tracefs: Path) -> None:
    """AT_FDCWD is -100 in four bytes. The upper half of the eight bytes is whatever the register had."""
    fields = {field.name: field for field in find(tracefs, "syscalls:sys_enter_openat").fields}
    assert (fields["dfd"].bytes, fields["dfd"].signed) == (4, True)
    assert (fields["mode"].bytes, fields["mode"].signed) == (2, False)
    assert (fields["count"].bytes, fields["count"].signed) == (8, False)
    assert (fields["filename"].bytes, fields["filename"].signed) == (8, False)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("sched:sched_process_exek", "did you mean sched:sched_process_exec?"),
        ("syscall:sys_enter_openat", "did you mean syscalls:sys_enter_openat?"),
        ("sys_enter_openat", "rule: CATEGORY:EVENT.*did you mean syscalls:sys_enter_openat?"),
        ("block:nothing_like_it", "this kernel has no such tracepoint$"),
        ("../../etc:passwd", "rule: CATEGORY:EVENT"),
        ("sched:..", "rule: CATEGORY:EVENT"),
        ("", "rule: CATEGORY:EVENT"),
    ],
)
def test_what_is_no_tracepoint(tracefs: Path, name: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        find(tracefs, name)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("pidd", "did you mean pid?"),
        ("args", r"is of the type __data_loc u64\[\]\n"),
        ("saddr", r"is of the type __u8\[4\]\n"),
        ("common_pid", "is not one of its fields"),
        ("xyz", r"filename \(__data_loc char\[\]\), pid \(pid_t\), comm \(char\[16\]\), blocks "),
    ],
)
def test_what_is_no_field(tracefs: Path, name: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        find(tracefs, "sched:sched_process_exec").field(name)


@pytest.mark.parametrize("name", ["EAGAIN", "EDEADLK", "EOPNOTSUPP"])
def test_errors_have_the_names_of_the_manual_pages(name: str) -> None:
    """Some numbers have two names, and Python's errno.errorcode may have the one that the pages do not."""
    result = -getattr(errno, name)
    assert hist.result_name(result) == latency.result_name(result) == name


def test_results_that_are_no_errors() -> None:
    assert [hist.result_name(result) for result in (-hist.MOST_ERRNO - 1, 0, 35)] == [-4096, 0, 35]
    assert [latency.result_name(result) for result in (0, -512, -4000)] == ["success", "ERESTARTSYS", "-4000"]
