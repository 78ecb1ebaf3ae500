"""Why a thread is off the CPU: whatever the programs can note has one reason from the list."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from lockd.load.source import assemble
from lockd.names.labels.reasons import REASONS, Reasons, calls

ROOT = Path(__file__).resolve().parents[3]
MACHINES = ("x86_64", "aarch64")
FILES = ("include/common.bpf.h", "include/arch.bpf.h", "daemon/futex.bpf.c", "daemon/sched.bpf.c")
SOURCE = assemble(FILES, {})
STATES = SOURCE.enums["state"]
INTERRUPTIBLE, UNINTERRUPTIBLE, OTHER = (
    STATES.index(name) for name in ("interruptible", "uninterruptible", "other")
)
NO_CALL, KERNEL_THREAD, COMPAT = (SOURCE.constants[f"NR_{name}"] for name in ("NONE", "KERNEL", "COMPAT"))
FUTEX, READ, CLONE, VFORK, IO_URING = 202, 0, 56, 58, 426


@pytest.fixture(scope="module")
def reasons() -> Reasons:
    return Reasons(SOURCE.enums, SOURCE.constants, "x86_64")


def kind(name: str) -> int:
    return SOURCE.enums["futex_kind"].index(name.lower())


def file(name: str) -> int:
    return SOURCE.enums["file_kind"].index(name.lower())


def poll(name: str) -> int:
    return SOURCE.enums["poll_kind"].index(name.lower())


def clone(name: str) -> int:
    return SOURCE.enums["clone_kind"].index(name.lower())


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
        (READ, INTERRUPTIBLE, False, file("EVENT"), "event"),
        (READ, INTERRUPTIBLE, False, file("OTHER"), "other"),
        (40, INTERRUPTIBLE, False, file("SOCKET"), "socket"),  # sendfile
        (275, INTERRUPTIBLE, False, file("PIPE"), "pipe"),  # splice
        (276, INTERRUPTIBLE, False, 0, "pipe"),  # tee
        (257, INTERRUPTIBLE, False, 0, "file"),  # openat: a FIFO
        (READ, UNINTERRUPTIBLE, True, file("REGULAR"), "disk"),
        (READ, UNINTERRUPTIBLE, False, file("REGULAR"), "kernel"),
        (35, INTERRUPTIBLE, False, 0, "sleep"),
        (230, INTERRUPTIBLE, False, 0, "sleep"),
        (7, INTERRUPTIBLE, False, 0, "poll"),
        (232, INTERRUPTIBLE, False, poll("ANY"), "poll"),
        (232, INTERRUPTIBLE, False, poll("FOR_LOCK"), "lock"),
        (45, INTERRUPTIBLE, False, 0, "socket"),
        (61, INTERRUPTIBLE, False, 0, "child"),
        (61, UNINTERRUPTIBLE, False, 0, "kernel"),
        (VFORK, UNINTERRUPTIBLE, False, 0, "child"),
        (CLONE, UNINTERRUPTIBLE, False, clone("AND_WAIT"), "child"),  # posix_spawn
        (CLONE, UNINTERRUPTIBLE, False, clone("OTHER"), "kernel"),  # a thread is made: mmap_lock
        (435, UNINTERRUPTIBLE, False, clone("AND_WAIT"), "child"),
        (CLONE, INTERRUPTIBLE, False, clone("OTHER"), "other"),
        (219, INTERRUPTIBLE, False, 0, "sleep"),  # restart_syscall
        (128, INTERRUPTIBLE, False, 0, "signal"),
        (73, INTERRUPTIBLE, False, 0, "file_lock"),
        (65, INTERRUPTIBLE, False, 0, "ipc"),
        (IO_URING, INTERRUPTIBLE, False, 0, "io_uring"),
        (IO_URING, INTERRUPTIBLE, True, 0, "io_uring"),  # requests are pending, even if only for sockets
        (IO_URING, UNINTERRUPTIBLE, True, 0, "disk"),
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


@pytest.mark.parametrize("machine", MACHINES)
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


def numbers(machine: str) -> dict[str, int]:
    """Return the numbers of all system calls, by name, from the headers of the C library."""
    header = {
        "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
        "aarch64": Path("/usr/include/asm-generic/unistd.h"),
    }[machine]
    if not header.exists():
        pytest.skip(f"host: has no {header}")
    found = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)$", header.read_text(), re.MULTILINE)
    named = {name: int(number) for name, number in found}
    return {"newfstatat": named["fstatat"], **named} if "fstatat" in named else named


@pytest.mark.parametrize("machine", MACHINES)
def test_numbers_are_those_of_the_headers(machine: str) -> None:
    known = {name: nr for nr, (_, name) in calls(machine).items()}
    headers = numbers(machine)
    assert len(known) == len(calls(machine)), "a call has two reasons"
    assert {name: headers.get(name, nr) for name, nr in known.items()} == known
    newer = {"futex_waitv", "futex_wait", "fchmodat2", "quotactl_fd"}
    assert known.keys() - headers.keys() <= newer
    # A call that is listed for the other machine is listed for this one, too, if the headers have it.
    everywhere = {name for other in MACHINES for _, name in calls(other).values()}
    assert not headers.keys() & (everywhere - known.keys())


NO_REASON = """
    _sysctl acct add_key adjtimex afs_syscall alarm arch_prctl bind bpf brk capget capset clock_adjtime
    clock_getres clock_gettime clock_settime create_module delete_module dup dup2 dup3 epoll_create
    epoll_create1 epoll_ctl epoll_ctl_old epoll_wait_old eventfd eventfd2 exit exit_group fanotify_init
    finit_module fork get_kernel_syms get_mempolicy get_robust_list get_thread_area getcpu getcwd getegid
    geteuid getgid getgroups getitimer getpeername getpgid getpgrp getpid getpmsg getppid getpriority
    getresgid getresuid getrlimit getrusage getsid getsockname gettid gettimeofday getuid init_module
    inotify_init inotify_init1 inotify_rm_watch io_cancel io_setup ioperm iopl ioprio_get ioprio_set kcmp
    kexec_file_load kexec_load keyctl kill landlock_add_rule landlock_create_ruleset landlock_restrict_self
    listen lookup_dcookie madvise mbind membarrier memfd_create memfd_secret migrate_pages mincore mlock
    mlock2 mlockall mmap modify_ldt move_pages mprotect mq_getsetattr mq_notify mq_open mq_unlink mremap
    msgctl msgget munlock munlockall munmap nfsservctl perf_event_open personality pidfd_getfd pidfd_open
    pidfd_send_signal pipe pipe2 pkey_alloc pkey_free pkey_mprotect prctl prlimit64 process_madvise
    process_mrelease process_vm_readv process_vm_writev ptrace putpmsg query_module reboot remap_file_pages
    request_key rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn
    rt_tgsigqueueinfo sched_get_priority_max sched_get_priority_min sched_getaffinity sched_getattr
    sched_getparam sched_getscheduler sched_rr_get_interval sched_setaffinity sched_setattr sched_setparam
    sched_setscheduler sched_yield seccomp security semctl semget set_mempolicy set_mempolicy_home_node
    set_robust_list set_thread_area set_tid_address setdomainname setfsgid setfsuid setgid setgroups
    sethostname setitimer setns setpgid setpriority setregid setresgid setresuid setreuid setrlimit setsid
    settimeofday setuid shmat shmctl shmdt shmget sigaltstack signalfd signalfd4 socket socketpair
    sync_file_range2 sysfs sysinfo tgkill time timer_create timer_delete timer_getoverrun timer_gettime
    timer_settime timerfd_create timerfd_gettime timerfd_settime times tkill tuxcall umask uname unshare
    uselib userfaultfd ustat vhangup vserver
