"""Why a thread is off the CPU: every combination that the programs can note has one reason of the list."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

import pytest

from lockd.load.source import assemble
from lockd.names.reasons import _CALLS, REASONS, Reasons

SOURCE = assemble(["common.bpf.h", "arch.bpf.h", "futex.bpf.c", "sched.bpf.c"], {})
STATES = SOURCE.enums["state"]
INTERRUPTIBLE, UNINTERRUPTIBLE, OTHER = (
    STATES.index(f"STATE_{name}") for name in ("INTERRUPTIBLE", "UNINTERRUPTIBLE", "OTHER")
)
NO_CALL, KERNEL_THREAD, COMPAT = (SOURCE.constants[f"NR_{name}"] for name in ("NONE", "KERNEL", "COMPAT"))
FUTEX, READ = 202, 0


@pytest.fixture(scope="module")
def reasons() -> Reasons:
    return Reasons(SOURCE.enums, SOURCE.constants, "x86_64")


def kind(name: str) -> int:
    return SOURCE.enums["futex_kind"].index(f"KIND_{name}")


def file(name: str) -> int:
    return SOURCE.enums["file_kind"].index(f"FILE_{name}")


@pytest.mark.parametrize(
    ("nr", "state", "iowait", "detail", "reason"),
    [
        (FUTEX, INTERRUPTIBLE, False, kind("LOCK"), "lock"),
        (FUTEX, INTERRUPTIBLE, False, kind("PI"), "lock"),
        (FUTEX, INTERRUPTIBLE, False, kind("COND"), "cond"),
        (FUTEX, INTERRUPTIBLE, False, kind("OTHER"), "futex"),
        (449, INTERRUPTIBLE, False, kind("OTHER"), "futex"),
        (455, INTERRUPTIBLE, False, kind("LOCK"), "lock"),
        (FUTEX, UNINTERRUPTIBLE, False, kind("LOCK"), "kernel"),  # the hash bucket's page, not the lock
        (READ, INTERRUPTIBLE, False, file("PIPE"), "pipe"),
        (READ, INTERRUPTIBLE, False, file("SOCKET"), "socket"),
        (READ, INTERRUPTIBLE, False, file("DEVICE"), "device"),
        (READ, INTERRUPTIBLE, False, file("REGULAR"), "file"),
        (READ, INTERRUPTIBLE, False, file("OTHER"), "other"),
        (READ, UNINTERRUPTIBLE, True, file("REGULAR"), "disk"),
        (READ, UNINTERRUPTIBLE, False, file("REGULAR"), "kernel"),
        (35, INTERRUPTIBLE, False, 0, "sleep"),
        (230, INTERRUPTIBLE, False, 0, "sleep"),
        (7, INTERRUPTIBLE, False, 0, "poll"),
        (232, INTERRUPTIBLE, False, 0, "poll"),
        (45, INTERRUPTIBLE, False, 0, "socket"),
        (61, INTERRUPTIBLE, False, 0, "child"),
        (58, UNINTERRUPTIBLE, False, 0, "child"),  # vfork
        (128, INTERRUPTIBLE, False, 0, "signal"),
        (73, INTERRUPTIBLE, False, 0, "file_lock"),
        (65, INTERRUPTIBLE, False, 0, "ipc"),
        (426, INTERRUPTIBLE, False, 0, "io_uring"),
        (9999, INTERRUPTIBLE, False, 0, "other"),
        (35, OTHER, False, 0, "stopped"),
        (NO_CALL, UNINTERRUPTIBLE, False, 0, "fault"),
        (NO_CALL, INTERRUPTIBLE, False, 0, "fault"),
        (NO_CALL, UNINTERRUPTIBLE, True, 0, "disk"),
        (NO_CALL, OTHER, False, 0, "stopped"),
        (KERNEL_THREAD, INTERRUPTIBLE, False, 0, "kthread"),
        (KERNEL_THREAD, OTHER, False, 0, "kthread"),  # TASK_IDLE
        (KERNEL_THREAD, UNINTERRUPTIBLE, False, 0, "kernel"),
        (KERNEL_THREAD, UNINTERRUPTIBLE, True, 0, "disk"),
        (COMPAT, INTERRUPTIBLE, False, 0, "other"),
    ],
)
def test_reasons(reasons: Reasons, nr: int, state: int, iowait: bool, detail: int, reason: str) -> None:
    assert reasons.reason(nr, state, iowait, detail) == reason


@pytest.mark.parametrize("machine", _CALLS)
def test_whatever_is_noted_has_a_reason_of_the_list(machine: str) -> None:
    reasons = Reasons(SOURCE.enums, SOURCE.constants, machine)
    numbers = [NO_CALL, KERNEL_THREAD, COMPAT, *range(500), 32767]
    found = {
        reasons.reason(*noted) for noted in itertools.product(numbers, range(1, 4), (False, True), range(256))
    }
    assert found == set(REASONS)


def test_without_the_futex_program_there_are_no_kinds() -> None:
    enums = {name: members for name, members in SOURCE.enums.items() if name != "futex_kind"}
    assert Reasons(enums, SOURCE.constants, "x86_64").reason(FUTEX, INTERRUPTIBLE, False, 0) == "futex"


@pytest.mark.parametrize("machine", _CALLS)
def test_no_call_has_two_reasons(machine: str) -> None:
    numbers = " ".join(_CALLS[machine].values()).split()
    assert len(set(numbers)) == len(numbers)


NAMES = {
    "futex": "futex futex_waitv futex_wait",
    "sleep": "nanosleep clock_nanosleep",
    "poll": "poll select epoll_wait pselect6 ppoll epoll_pwait epoll_pwait2",
    "socket": "connect accept sendto recvfrom sendmsg recvmsg accept4 recvmmsg sendmmsg",
    "pipe": "splice tee vmsplice",
    "read": "read write pread64 pwrite64 readv writev",
    "file": "fsync fdatasync msync sync sync_file_range syncfs fallocate",
    "file_lock": "fcntl flock",
    "child": "clone vfork wait4 waitid clone3",
    "signal": "pause rt_sigtimedwait rt_sigsuspend",
    "io_uring": "io_uring_enter io_getevents io_pgetevents",
    "ipc": "semget semop semctl msgget msgsnd msgrcv msgctl semtimedop mq_timedsend mq_timedreceive",
    "device": "ioctl",
}


def test_numbers_are_those_of_this_machines_headers() -> None:
    """Every number in the list is one of the calls that its reason is about."""
    machine = os.uname().machine
    headers = [*Path("/usr/include").glob(f"{machine}-linux-gnu/asm/unistd_64.h")]
    headers += [Path("/usr/include/asm-generic/unistd.h")]
    if machine not in _CALLS or not headers[0].exists():
        pytest.skip("host: has no headers with the numbers of system calls")
    found = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)$", headers[0].read_text(), re.MULTILINE)
    name_of = {int(number): name for name, number in found}
    name_of.update({449: "futex_waitv", 455: "futex_wait"})  # newer than some headers
    for reason, numbers in _CALLS[machine].items():
        names = {name_of[int(number)] for number in numbers.split()}
        assert names <= set(NAMES[reason].split()), reason
