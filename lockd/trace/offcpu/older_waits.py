"""Waits that began before the trace, of the threads that the trace is limited to.

They are found in procfs, and entered into the programs' map of threads as if they began with the trace. The
programs then see when they end, and which thread ends them. The stacks of these threads come from procfs too,
because the programs take a stack only when a thread blocks.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lockd.names.labels.processes import PF_KTHREAD
from lockd.names.labels.reasons import calls
from lockd.names.labels.units import PF_EXITING
from lockd.names.unwind.capture import Capture, read_capture, read_memory
from lockd.trace.core.session import OLDER_WAITS_LOST, OLDER_WAITS_UNREADABLE, Session
from lockd.views.profile import KernelFrame

TASK_STATES = {"S": 0x1, "D": 0x2, "T": 0x4, "t": 0x8, "P": 0x40, "I": 0x402}
"""The kernel's TASK_* bits, by the letters of proc_pid_stat(5)."""
STATES = {"S": "interruptible", "D": "uninterruptible"}
"""Members of the programs' enum state, by the letters of proc_pid_stat(5); other letters are `other`."""
RUNNING = "R"
FREEZERS = ("do_freezer_trap", "get_signal", "__refrigerator")
"""Functions in which a frozen thread sleeps: with its cgroup of version 2 (the first two, since compilers may
inline the first into the second), with its cgroup of version 1 or by a suspend (the third)."""
ELF_32_BIT = b"\x7fELF\x01"
"""The first bytes of the file of a 32-bit program."""
CLONE_VFORK = 0x4000
FILE_KINDS = (
    ("socket", stat.S_ISSOCK),
    ("pipe", stat.S_ISFIFO),
    ("device", stat.S_ISCHR),
    ("regular", stat.S_ISREG),
    ("regular", stat.S_ISBLK),
)
"""Members of the programs' enum file_kind, each with a test of a file's mode."""


@dataclass(frozen=True)
class ThreadState:
    """The state of a thread. A blocked thread with equal states at two times did not run between them."""

    letter: str
    """A letter of proc_pid_stat(5)."""
    switches: int
    """Voluntary and involuntary context switches so far."""


@dataclass(frozen=True)
class BlockedThread:
    """A thread that is blocked, as procfs shows it."""

    tid: int
    tgid: int
    comm: bytes
    state: ThreadState
    is_kernel_thread: bool
    nr: int | str | None
    """Number of the system call, or the name of the constant that the programs have in its place, such as
    NR_NONE; None if the kernel refuses to show the call."""
    detail: tuple[str, str] | None
    """What the call waits for: an enum of the programs (such as futex_kind) and its member; None for calls of
    which the programs note nothing more."""
    capture: Capture | None
    """The stack in user space; None if it could not be read. Of its registers only the stack pointer and the
    program counter are known."""
    kernel: tuple[str, ...]
    """Functions in the kernel, innermost first."""