"""
"""System calls that need no reason. They return at once, or sleep only uninterruptibly, or are rare and like
no other (ptrace, keys, modules, the exit of a namespace's init), or no kernel has them any more."""


@pytest.mark.parametrize("machine", MACHINES)
def test_every_call_has_a_reason_or_needs_none(machine: str) -> None:
    known = {name for _, name in calls(machine).values()}
    others = set(NO_REASON.split())
    assert not known & others
    old = {name for name, nr in numbers(machine).items() if nr <= 450 and not name.endswith("time64")}
    assert old - known - others <= {"fstatat", "arch_specific_syscall"}


@pytest.mark.parametrize("machine", MACHINES)
def test_the_programs_look_at_the_file_of_the_same_calls(machine: str) -> None:
    """is_read_or_write() in arch.bpf.h has the numbers in C, those of arm64 first."""
    text = (ROOT / "lockd/bpf/include/arch.bpf.h").read_text()
    body = text[text.index("bool is_read_or_write") :]
    conditions = re.findall(r"return ([^;]+);", body)
    condition = " ".join(conditions[MACHINES[::-1].index(machine)].split())
    condition = condition.replace("&&", "and").replace("||", "or")
    looked_at = {nr for nr in range(500) if eval(condition, {"nr": nr})}
    assert looked_at == {nr for nr, (group, _) in calls(machine).items() if group == "read"}
