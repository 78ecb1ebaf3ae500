"""Reasons why threads are off the CPU: a closed list, judged by a thread's system call and state."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping

from lockd.names.labels import system_calls

REASONS = {
    "lock": "a futex that is a lock or a priority-inheritance lock; also PostgreSQL's lock of a row or table,"
    " which the title of the waiting backend shows",
    "cond": "a futex that is a condition variable, a semaphore or a join: the thread waits for work",
    "futex": "a futex whose kind is unknown",
    "sleep": "nanosleep and clock_nanosleep",
    "poll": "poll, select, epoll_wait and similar calls, even with nothing but a timeout",
    "socket": "sending, receiving, connecting, accepting on a socket, also by read, write, sendfile, splice",
    "pipe": "reading from or writing to a pipe or FIFO",
    "event": "reading an eventfd, timerfd, signalfd, inotify, fanotify or userfaultfd: waiting for work",
    "device": "reading from or writing to a character device: a terminal, /dev/fuse; any ioctl;"
    " getrandom; syslog(2)",
    "file": "opening (also a FIFO), reading, writing, syncing, naming, mounting files, without disk I/O",
    "file_lock": "flock and fcntl locks",
    "disk": "block I/O, whatever the system call (the task's in_iowait bit), except for waits for io_uring",
    "child": "waiting for a child process; the parent of a vfork",
    "signal": "waiting for a signal",
    "io_uring": "waiting for requests of io_uring or Linux AIO, whatever the requests are for",
    "ipc": "System V and POSIX message queues and semaphores",
    "fault": "a page fault or another trap in user code, without disk I/O: a kernel lock, userfaultfd",
    "stopped": "stopped by a signal or a tracer, or frozen: by its cgroup (docker pause) or a suspend",
    "kernel": "uninterruptible without I/O: a kernel lock, RCU, a completion",
    "kthread": "a kernel thread, or a worker that the kernel made for a process, that waits for work",
    "other": "any other system call, every system call of a 32-bit program, and the end of a thread;"
    " where `comm` is `other` as well, any reason, of label sets without a series",
}
"""Every value of the label `reason`, with its definition."""

CALLS = {
    "futex": "futex futex_waitv futex_wait",
    "sleep": "nanosleep clock_nanosleep restart_syscall",
    "poll": "poll ppoll select pselect6 epoll_wait epoll_pwait epoll_pwait2",
    "socket": """
        accept accept4 connect sendto sendmsg sendmmsg recvfrom recvmsg recvmmsg shutdown getsockopt
        setsockopt
    """,
    "pipe": "tee vmsplice",
    "read": "read write pread64 pwrite64 readv writev preadv pwritev preadv2 pwritev2 sendfile splice",
    "file": """
        open openat openat2 creat open_by_handle_at close close_range stat lstat fstat newfstatat
        statx statfs fstatfs access faccessat faccessat2 readlink readlinkat getdents getdents64 chdir
        fchdir chroot lseek copy_file_range readahead fadvise64 fallocate truncate ftruncate sync
        syncfs fsync fdatasync sync_file_range msync link linkat symlink symlinkat unlink unlinkat
        rename renameat renameat2 mkdir mkdirat rmdir mknod mknodat chmod fchmod fchmodat fchmodat2
        chown lchown fchown fchownat utime utimes futimesat utimensat getxattr lgetxattr fgetxattr
        setxattr lsetxattr fsetxattr listxattr llistxattr flistxattr removexattr lremovexattr
        fremovexattr name_to_handle_at inotify_add_watch fanotify_mark mount umount2 move_mount
        open_tree fsopen fsconfig fsmount fspick mount_setattr pivot_root swapon swapoff quotactl
        quotactl_fd execve execveat
    """,
    "file_lock": "flock fcntl",
    "child": "wait4 waitid",
    "clone": "clone clone3",
    "vfork": "vfork",
    "signal": "pause rt_sigsuspend rt_sigtimedwait",
    "io_uring": """
        io_uring_setup io_uring_enter io_uring_register io_submit io_getevents io_pgetevents
        io_destroy
    """,
    "ipc": "msgsnd msgrcv semop semtimedop mq_timedsend mq_timedreceive",
    "device": "ioctl syslog getrandom",
}
"""System calls by what they wait for.