class OlderWaits:
    """The waits of a session that began before the trace.

    `state_mask` is the value of --state; None for waits in all states. `only_users` leaves out the threads of
    the kernel, `only_kernel` all others.
    """

    def __init__(self, session: Session, state_mask: int | None, only_users: bool, only_kernel: bool) -> None:
        self._session = session
        self._stacks = session.stacks
        self._state_mask = state_mask
        self._only_users, self._only_kernel = only_users, only_kernel
        self._numbers: set[int] = set()
        """Stack numbers of waits that began before the trace."""

    def has_stack(self, number: int) -> bool:
        """Whether a stack number belongs to a wait that began before the trace."""
        return number in self._numbers

    def enter(self, pids: tuple[int, ...], tids: tuple[int, ...]) -> None:
        """Enter the waits of these processes and threads into the programs' map of threads.

        A thread that a program has already entered is left as it is. A wait of which the kernel refuses to
        show the call is not entered, because nothing would tell its reason. It counts as a loss.
        """
        for tid in _threads(pids, tids):
            thread = blocked_thread(tid)
            if not thread or not self._is_wanted(thread):
                continue
            if thread.nr is None:
                self._session.own_losses[OLDER_WAITS_UNREADABLE] += 1
            elif self._enter(thread):
                state = thread_state(tid)
                # The thread ran before its wait was entered, and still runs. Its entry is deleted, because
                # the programs would take the thread for blocked.
                if state and state != thread.state and state.letter == RUNNING and self._is_own_entry(tid):
                    threads = self._session.map("threads")
                    threads.delete(np.array([tid], threads.key))

    def _is_own_entry(self, tid: int) -> bool:
        """Whether the entry of a thread is still the one that _enter() wrote."""
        threads = self._session.map("threads")
        entry = threads.lookup(np.array([tid], threads.key))
        return bool(entry["off_since"] == self._session.began_ns)

    def _is_wanted(self, thread: BlockedThread) -> bool:
        if self._only_users if thread.is_kernel_thread else self._only_kernel:
            return False
        bits = TASK_STATES.get(thread.state.letter, 0)
        return self._state_mask is None or bool(bits & self._state_mask)

    def _enter(self, thread: BlockedThread) -> bool:
        """Enter a wait. Returns False if a program has already entered the thread, or if the map is full.

        A full map counts as a loss.
        """
        table, manifest = self._session.map("threads"), self._session.manifest
        kernel = tuple(map(KernelFrame, thread.kernel))
        number = self._stacks.add_sleeping(thread.tgid, thread.capture, kernel)
        self._numbers.add(number)
        entry = np.zeros(1, table.value)
        entry["off_since"] = self._session.began_ns
        entry["tgid"] = thread.tgid
        entry["nr"] = manifest.constants[thread.nr] if isinstance(thread.nr, str) else thread.nr
        is_frozen = bool(thread.kernel) and thread.kernel[0] in FREEZERS
        state = "other" if is_frozen else STATES.get(thread.state.letter, "other")
        entry["state"] = manifest.enums["state"].index(state)
        if thread.detail:
            enum, member = thread.detail
            entry["detail"] = manifest.enums[enum].index(member)
        entry["comm"] = thread.comm
        entry["stacks"]["user"] = entry["stacks"]["kernel"] = number
        key = np.array([thread.tid], table.key)
        is_entered = table.insert(key, entry)
        if not is_entered and not table.lookup(key)["tgid"]:  # 0 if there is no entry: the map is full
            self._session.own_losses[OLDER_WAITS_LOST] += 1
        return is_entered


def _threads(pids: Iterable[int], tids: Iterable[int], procfs: Path = Path("/proc")) -> Iterable[int]:
    """The ids of all threads of the processes, and `tids`, each once."""
    threads = dict.fromkeys(tids)
    for pid in pids:
        with contextlib.suppress(OSError):
            threads |= dict.fromkeys(int(name) for name in os.listdir(procfs / str(pid) / "task"))
    return threads


def thread_state(tid: int, procfs: Path = Path("/proc")) -> ThreadState | None:
    """The state of a thread; None if the thread has ended."""
    try:
        status = (procfs / str(tid) / "status").read_text(errors="replace")
    except OSError:
        return None
    switches = re.findall(r"^(?:non)?voluntary_ctxt_switches:\s*(\d+)", status, re.MULTILINE)
    letter = re.search(r"^State:\s*(\S)", status, re.MULTILINE)
    return ThreadState(letter[1] if letter else "?", sum(map(int, switches)))


def blocked_thread(tid: int, procfs: Path = Path("/proc")) -> BlockedThread | None:
    """What procfs shows of a blocked thread; None if the thread has ended, runs, or ran while it was read."""
    state = thread_state(tid, procfs)
    if state is None or state.letter in (RUNNING, "Z", "X"):
        return None
    directory = procfs / str(tid)
    try:
        tgid = int(re.findall(r"^Tgid:\s*(\d+)", (directory / "status").read_text(errors="replace"), re.M)[0])
        fields = (directory / "stat").read_bytes().rpartition(b")")[2].split()
        flags = int(fields[6])
        call = [] if flags & PF_KTHREAD else _call(directory)
        nr = _number(directory, flags, call)
        thread = BlockedThread(
            tid=tid,
            tgid=tgid,
            comm=(directory / "comm").read_bytes().rstrip(b"\n"),
            state=state,
            is_kernel_thread=bool(flags & PF_KTHREAD),
            nr=nr,
            detail=_detail(directory, nr, int(call[1], 16)) if call and isinstance(nr, int) else None,
            capture=read_capture(procfs, tgid, int(call[-2], 16), int(call[-1], 16))
            if call and len(call) >= 3
            else None,
            kernel=_kernel_stack(directory),
        )
    except (OSError, IndexError, ValueError):
        return None
    return thread if thread_state(tid, procfs) == state else None


