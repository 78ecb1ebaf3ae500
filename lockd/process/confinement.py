"""Confinement: which system calls a process may make once it reads data that anybody may have written.

Each list below names the system calls that one kind of process needs. libseccomp turns a list into a filter.
The kernel applies the filter to the process, its threads and its children, and never removes it. Every other
call fails with ENOSYS, as on a kernel that does not have the call. A C library that is newer than these lists
therefore falls back from a newer call to the older one.

A filter sees the numbers in registers, and no memory. Hence no list has a call that takes its flags from
memory, as openat2 and clone3 do. No list has execve, because a filter cannot see the name of the program.
"""

from __future__ import annotations

import errno
import os
from typing import Any

from lockd.errors import HostError, LockdError

try:
    import seccomp
except ImportError:  # confine() then raises HostError
    seccomp = None

Rules = dict[str, tuple[tuple[Any, ...], ...]]
"""The conditions for each system call, by its name. A condition has the arguments of seccomp.Arg().

The call is allowed if any of its conditions holds, or if it has none.
"""

EXCEPT_READING = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC | os.O_TMPFILE & ~os.O_DIRECTORY
"""The flags of openat() that are not set when a file is only read."""
THREAD = 0x10000
"""CLONE_THREAD, a flag of clone()."""
FORK = 0x1200011
"""The flags of clone() in the C library's fork(): CLONE_CHILD_SETTID, CLONE_CHILD_CLEARTID and SIGCHLD."""
TCGETS, FIONREAD, FIONBIO, FIOCLEX = 0x5401, 0x541B, 0x5421, 0x5451
F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC = 0, 1, 2, 3, 4, 1030
PRCTL = (1, 21, 22, 23, 38, 47)
"""Options of prctl() that the namer may use: PR_SET_PDEATHSIG, PR_GET_SECCOMP, PR_SET_SECCOMP,
PR_CAPBSET_READ, PR_SET_NO_NEW_PRIVS and PR_CAP_AMBIENT."""


def _any(names: str) -> Rules:
    """Allow these calls with any arguments."""
    return dict.fromkeys(names.split(), ())


def _one_of(call: str, argument: int, *values: int) -> Rules:
    """Allow a call if the argument with this number (from 0) has one of these values."""
    return {call: tuple((argument, "EQ", value) for value in values)}


COMPUTING = {
    **_any("brk mmap munmap mremap mprotect madvise futex sched_yield rseq set_robust_list exit exit_group"),
    **_any("clock_gettime gettimeofday getpid gettid rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack"),
    **_any("restart_syscall read write close setitimer"),
}
"""The calls to compute, and to read and write descriptors that are open already."""
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
    "sendto": ((4, "EQ", 0),),  # no address: only to the peer of a connected socket
}
"""The calls to compute, and to open files and read them."""
NAMER = {
    **READING,
    "clone": ((0, "EQ", FORK),),
    # By these calls the namer's children drop the rest of their privileges (names/objects/demangle.py).
    **_any("wait4 waitid capget capset seccomp dup2 dup3 close_range"),
    **_one_of("prctl", 0, *PRCTL),
    **_one_of("prlimit64", 0, 0),  # process 0: only the caller's own limits
}
"""The calls to read files and fork children. The namer can neither signal a child nor execute a program."""
EXPORTER = {
    **READING,
    **_any("accept4 listen shutdown getsockname getpeername getsockopt setsockopt"),
    **_any("recvmsg epoll_create1 epoll_ctl epoll_wait epoll_pwait ftruncate"),
    **_one_of("socketpair", 0, 1),  # AF_UNIX: asyncio wakes its own loop by a socket pair
    "clone": ((0, "MASKED_EQ", THREAD, THREAD),),
}
"""The calls to read files, start threads and accept connections. The exporter cannot connect to anything."""


def confine(rules: Rules, log_is_journal: bool = False) -> None:
    """Allow this process only the system calls of `rules`, from now on and for ever.

    Call this before the process starts its first thread: a filter applies only to the thread that loads it,
    and to the threads that this one starts later. `log_is_journal` allows datagrams with an address, by which
    log lines reach the journal; the socket for them must be open already. Raises HostError if Python's module
    seccomp is not installed, and LockdError if the kernel refuses the filter.
    """
    if seccomp is None:
        raise HostError(
            "confinement: Python's module seccomp is not installed, and lockd reads data of other users only"
            " behind a filter of system calls; rule: install Debian's package python3-seccomp"
        )
    only = seccomp.SyscallFilter(seccomp.ERRNO(errno.ENOSYS))
    for call, alternatives in (rules | (_any("sendmsg") if log_is_journal else {})).items():
        if not is_known(call):
            continue  # a call newer than libseccomp; its callers fall back to an older one
        for number, comparison, *values in alternatives:
            only.add_rule(seccomp.ALLOW, call, seccomp.Arg(number, getattr(seccomp, comparison), *values))
        if not alternatives:
            only.add_rule(seccomp.ALLOW, call)
    try:
        only.load()  # also sets no_new_privs
    except RuntimeError as error:  # libseccomp gives no details beyond its message
        raise LockdError(
            f"confinement: the kernel refused the filter of system calls of process {os.getpid()}: {error};"
            " rule: the kernel needs CONFIG_SECCOMP_FILTER"
        ) from None


def is_known(call: str) -> bool:
    """Whether libseccomp knows the system call of this name."""
    try:
        return bool(seccomp.resolve_syscall(seccomp.Arch(), call) >= 0)
    except ValueError:  # from newer releases of libseccomp; older ones return -1
        return False
