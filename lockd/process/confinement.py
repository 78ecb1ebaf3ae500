"""What a process may still ask of the kernel when it begins to read what anybody may have written.

Each list names the system calls that a process needs, and nothing else is done for it: libseccomp makes a
filter of the list, which the kernel keeps for the process, its threads and its children, and which cannot be
taken back. What is refused fails with ENOSYS, as on a kernel that lacks it: so a C library that is newer than
these lists, and prefers a newer call, does what it did before there was that call.

A filter sees numbers and no memory. Hence no list has a call that takes its flags from memory, as openat2 and
clone3 do, and none has execve: which program it would be, no filter can tell.
"""

from __future__ import annotations

import errno
import os
from typing import Any

from lockd.errors import HostError, LockdError

try:
    import seccomp
except ImportError:  # said when it is asked for, in words
    seccomp = None

Rules = dict[str, tuple[tuple[Any, ...], ...]]
"""By system call, the alternatives for its arguments, each with what seccomp.Arg() takes; none: any."""

EXCEPT_READING = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC | os.O_TMPFILE & ~os.O_DIRECTORY
"""Of these flags none is set where a file is only read."""
THREAD = 0x10000
"""CLONE_THREAD"""
FORK = 0x1200011
"""What the C library's fork() asks clone() for: CLONE_CHILD_SETTID, CLONE_CHILD_CLEARTID and SIGCHLD."""
TCGETS, FIONREAD, FIONBIO, FIOCLEX = 0x5401, 0x541B, 0x5421, 0x5451
F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC = 0, 1, 2, 3, 4, 1030
PRCTL = (1, 21, 22, 23, 38, 47)
"""PR_SET_PDEATHSIG, PR_GET_SECCOMP, PR_SET_SECCOMP, PR_CAPBSET_READ, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT"""


def _any(names: str) -> Rules:
    return dict.fromkeys(names.split(), ())


def _one_of(call: str, argument: int, *values: int) -> Rules:
    return {call: tuple((argument, "EQ", value) for value in values)}


COMPUTING = {
    **_any("brk mmap munmap mremap mprotect madvise futex sched_yield rseq set_robust_list exit exit_group"),
    **_any("clock_gettime gettimeofday getpid gettid rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack"),
    **_any("restart_syscall read write close setitimer"),
}
"""Of what is open already."""
READING = {
    **COMPUTING,
    "openat": ((2, "MASKED_EQ", EXCEPT_READING, 0),),
    **_any("pread64 readv lseek fstat newfstatat stat lstat statx access faccessat faccessat2"),
    **_any("readlink readlinkat getdents64 statfs fstatfs poll ppoll select pselect6 pipe2 dup getcwd"),
    **_any("getuid geteuid getgid getegid getppid getrandom clock_getres clock_nanosleep nanosleep uname"),
    **_any("sysinfo writev"),
    **_any("sched_getaffinity getrusage times membarrier"),
    **_one_of("ioctl", 1, TCGETS, FIONREAD, FIONBIO, FIOCLEX),
    **_one_of("fcntl", 1, F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC),
    **_any("recvfrom"),
    "sendto": ((4, "EQ", 0),),  # no address: only where the socket is connected to
}
"""Of files as well."""
NAMER = {
    **READING,
    "clone": ((0, "EQ", FORK),),
    # What makes its children even less than it is (demangle.py).
    **_any("wait4 waitid capget capset seccomp dup2 dup3 close_range"),
    **_one_of("prctl", 0, *PRCTL),
    **_one_of("prlimit64", 0, 0),  # its own limits
}
"""And children of its own, which it can neither signal nor let execute anything."""
EXPORTER = {
    **READING,
    **_any("accept4 listen shutdown getsockname getpeername getsockopt setsockopt"),
    **_any("recvmsg epoll_create1 epoll_ctl epoll_wait epoll_pwait ftruncate"),
    **_one_of("socketpair", 0, 1),  # AF_UNIX: asyncio wakes itself by one
    "clone": ((0, "MASKED_EQ", THREAD, THREAD),),
}
"""Connections that come, and none that goes out."""


def confine(rules: Rules, log_is_journal: bool = False) -> None:
    """From now on, for good. Call this before the process starts its first thread, which it would not be for.

    `log_is_journal`: lines go there by datagrams with an address, on a socket that has to be open by now.
    """
    if seccomp is None:
        raise HostError(
            "confinement: this Python has no module seccomp, without which lockd reads nothing that others"
            " may have written; rule: install Debian's package python3-seccomp"
        )
    only = seccomp.SyscallFilter(seccomp.ERRNO(errno.ENOSYS))
    for call, alternatives in (rules | (_any("sendmsg") if log_is_journal else {})).items():
        if not _is_known(call):
            continue  # newer than the library: so is what would prefer it, which does without
        for number, comparison, *values in alternatives:
            only.add_rule(seccomp.ALLOW, call, seccomp.Arg(number, getattr(seccomp, comparison), *values))
        if not alternatives:
            only.add_rule(seccomp.ALLOW, call)
    try:
        only.load()  # sets no_new_privs as well
    except RuntimeError as error:  # which tells no more
        raise LockdError(f"confinement: the kernel takes no filter of system calls: {error}") from None


def _is_known(call: str) -> bool:
    try:
        return bool(seccomp.resolve_syscall(seccomp.Arch(), call) >= 0)
    except ValueError:  # as newer releases say it
        return False