def _call(directory: Path) -> list[str] | None:
    """The fields of a thread's file `syscall`; None if the kernel refuses to show it.

    It asks for the right to attach to the process by ptrace(). Root has no such right without CAP_SYS_PTRACE,
    and nobody has it if kernel.yama.ptrace_scope is 3.
    """
    try:
        return (directory / "syscall").read_text().split()
    except PermissionError:
        return None


def _kernel_stack(directory: Path) -> tuple[str, ...]:
    """Functions in the kernel, innermost first; empty if the kernel does not show them.

    The kernel leaves out the scheduler's functions.
    """
    try:
        lines = (directory / "stack").read_text().splitlines()
    except OSError:
        return ()
    names = (re.search(r"\]\s+([^\s+]+)", line) for line in lines)
    return tuple(re.sub(r"\.(?:isra|constprop|part|cold|llvm)\b.*", "", name[1]) for name in names if name)


def _number(directory: Path, flags: int, call: list[str] | None) -> int | str | None:
    """The member `nr` of a BlockedThread, by the flags and the call of the thread."""
    if flags & (PF_KTHREAD | PF_EXITING):
        return "NR_KERNEL" if flags & PF_KTHREAD else "NR_EXITING"
    if call is None:
        return None
    # A worker that the kernel made for a process shows a call of its creator, but has no registers.
    if len(call) >= 3 and not any(int(register, 16) for register in call[-2:]):
        return "NR_KERNEL"
    if len(call) < 9:
        return "NR_NONE"
    if int(call[-2], 16) < 1 << 32:  # hardly any other program has its stack there
        with contextlib.suppress(OSError), (directory / "exe").open("rb") as program:
            if program.read(len(ELF_32_BIT)) == ELF_32_BIT:
                return "NR_COMPAT"
    return int(call[0])


def _detail(directory: Path, nr: int, first: int) -> tuple[str, str] | None:
    """The member `detail` of a BlockedThread in the system call `nr` with this first argument."""
    group, name = calls(os.uname().machine).get(nr, ("", ""))
    match group:
        case "futex":
            return "futex_kind", "none"  # unknown: it depends on what was in memory when the wait began
        case "read":
            return "file_kind", _file_kind(directory, first)
        case "clone":
            flags = first
            if name == "clone3":  # the argument is the address of a structure, which begins with the flags
                flags = 0
                with contextlib.suppress(OSError, OverflowError):
                    memory = read_memory(directory.parent, int(directory.name), first, 8)
                    flags = int.from_bytes(memory, "little")
            return "clone_kind", "and_wait" if flags & CLONE_VFORK else "other"
        case "poll":
            return "poll_kind", _poll_kind(directory)
    return None


def _poll_kind(directory: Path) -> str:
    """What a thread polls for. PostgreSQL says at the end of a backend's title that it waits for a lock."""
    try:
        is_postgres = (directory / "comm").read_bytes() == b"postgres\n"
        title = (directory / "cmdline").read_bytes().partition(b"\0")[0] if is_postgres else b""
    except OSError:
        return "any"
    return "for_lock" if title.endswith(b" waiting") else "any"


def _file_kind(directory: Path, descriptor: int) -> str:
    path = directory / "fd" / str(descriptor & 0xFFFFFFFF)
    try:
        if os.readlink(path).startswith("anon_inode:"):
            return "event"
        mode = path.stat().st_mode
    except OSError:
        return "other"
    return next((kind for kind, is_kind in FILE_KINDS if is_kind(mode)), "other")
