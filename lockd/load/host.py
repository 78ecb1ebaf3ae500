"""What this host offers: privileges, BPF, tracefs, BTF and, hook by hook, each mechanism."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
from dataclasses import dataclass
from pathlib import Path

from lockd.errors import HostError
from lockd.load.btf import KernelTypes

CLONE_NEWNS = 0x00020000
MS_REC_PRIVATE = 0x4000 | 0x40000
TRACEFS_PLACES = ("/sys/kernel/tracing", "/sys/kernel/debug/tracing")

FUTEX_CALLS = ("futex", "futex_wait", "futex_waitv", "futex_wake", "futex_requeue")
"""The last four are futex2: waitv since 5.16, the others since 6.7."""


@dataclass(frozen=True)
class Candidate:
    """A BPF function and the place it can be attached to."""

    program: str
    function: str
    mechanism: str
    """`tracepoint` (hook is CATEGORY:EVENT) or `raw_tracepoint` (hook is the event)."""
    hook: str
    required: bool = True
    """Whether the program measures wrongly, not just less, without it."""
    optional: bool = False
    """Whether a kernel without it has nothing there to be measured: a newer system call."""


def candidates(programs: tuple[str, ...]) -> list[Candidate]:
    """Every hook that the programs want, in the order of attachment: ends before beginnings.

    A call seen to end but not to begin is recognised; one seen to begin but not to end
    would look like a wait that goes on.
    """
    wanted: list[Candidate] = []
    if "kernel_locks" in programs:
        wanted += [
            Candidate("kernel_locks", "on_contention_end", "raw_tracepoint", "contention_end"),
            Candidate("kernel_locks", "on_contention_begin", "raw_tracepoint", "contention_begin"),
        ]
    if "futex" in programs:
        for call in (*FUTEX_CALLS, "restart_syscall"):
            enter = "futex_restart" if call == "restart_syscall" else "futex_enter"
            newer = call not in ("futex", "restart_syscall")
            for function, hook in (("futex_exit", "exit"), (enter, "enter")):
                event = f"syscalls:sys_{hook}_{call}"
                wanted.append(
                    Candidate("futex", function, "tracepoint", event, call == "futex", optional=newer)
                )
    if "futex" in programs or "offcpu" in programs:
        sched = "offcpu" if "offcpu" in programs else "futex"
        wanted += [
            Candidate(sched, "on_sched_process_exec", "raw_tracepoint", "sched_process_exec", False),
            Candidate(sched, "on_sched_switch", "raw_tracepoint", "sched_switch"),
        ]
    if "offcpu" in programs:
        wanted.append(Candidate("offcpu", "on_sched_waking", "raw_tracepoint", "sched_waking", False))
    return wanted


def require_privileges() -> None:
    """Raise HostError unless this process may load BPF programs."""
    status = Path("/proc/self/status").read_text()
    effective = int(status.split("CapEff:")[1].split()[0], 16)
    sys_admin, perfmon, bpf = 1 << 21, 1 << 38, 1 << 39
    if not effective & sys_admin and effective & (bpf | perfmon) != bpf | perfmon:
        raise HostError(
            f"user id {os.geteuid()}, capabilities {effective:#x}: loading BPF programs needs root, "
            "or CAP_BPF and CAP_PERFMON (5.8 and later), or CAP_SYS_ADMIN: run it with sudo"
        )


def tracefs() -> Path | None:
    """Where tracefs is mounted, if it is. Raises HostError if this user may not look."""
    try:
        return next((Path(place) for place in TRACEFS_PLACES if Path(place, "events").is_dir()), None)
    except PermissionError as error:
        raise HostError(f"{error.filename}: {error.strerror}: tracefs is root's: run it with sudo") from error


def mount_tracefs_privately() -> Path:
    """Mount tracefs for this process alone, where the host has not mounted it.

    Raises HostError with the kernel's reason.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    target = TRACEFS_PLACES[0]
    failed = libc.unshare(CLONE_NEWNS)
    if not failed:
        # Fails harmlessly in a chroot, whose / is no mount point.
        libc.mount(b"none", b"/", None, MS_REC_PRIVATE, None)
        failed = libc.mount(b"nodev", target.encode(), b"tracefs", 0, None)
    if failed:
        raise HostError(
            f"tracefs: not mounted at {' or '.join(TRACEFS_PLACES)}, and cannot be for lockd alone: "
            f"{os.strerror(ctypes.get_errno())}; try: mount -t tracefs nodev {target}"
        )
    return Path(target)


def ensure_tracefs() -> Path:
    """tracefs, mounted for this process if need be."""
    return tracefs() or mount_tracefs_privately()


def unavailable(candidate: Candidate, types: KernelTypes, trace: Path) -> str:
    """Why `candidate` cannot be attached here, in words; empty if it can, as far as the host tells."""
    if candidate.mechanism == "raw_tracepoint":
        if types.tracepoint_args(candidate.hook) is None:
            return f"this kernel has no tracepoint {candidate.hook}{_since(candidate.hook)}"
        return ""
    category, event = candidate.hook.split(":")
    if not (trace / "events" / category).is_dir():
        return f"this kernel has no tracepoints {category} (CONFIG_FTRACE_SYSCALLS)"
    if not (trace / "events" / category / event / "id").exists():
        return f"this kernel has no tracepoint {candidate.hook}{_since(candidate.hook)}"
    return ""


def _since(hook: str) -> str:
    for word, release in (("contention", "5.19"), ("futex_waitv", "5.16"), ("futex_", "6.7")):
        if word in hook:
            return f" (Linux {release} and later have it)"
    return ""
