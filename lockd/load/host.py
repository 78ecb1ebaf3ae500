"""What this host offers to the loader: privileges, tracefs, BTF and the availability of each hook."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from lockd.errors import HostError
from lockd.kernel.btf import KernelTypes
from lockd.load import programs
from lockd.load.hooks import Candidate, hooked_functions

CLONE_NEWNS = 0x00020000
MS_REC_PRIVATE = 0x4000 | 0x40000
TRACEFS_PLACES = ("/sys/kernel/tracing", "/sys/kernel/debug/tracing")
INITIAL_PID_NAMESPACE = 0xEFFFFFFC
"""The inode of the host's PID namespace in every kernel since 3.8 (PROC_PID_INIT_INO in linux/proc_ns.h)."""
HOST_PIDS = (
    "BPF programs know processes by their ids on the host, and here these ids belong to other processes or to"
    " none; rule: lockd and its /proc have the host's ids, as by hostPID: true in a pod, or --pid=host for"
    " docker and podman"
)
"""The end of a message about a PID namespace: the reason and the rule."""

SLEEPING_RINGS = (
    "a BPF program that writes to a ring buffer may sleep (PREEMPT_RT before 8b62645b09f8, Linux 6.12), which"
    " at a switch or a wake-up can lock the host up: lockd uses no ring buffer there"
)
"""Why lockd writes to no ring buffer on some kernels (Host.has_sleeping_rings)."""
RETURN_TRAMPOLINES = ("arch_rethook_trampoline", "__kretprobe_trampoline", "kretprobe_trampoline")
"""Functions to which a kretprobe makes a function return: since 6.1 (f3a112c0c40d), since 5.15
(adf8a61a940c), and before that."""
FUNCTION = re.compile(rb"^([0-9a-f]+) [tTwW] ([^\s.]+)(\S*)(?:\t\[(\w+)\])?$", re.MULTILINE)
"""Matches the line of a function in kallsyms: address, name, suffix of a copy, module."""
COPY = re.compile(rb"\.(?:isra|constprop|part|llvm)\b[.\w]*")
"""Matches the suffix that compilers append to the name of a function for a copy of it."""


def require_privileges() -> None:
    """Raise HostError unless this process may load BPF programs."""
    status = Path("/proc/self/status").read_text()
    effective = int(status.split("CapEff:")[1].split()[0], 16)
    sys_admin, perfmon, bpf = 1 << 21, 1 << 38, 1 << 39
    if not effective & sys_admin and effective & (bpf | perfmon) != bpf | perfmon:
        raise HostError(
            f"user id {os.geteuid()}, capabilities {effective:#x}: loading BPF programs needs root, "
            "or CAP_BPF and CAP_PERFMON, or CAP_SYS_ADMIN: run it with sudo"
        )


def require_pids_of_the_host() -> None:
    """Raise HostError unless this process and /proc are in the host's PID namespace.

    BPF programs know processes by their ids there.
    """
    try:
        namespace = Path("/proc/self/ns/pid").stat().st_ino
    except FileNotFoundError as error:
        raise HostError(
            f"/proc: this process is not in it: /proc belongs to another PID namespace: {HOST_PIDS}"
        ) from error
    if namespace != INITIAL_PID_NAMESPACE:
        raise HostError(f"this process is in a PID namespace of its own, as in a container: {HOST_PIDS}")


def tracefs() -> Path | None:
    """Return the directory on which tracefs is mounted, or None.

    Raises HostError if this user has no access.
    """
    for place in TRACEFS_PLACES:
        try:
            os.stat(f"{place}/events")  # Path.is_dir() of newer Pythons does not tell that access is refused
            return Path(place)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except PermissionError as error:
            raise HostError(
                f"{error.filename}: {error.strerror}: tracefs is root's: run it with sudo"
            ) from error
    return None


