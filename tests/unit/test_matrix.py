"""The support matrix: read from what doctor and a run say, and in the README as last seen."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vm import kernels, matrix

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
FUTEX, CONTENTION = "futex", "kernel_locks, mode contention"


def case(outcome: str, **properties: str) -> SimpleNamespace:
    return SimpleNamespace(outcome=outcome, properties=properties)


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
            case("passed", program=FUTEX, mechanism="tracepoint"),
            case("passed", program=FUTEX, mechanism="kprobe"),
            case("failed", program=FUTEX, mechanism="kprobe"),
            case("skipped", program=FUTEX, mechanism="fentry"),
            case("passed", program=CONTENTION, mechanism="kprobe"),
            case("skipped", program=CONTENTION, mechanism="kprobe"),
            case("passed"),
        ],
    )
    found = matrix.of_run(run)
    assert found[FUTEX] == {"tested": ["tracepoint"], "chosen": "tracepoint"}
    assert found[CONTENTION] == {"tested": ["kprobe"], "chosen": "fentry"}
    assert found["kernel_locks, mode all"] == {"tested": [], "chosen": ""}


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
        ("5.10", "t[by tracepoint-x]", "none: no tracepoint contention_end", True),
        ("6.1", "t[by tracepoint-x]", "none: no tracepoint contention_end", False),
        ("5.10", "t[by kprobe-x]", "none: no tracepoint contention_end", False),
        ("5.10", "t[by tracepoint-x]", "something else", False),
    ],
)
def test_a_skip_is_allowed_for_its_kernel_test_and_reason(
    series: str, test: str, reason: str, allowed: bool
) -> None:
    assert any(skip.allows(series, test, reason) for skip in kernels.SKIPS) is allowed
