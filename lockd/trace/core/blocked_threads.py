"""Threads that are blocked at this moment, as procfs tells: since when it does not, but where."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lockd.names.labels.reasons import calls
from lockd.names.unwind.capture import Capture, read_capture

PF_KTHREAD = 0x00200000
NO_CALL = -1
RUNNING = "R"
FILES = (
    ("socket", stat.S_ISSOCK),
    ("pipe", stat.S_ISFIFO),
    ("device", stat.S_ISCHR),
    ("regular", stat.S_ISREG),
    ("regular", stat.S_ISBLK),
)


@dataclass(frozen=True)
class Moment:
    """Of a thread that is blocked: equal at two times if it did not run between them."""

    state: str
    """A letter of proc(5)."""
    switches: int


@dataclass(frozen=True)
class BlockedThread:
    tid: int
    tgid: int
    comm: bytes
    moment: Moment
    is_kernel_thread: bool
    nr: int
    """System call; NO_CALL if it is in none."""
    detail: tuple[str, str] | None
    """Of the system call, as in the enums futex_kind and file_kind; empty if it makes no difference."""
    capture: Capture | None
    """Its registers are 0 but for the stack pointer and the program counter."""
    kernel: tuple[str, ...]
    """Functions, innermost first."""


def threads_of(pids: Iterable[int], tids: Iterable[int], procfs: Path = Path("/proc")) -> Iterator[int]:
    """All threads of the processes, and `tids`; each once."""
    found = dict.fromkeys(tids)
    for pid in pids:
        with contextlib.suppress(OSError):
            found |= dict.fromkeys(int(name) for name in os.listdir(procfs / str(pid) / "task"))
    yield from found


def moment_of(tid: int, procfs: Path = Path("/proc")) -> Moment | None:
    """None if the thread is gone."""
    try:
        status = (procfs / str(tid) / "status").read_text(errors="replace")
    except OSError:
        return None
    switches = re.findall(r"^(?:non)?voluntary_ctxt_switches:\s*(\d+)", status, re.MULTILINE)
    state = re.search(r"^State:\s*(\S)", status, re.MULTILINE)
    return Moment(state[1] if state else "?", sum(map(int, switches)))


def blocked_thread(tid: int, procfs: Path = Path("/proc")) -> BlockedThread | None:
    """None if it is not blocked, or was not all the time that it was looked at."""
    moment = moment_of(tid, procfs)
    if moment is None or moment.state in (RUNNING, "Z", "X"):
        return None
    directory = procfs / str(tid)
    try:
        tgid = int(re.findall(r"^Tgid:\s*(\d+)", (directory / "status").read_text(errors="replace"), re.M)[0])
        fields = (directory / "stat").read_bytes().rpartition(b")")[2].split()
        is_kernel_thread = bool(int(fields[6]) & PF_KTHREAD)
        call = [] if is_kernel_thread else (directory / "syscall").read_text().split()
        found = BlockedThread(
            tid=tid,
            tgid=tgid,
            comm=(directory / "comm").read_bytes().rstrip(b"\n"),
            moment=moment,
            is_kernel_thread=is_kernel_thread,
            nr=int(call[0]) if len(call) >= 3 else NO_CALL,
            detail=_detail(directory, call) if len(call) == 9 else None,
            capture=read_capture(procfs, tgid, int(call[-2], 16), int(call[-1], 16))
            if len(call) >= 3
            else None,
            kernel=_kernel_stack(directory),
        )
    except (OSError, IndexError, ValueError):
        return None
    return found if moment_of(tid, procfs) == moment else None


def _kernel_stack(directory: Path) -> tuple[str, ...]:
    """The functions, without the scheduler's own; none where the kernel does not tell."""
    try:
        lines = (directory / "stack").read_text().splitlines()
    except OSError:
        return ()
    names = (re.search(r"\]\s+([^\s+]+)", line) for line in lines)
    return tuple(re.sub(r"\.(?:isra|constprop|part|cold|llvm)\b.*", "", name[1]) for name in names if name)


def _detail(directory: Path, call: list[str]) -> tuple[str, str] | None:
    group, _ = calls(os.uname().machine).get(int(call[0]), ("", ""))
    if group == "futex":
        return "futex_kind", "none"  # it depends on what is in memory as the wait begins
    return ("file_kind", _file_kind(directory, int(call[1], 16))) if group == "read" else None


def _file_kind(directory: Path, descriptor: int) -> str:
    path = directory / "fd" / str(descriptor & 0xFFFFFFFF)
    try:
        if os.readlink(path).startswith("anon_inode:"):
            return "event"
        mode = path.stat().st_mode
    except OSError:
        return "other"
    return next((kind for kind, is_kind in FILES if is_kind(mode)), "other")
