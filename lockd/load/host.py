"""What this host offers: privileges, BPF, tracefs, BTF and, hook by hook, each mechanism."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from lockd.errors import HostError
from lockd.kernel.btf import KernelTypes
from lockd.load import attach
from lockd.load.hooks import Candidate, hooked_functions

CLONE_NEWNS = 0x00020000
MS_REC_PRIVATE = 0x4000 | 0x40000
TRACEFS_PLACES = ("/sys/kernel/tracing", "/sys/kernel/debug/tracing")
INITIAL_PID_NAMESPACE = 0xEFFFFFFC
"""The inode of the host's own, in every kernel since 3.8 (PROC_PID_INIT_INO in linux/proc_ns.h)."""
HOST_PIDS = (
    "the programs in the kernel tell processes by the ids that they have on the host, under which others or"
    " none would be found here; rule: lockd and its /proc have the host's ids, as by hostPID: true in a pod,"
    " or --pid=host for docker and podman"
)

RETURN_TRAMPOLINES = ("arch_rethook_trampoline", "__kretprobe_trampoline", "kretprobe_trampoline")
"""Of 6.1 (f3a112c0c40d), 5.15 (adf8a61a940c) and before."""
FUNCTION = re.compile(rb"^([0-9a-f]+) [tTwW] ([^\s.]+)(\S*)(?:\t\[(\w+)\])?$", re.MULTILINE)
COPY = re.compile(rb"\.(?:isra|constprop|part|llvm)\b[.\w]*")
"""What compilers append to the names of copies of a function."""


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


def require_pids_of_the_host() -> None:
    """Raise HostError unless ids of processes mean here what they mean in the kernel's programs."""
    try:
        namespace = Path("/proc/self/ns/pid").stat().st_ino
    except FileNotFoundError as error:
        raise HostError(
            f"/proc: this process is not in it: it is that of another PID namespace: {HOST_PIDS}"
        ) from error
    if namespace != INITIAL_PID_NAMESPACE:
        raise HostError(f"this process is in a PID namespace of its own, as in a container: {HOST_PIDS}")


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


class Host:
    """What of the hooks this host has. Symbols and trampolines are looked for once, when first asked for."""

    def __init__(
        self,
        types: KernelTypes,
        trace: Path,
        functions: Sequence[str] = (),
        kallsyms: Path = Path("/proc/kallsyms"),
    ) -> None:
        self.types = types
        self.tracefs = trace
        self._functions = functions
        self._kallsyms = kallsyms

    def resolve(self, wanted: Candidate) -> list[Candidate]:
        """`wanted` for every copy that the compiler made of its function; as it is if there is none."""
        if not wanted.variants:
            return [wanted]
        names = self._names(wanted.hook)
        return [replace(wanted, hook=name) for name in names] or [wanted]

    def unavailable(self, wanted: Candidate) -> str:
        """Why a resolved candidate cannot be attached here, in words; empty if it can, as far as one can
        tell without trying."""
        match wanted.mechanism:
            case "raw_tracepoint":
                return self._no_raw_tracepoint(wanted.hook)
            case "tracepoint":
                return self._no_tracepoint(wanted.hook)
            case "kprobe" | "kretprobe":
                return self._no_kprobe(wanted)
            case "uprobe" | "uretprobe":
                return (
                    "" if attach.UPROBE_TYPE.exists() else "this kernel has no uprobes (CONFIG_UPROBE_EVENTS)"
                )
        return self._no_fentry(wanted.hook)

    @property
    def return_trampoline(self) -> int:
        """The address that a kretprobe puts in place of a function's return address; 0 if not to be had."""
        return next(
            (addresses[0] for name in RETURN_TRAMPOLINES if (addresses := self._symbols.get(name))), 0
        )

    def _no_raw_tracepoint(self, event: str) -> str:
        if self.types.tracepoint_args(event) is None:
            return f"this kernel has no tracepoint {event}{_since(event)}"
        return ""

    def _no_tracepoint(self, hook: str) -> str:
        category, event = hook.split(":")
        if not (self.tracefs / "events" / category).is_dir():
            return f"this kernel has no tracepoints {category} (CONFIG_FTRACE_SYSCALLS)"
        if not (self.tracefs / "events" / category / event / "id").exists():
            return f"this kernel has no tracepoint {hook}{_since(hook)}"
        return ""

    def _no_kprobe(self, wanted: Candidate) -> str:
        if not attach.KPROBE_TYPE.exists():
            return f"this kernel has no kprobes ({attach.KPROBE_TYPE} is missing: CONFIG_KPROBE_EVENTS)"
        if reason := self._no_function(wanted.hook):
            return reason
        if not self.return_trampoline:
            return (
                "the address of the return trampoline is hidden (kernel.kptr_restrict), without which "
                "missed returns could not be told"
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
                f"{len(addresses)} functions of this kernel are named {name}(), which one is not to be told"
            )
        return ""

    def _names(self, function: str) -> list[str]:
        copies = [name for name in self._symbols if name.startswith(f"{function}.")]
        return sorted([function] * (function in self._symbols) + copies)

    @cached_property
    def _symbols(self) -> dict[str, list[int]]:
        """Addresses of functions that could be hooked and of their copies, by name: the kernel's own, and
        of a trace's those of modules whose names the kernel has not."""
        asked = {name.encode() for name in self._functions}
        wanted = {*asked, *(name.encode() for name in (*hooked_functions(), *RETURN_TRAMPOLINES))}
        own: dict[str, list[int]] = {}
        modules: dict[str, list[int]] = {}
        for address, base, copy, module in FUNCTION.findall(self._kallsyms.read_bytes()):
            name, value = base + copy, int(address, 16)
            if value and module and name in asked:
                modules.setdefault(name.decode(), []).append(value)
            elif value and not module and (name in wanted or (base in wanted and COPY.fullmatch(copy))):
                own.setdefault(name.decode(), []).append(value)
        return modules | own

    @cached_property
    def _fentry_refused(self) -> str:
        """Found out by trying, with a function that every kernel has: what a kernel is built for does not
        tell what it allows."""
        btf_id = self.types.function(attach.TRIED_FUNCTION)
        if btf_id is None:
            return f"the kernel's BTF does not describe functions ({attach.TRIED_FUNCTION}())"
        return attach.try_tracing(attach.TRIED_FUNCTION, btf_id)


def _since(hook: str) -> str:
    for word, release in (("contention", "5.19"), ("futex_waitv", "5.16"), ("futex_", "6.7")):
        if word in hook:
            return f" (Linux {release} and later have it)"
    return ""
