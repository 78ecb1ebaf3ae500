"""The support matrix: it is made from `lockd doctor` and a test run, and the README has the latest one."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.vm import kernels, matrix

DOCTOR = """kernel      5.10.0 x86_64
BTF         yes

PROGRAM       PART      BY          HOOK                            AVAILABLE
futex         calls     tracepoint  tracepoint syscalls:sys_x       yes
kernel_locks  waits     tracepoint  all 2                           no: it has none: really
kernel_locks  waits     fentry      fexit __down                    yes
kernel_locks  waits     kprobe      kprobe other                    not needed: only newer ones have it

futex calls:         by tracepoint
kernel_locks waits:  by fentry (not by tracepoint: it has none)
"""
TESTS = Path(__file__).resolve().parents[1]
PARAMETERS = re.compile("parametrize|mode_calls_is_thorough")
"""Matches the decorators that give a test one parameter each."""
FUTEX, WAITS = "futex calls", "kernel_locks waits"


def case(outcome: str, properties: dict[str, str] | None = None) -> SimpleNamespace:
    return SimpleNamespace(outcome=outcome, properties=properties or {})


HUNG = """[ 1330.240343] INFO: task python3:74 blocked for more than 120 seconds.
[ 1330.240376] Call Trace:
[ 1330.240383]  __schedule+0x282/0x870
[ 1330.240402]  {}+0x42/0x70
[ 1330.240626]  entry_SYSCALL_64_after_hwframe+0x67/0xd1
[ 1330.240653] R13: 00007f33aebca5c2 R14: 0000000000000001 R15: 00007ffd741209e0
"""


def test_a_task_that_waits_for_the_disk_of_a_machine_is_no_complaint_of_its_kernel() -> None:
    """As a 5.10 says it; what the kernel says before and after it stays."""
    others, disk = HUNG.format("mutex_lock"), HUNG.format("io_schedule")
    assert kernels.WAITS_FOR_DISK.sub("", f"{others}{disk}{others}") == f"{others}\n{others}"
    assert kernels.COMPLAINTS.search(others)


def test_the_table_of_doctor() -> None:
    rows = matrix.hooks_of(DOCTOR)
    assert [(row.mechanism, row.is_available) for row in rows] == [
        ("tracepoint", True),
        ("all", False),
        ("fexit", True),
        ("kprobe", False),
    ]
    assert [row.reason for row in rows] == ["", "it has none: really", "", "only newer ones have it"]


def test_a_mechanism_counts_if_tests_of_it_passed_and_none_failed() -> None:
    run = SimpleNamespace(
        release="5.10.0",
        doctor=DOCTOR,
        cases=[
            case("passed", {FUTEX: "tracepoint"}),
            case("passed", {FUTEX: "kprobe"}),
            case("failed", {FUTEX: "kprobe"}),
            case("skipped", {FUTEX: "fentry"}),
            case("passed", {WAITS: "kprobe"}),
            case("skipped", {WAITS: "kprobe"}),
            case("passed", {WAITS: "auto"}),
            case("passed"),
        ],
    )
    found = matrix.of_run(run)
    assert found[FUTEX] == {"tested": ["tracepoint"], "chosen": "tracepoint"}
    assert found[WAITS] == {"tested": ["fentry", "kprobe"], "chosen": "fentry"}
    assert found["kernel_locks holds"] == {"tested": [], "chosen": ""}


def test_the_readme_has_what_was_last_seen() -> None:
    readme = matrix.README.read_text()
    assert matrix.table(matrix.results()) in readme
    assert matrix.put_into(readme, matrix.results()) == readme
    assert list(matrix.results()) == [kernel.series for kernel in kernels.KERNELS]


def test_what_no_kernel_may_say() -> None:
    for line in (
        "[    1.0] WARNING: CPU: 0 PID: 1 at kernel/bpf/core.c:1 f+0x1/0x2",
        "[    1.0] BUG: sleeping function called from invalid context",
        "[    1.0] INFO: task a:1 blocked for more than 120 seconds.",
        "[    1.0] WARNING: possible circular locking dependency detected",
        "[    1.0] rcu: INFO: rcu_sched self-detected stall on CPU",
    ):
        assert kernels.COMPLAINTS.search(line), line
    for line in (
        "[    1.0] debug: all is well",
        "[    1.0] virtio_blk virtio3: [vdb] 524288 512-byte blocks",
    ):
        assert not kernels.COMPLAINTS.search(line), line


@pytest.mark.parametrize(
    ("series", "test", "reason", "allowed"),
    [
        ("6.1", "t[fentry-futex2-x]", "host: this kernel lacks what futex2 needs", True),
        ("6.12", "t[fentry-futex2-x]", "host: this kernel lacks what futex2 needs", False),
        ("6.1", "t[fentry-pi_mutex-x]", "host: this kernel lacks what futex2 needs", False),
        ("6.1", "t[fentry-futex2-x]", "something else", False),
    ],
)
def test_a_skip_is_allowed_for_its_kernel_test_and_reason(
    series: str, test: str, reason: str, allowed: bool
) -> None:
    assert any(skip.allows(series, test, reason) for skip in kernels.SKIPS) is allowed


def strings(tree: ast.AST) -> set[str]:
    constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return {value for value in constants if isinstance(value, str)}


@pytest.mark.parametrize("entry", sorted({*kernels.LEFT_OUT, *kernels.ONLY_ON, *kernels.ONLY_THOROUGH}))
def test_what_is_left_out_is_a_whole_test_or_file(entry: str) -> None:
    """An entry is the beginning of test names for pytest, which does not report one without any match.

    Each must therefore be the full name of a test or a file.
    """
    file, _, test = entry.partition("::")
    tree = ast.parse((TESTS / "kernel" / file).read_text())
    if not test:
        return
    parts = re.fullmatch(r"(\w+)(?:\[(.+)\])?", test)
    assert parts, "a name, and all of its parameters if any"
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    found = [one for one in functions if one.name.startswith(parts[1])]
    assert [one.name for one in found] == [parts[1]]
    if parts[2]:
        values = parts[2].split("-")
        decorators = [one for one in found[0].decorator_list if PARAMETERS.search(ast.unparse(one))]
        assert len(values) == len(decorators)
        assert {*values} <= strings(tree) | strings(ast.parse((TESTS / "support/checks.py").read_text()))
