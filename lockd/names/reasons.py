"""Why a thread is off the CPU: a closed list of reasons, from its system call and state."""

from __future__ import annotations

import os

REASONS = {
    "lock": "a futex that is a lock or a priority-inheritance lock",
    "cond": "a futex that is a condition variable, a semaphore, a join: waits for work",
    "futex": "a futex whose kind is not known",
    "sleep": "nanosleep and clock_nanosleep",
    "poll": "poll, select, epoll_wait and their kin",
    "socket": "sending, receiving, connecting or accepting on a socket, also by read and write",
    "pipe": "reading from or writing to a pipe",
    "device": "reading from or writing to a character device: a terminal, /dev/fuse",
    "file": "reading, writing or syncing a file, without waiting for a disk",
    "file_lock": "flock and fcntl locks",
    "disk": "block I/O, whatever the system call (the task's in_iowait bit)",
    "child": "wait for a child process; the parent of a vfork",
    "signal": "waiting for a signal",
    "io_uring": "io_uring_enter",
    "ipc": "System V and POSIX message queues and semaphores",
    "fault": "a page fault or another trap in user code, without disk",
    "stopped": "stopped by a signal or a tracer",
    "kernel": "uninterruptible without I/O: a kernel lock, RCU, a completion",
    "kthread": "a kernel thread that waits for work",
    "other": "any other system call",
}
"""Every value of the label `reason`, with its definition."""

_CALLS: dict[str, dict[str, str]] = {
    "x86_64": {
        "futex": "202 449 455",
        "sleep": "35 230",
        "poll": "7 23 232 270 271 281 441",
        "socket": "42 43 44 45 46 47 288 299 307",
        "pipe": "275 276 278",
        "read": "0 1 17 18 19 20",
        "file": "74 75 26 162 277 306 285",
        "file_lock": "72 73",
        "child": "56 58 61 247 435",
        "signal": "34 128 130",
        "io_uring": "426 208 333",
        "ipc": "64 65 69 70 71 220 242 243",
        "device": "16",
    },
    "aarch64": {
        "futex": "98 449 455",
        "sleep": "101 115",
        "poll": "22 72 73 441",
        "socket": "200 202 203 206 207 211 212 242 243 269",
        "pipe": "75 76 77",
        "read": "63 64 65 66 67 68",
        "file": "81 82 83 84 227 267 47",
        "file_lock": "25 32",
        "child": "95 220 260 435",
        "signal": "133 137",
        "io_uring": "426 4 292",
        "ipc": "182 183 188 189 192 193",
        "device": "29",
    },
}
"""System-call numbers by what they wait for; of `read` it depends on the file."""

_FILES = {"FILE_REGULAR": "file", "FILE_PIPE": "pipe", "FILE_SOCKET": "socket", "FILE_DEVICE": "device"}
_KINDS = {"KIND_LOCK": "lock", "KIND_PI": "lock", "KIND_COND": "cond"}


class Reasons:
    """Reasons by what the programs note of a wait. `enums` and `constants` are the C sources'."""

    def __init__(
        self,
        enums: dict[str, tuple[str, ...]],
        constants: dict[str, int],
        machine: str = os.uname().machine,
    ) -> None:
        self._call = {
            int(nr): reason for reason, numbers in _CALLS[machine].items() for nr in numbers.split()
        }
        self._enums = enums
        self._no_call, self._kernel_thread = constants["NR_NONE"], constants["NR_KERNEL"]

    def reason(self, nr: int, state: int, iowait: bool, detail: int) -> str:
        """`detail` is an enum futex_kind in a futex call, an enum file_kind in a read or write."""
        state_name = self._enums["state"][state]
        call = self._call.get(nr, "other")
        if iowait:
            return "disk"
        if nr == self._kernel_thread:
            return "kernel" if state_name == "STATE_UNINTERRUPTIBLE" else "kthread"
        if state_name == "STATE_OTHER":
            return "stopped"
        if state_name == "STATE_UNINTERRUPTIBLE" and call != "child":
            return "fault" if nr == self._no_call else "kernel"
        if call == "futex":
            return self._named(_KINDS, "futex_kind", detail, "futex")
        if call == "read":
            return self._named(_FILES, "file_kind", detail, "other")
        return "fault" if nr == self._no_call else call

    def _named(self, words: dict[str, str], enum: str, detail: int, default: str) -> str:
        members = self._enums.get(enum, ())
        return words.get(members[detail], default) if detail < len(members) else default