def mount_tracefs_privately() -> Path:
    """Mount tracefs in a mount namespace of this process, and return its directory.

    This is for a host that has not mounted tracefs. Raises HostError with the kernel's reason.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    target = TRACEFS_PLACES[0]
    failed = libc.unshare(CLONE_NEWNS)
    if not failed:
        # This fails in a chroot, whose / is not a mount point. The failure does no harm.
        libc.mount(b"none", b"/", None, MS_REC_PRIVATE, None)
        failed = libc.mount(b"nodev", target.encode(), b"tracefs", 0, None)
    if failed:
        raise HostError(
            f"tracefs: not mounted at {' or '.join(TRACEFS_PLACES)}, and cannot be for lockd alone: "
            f"{os.strerror(ctypes.get_errno())}; try: mount -t tracefs nodev {target}"
        )
    return Path(target)


def ensure_tracefs() -> Path:
    """Return the directory of tracefs; mount it for this process if the host has not.

    Raises HostError as tracefs() and mount_tracefs_privately() do.
    """
    return tracefs() or mount_tracefs_privately()


class Host:
    """The hooks that this host has.

    Symbols of the kernel are read, fentry is tried, and tracefs is looked for when they are first needed: few
    hooks need tracefs. `functions` are kernel functions that a trace may hook; they may be in modules.
    """

    def __init__(
        self,
        types: KernelTypes,
        functions: Sequence[str] = (),
        kallsyms: Path = Path("/proc/kallsyms"),
    ) -> None:
        self.types = types
        self._functions = functions
        self._kallsyms = kallsyms

    def resolve(self, candidate: Candidate) -> list[Candidate]:
        """Return the candidate for every copy that the compiler made of its function.

        If there is no copy, or copies are not wanted, the candidate is returned as it is.
        """
        if not candidate.variants:
            return [candidate]
        names = self._names(candidate.hook)
        return [replace(candidate, hook=name) for name in names] or [candidate]

    def obstacle(self, candidate: Candidate) -> str:
        """Return why a resolved candidate cannot be attached on this host, for people to read.

        Empty if nothing is known against it. The candidate is not tried, so the kernel may still refuse it.
        """
        match candidate.mechanism:
            case "raw_tracepoint":
                return self._no_raw_tracepoint(candidate.hook)
            case "tracepoint":
                return self._no_tracepoint(candidate.hook)
            case "kprobe" | "kretprobe":
                return self._no_kprobe(candidate.hook)
            case "uprobe" | "uretprobe":
                return (
                    ""
                    if programs.UPROBE_TYPE.exists()
                    else "this kernel has no uprobes (CONFIG_UPROBE_EVENTS)"
                )
        return self._no_fentry(candidate.hook)

    @cached_property
    def tracefs(self) -> Path:
        """The directory of tracefs, which is mounted if it was not. Raises HostError."""
        return ensure_tracefs()

    @cached_property
    def can_cast(self) -> bool:
        """Whether BPF programs can call programs.CAST of the kernel, and so read any address as a struct.

        This takes Linux 6.2 with its JIT on. It is tried, because a kernel that has CAST may refuse all calls
        of functions of the kernel.
        """
        cast = self.types.function(programs.CAST)
        return cast is not None and programs.can_cast(cast, self.types.struct("task_struct"))

    @cached_property
    def has_sleeping_rings(self) -> bool:
        """Whether a program that writes to a ring buffer may sleep, because of the lock of the ring buffer.

        So it is if the lock is a spinlock_t and the kernel has PREEMPT_RT. Of all the types that this lock
        has had, only such a spinlock_t has a member `lock`, which is an rt_mutex.
        """
        try:
            self.types.bit_offset("bpf_ringbuf", "spinlock.lock")
        except HostError:
            return False
        return True

    def require_rings(self) -> None:
        """Raise HostError if a program that writes to a ring buffer may sleep."""
        if self.has_sleeping_rings:
            raise HostError(SLEEPING_RINGS)

    @property
    def return_trampoline(self) -> int:
        """The address that a kretprobe puts in place of a function's return address; 0 if it is hidden."""
        return next(
            (addresses[0] for name in RETURN_TRAMPOLINES if (addresses := self._symbols.get(name))), 0
        )

    def _no_raw_tracepoint(self, event: str) -> str:
        if self.types.tracepoint_args(event) is None:
            return f"this kernel has no tracepoint {event}{_since(event)}"
        return ""

    def _no_tracepoint(self, hook: str) -> str:
        category, event = hook.split(":")
        try:
            directory = self.tracefs / "events" / category
        except HostError as error:
            return str(error)
        if not directory.is_dir():
            return f"this kernel has no tracepoints {category} (CONFIG_FTRACE_SYSCALLS)"
        if not (directory / event / "id").exists():
            return f"this kernel has no tracepoint {hook}{_since(hook)}"
        return ""

    def _no_kprobe(self, function: str) -> str:
        if not programs.KPROBE_TYPE.exists():
            return f"this kernel has no kprobes ({programs.KPROBE_TYPE} is missing: CONFIG_KPROBE_EVENTS)"
        if reason := self._no_function(function):
            return reason
        if not self.return_trampoline:
            return (
                "the address of the return trampoline is hidden (kernel.kptr_restrict), and without it "
                "missed returns cannot be recognised"
            )
        return ""

    def _no_fentry(self, function: str) -> str:
        if self._fentry_refused:
            return self._fentry_refused
        if reason := self._no_function(function):
            return reason
        if self.types.function(function) is None:
            return f"the kernel's BTF does not describe {function}()"
        return ""

    def _no_function(self, name: str) -> str:
        if not self._symbols:
            return f"{self._kallsyms}: the kernel hides its functions (kernel.kptr_restrict) or lists none"
        addresses = self._symbols.get(name, [])
        if not addresses:
            return f"this kernel has no function {name}(), or the compiler has inlined it{_since(name)}"
        if len(addresses) > 1:
            return (
                f"{len(addresses)} functions of this kernel are named {name}(), and they cannot be told apart"
            )
        return ""

    def _names(self, function: str) -> list[str]:
        """Return the names of a kernel function and of its copies."""
        copies = [name for name in self._symbols if name.startswith(f"{function}.")]
        return sorted([function] * (function in self._symbols) + copies)

    @cached_property
    def _symbols(self) -> dict[str, list[int]]:
        """Addresses of the functions that may be hooked and of their copies, by name.

        Functions of a trace may be in modules. If the kernel itself has a function of the same name, only
        that one counts.
        """
        of_trace = {name.encode() for name in self._functions}
        wanted = {*of_trace, *(name.encode() for name in (*hooked_functions(), *RETURN_TRAMPOLINES))}
        kernel: dict[str, list[int]] = {}
        modules: dict[str, list[int]] = {}
        for address, base, copy, module in FUNCTION.findall(self._kallsyms.read_bytes()):
            name, value = base + copy, int(address, 16)
            if value and module and name in of_trace:
                modules.setdefault(name.decode(), []).append(value)
            elif value and not module and (name in wanted or (base in wanted and COPY.fullmatch(copy))):
                kernel.setdefault(name.decode(), []).append(value)
        return modules | kernel

    @cached_property
    def _fentry_refused(self) -> str:
        """The kernel's reason if it refuses fentry; empty if it does not.

        fentry is tried with a function that every kernel has, because the configuration of a kernel does not
        say whether fentry works.
        """
        btf_id = self.types.function(programs.TRIED_FUNCTION)
        if btf_id is None:
            return f"the kernel's BTF does not describe functions ({programs.TRIED_FUNCTION}())"
        return programs.fentry_refusal(programs.TRIED_FUNCTION, btf_id)


def _since(hook: str) -> str:
    """Return a remark with the first release of Linux that has a hook, if that is known."""
    for pattern, release in (
        ("contention", "5.19"),
        ("sys_(enter_|exit_)?futex_waitv$", "5.16"),
        ("sys_(enter_|exit_)?futex_(wait|wake|requeue)$", "6.7"),
    ):
        if re.search(pattern, hook):
            return f" (Linux {release} and later have it)"
    return ""