The groups are reasons, except `read`, `clone` and `vfork`. Reasons.reason() also looks at the kind of file
(`read`) or futex (`futex`), at whether the parent waits for the child (`clone`), and at whether PostgreSQL
waits for a lock (`poll`). The list has the calls whose sleep a signal can end, if only on FUSE or autofs.
Calls that only sleep uninterruptibly are left out: such a wait has the reason `kernel` or `disk` in any call.
"""

_BY_FILE = {
    "regular": "file",
    "pipe": "pipe",
    "socket": "socket",
    "device": "device",
    "event": "event",
}
_BY_FUTEX = {"lock": "lock", "pi": "lock", "cond": "cond"}
"""Reasons by what the BPF programs note: the kind of file (_BY_FILE) or the kind of futex (_BY_FUTEX)."""


@functools.cache
def calls(machine: str) -> dict[int, tuple[str, str]]:
    """Group and name of each system call of CALLS, by its number on `machine`, `x86_64` or `aarch64`."""
    groups = {name: group for group, names in CALLS.items() for name in names.split()}
    numbered = system_calls.names(machine).items()
    return {number: (groups[name], name) for number, name in numbered if name in groups}


class Reasons:
    """Judges the reason of a wait by what the BPF programs note of it.

    `enums` and `constants` are those of the C sources; `machine` is as in calls().
    """

    def __init__(
        self,
        enums: Mapping[str, tuple[str, ...]],
        constants: Mapping[str, int],
        machine: str = os.uname().machine,
    ) -> None:
        self._group = {nr: group for nr, (group, _) in calls(machine).items()}
        self._enums = enums
        self._no_call, self._kernel_thread = constants["NR_NONE"], constants["NR_KERNEL"]

    def reason(self, nr: int, state: int, iowait: bool, detail: int) -> str:
        """The reason of a wait, a key of REASONS.

        `nr` is the number of the system call, or a negative constant such as NR_NONE for a thread in no call.
        `state` is the thread's state, as a number of enum state. `iowait` is the task's in_iowait bit. If the
        call is in one of the groups futex, read, clone and poll of CALLS, `detail` is a number of enum
        futex_kind, file_kind, clone_kind or poll_kind.
        """
        state_name = self._enums["state"][state]
        group = self._group.get(nr, "other")
        is_uninterruptible = state_name == "uninterruptible"
        # Since 8a796565cec3 (6.5) a thread that waits for requests of io_uring has in_iowait set, even for
        # requests to sockets.
        if iowait and (group != "io_uring" or is_uninterruptible):
            return "disk"
        if nr == self._kernel_thread:
            return "kernel" if is_uninterruptible else "kthread"
        if state_name == "other":
            return "stopped"
        if group == "vfork" or (group == "clone" and self._member("clone_kind", detail) == "and_wait"):
            return "child"  # although such a wait is uninterruptible
        if is_uninterruptible:
            return "fault" if nr == self._no_call else "kernel"
        if group == "futex":
            return _BY_FUTEX.get(self._member("futex_kind", detail), "futex")
        if group == "read":
            return _BY_FILE.get(self._member("file_kind", detail), "other")
        if group == "poll" and self._member("poll_kind", detail) == "for_lock":
            return "lock"
        return "fault" if nr == self._no_call else group if group in REASONS else "other"

    def _member(self, enum: str, detail: int) -> str:
        """The member of an enum whose number is `detail`; empty if there is none."""
        members = self._enums.get(enum, ())
        return members[detail] if detail < len(members) else ""
