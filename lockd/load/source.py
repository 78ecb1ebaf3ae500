"""The C text of a translation unit: files of lockd/bpf, below definitions that depend on the host."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockd.kernel.btf import KernelTypes
from lockd.load import programs
from lockd.load.choose import Choice
from lockd.load.host import Host
from lockd.load.settings import LoadSettings

BPF_DIR = Path(__file__).resolve().parent.parent / "bpf"
HEADERS = BPF_DIR / "headers"
"""The stub kernel tree that bcc gets instead of kernel headers."""

SIZES = {
    # Overflow maps: every combination of system call, state and slot that occurs. If there are more, events
    # of combinations without room are counted as dropped.
    "OVER_ENTRIES": 2048,
    # Overflow maps of kernel locks: every combination of type and slot.
    "OVER_KERNEL_ENTRIES": 512,
    # Threads that wait for kernel locks at one moment.
    "WAITS_ENTRIES": 4096,
    # Semaphores of the kernel that are held at one moment.
    "SEMAPHORE_TAKERS_ENTRIES": 4096,
    # Locks that threads block on for the first time within one period; further locks are captured in the next
    # period. The namer needs longer than a period for this many.
    "CAPTURES_ENTRIES": 128,
    # Locks in user space that were captured. Each of them is captured again after 10 s at the earliest.
    "KNOWN_LOCKS_ENTRIES": 16384,
    # Locks in user space, and sleeping locks of the kernel, that are waited for at one moment.
    "LOCK_QUEUES_ENTRIES": 4096,
    # Java virtual machines whose memory the programs read to find out what a thread waits for.
    "HOTSPOTS_ENTRIES": 1024,
    # Processes of CPython in which the programs read the functions of threads.
    "CPYTHONS_ENTRIES": 1024,
    # Threads of processes of CPython.
    "PYTHON_THREADS_ENTRIES": 8192,
    # Processes that the programs have announced to the namer.
    "TOLD_PROCESSES_ENTRIES": 1024,
}
"""Numbers of entries of maps, by the macro that the programs use."""
LRU_SIZES = (
    *("KNOWN_LOCKS_ENTRIES", "LOCK_QUEUES_ENTRIES", "NAMESPACE_IDS_ENTRIES", "SEMAPHORE_TAKERS_ENTRIES"),
    *("HOTSPOTS_ENTRIES", "CPYTHONS_ENTRIES", "PYTHON_THREADS_ENTRIES", "TOLD_PROCESSES_ENTRIES"),
    "KEPT_STACKS_ENTRIES",
)
"""The macros of the sizes of maps in which new entries take the place of old ones (LRU)."""
RESERVED_BY_CPU = 128
"""How many free elements of an LRU map a processor reserves for itself when it adds an entry
(LOCAL_FREE_TARGET in kernel/bpf/bpf_lru_list.c).

If the processors have reserved all elements, each new entry replaces one of the newest entries, which is then
gone before it is looked up. So the maps get this many elements more for each processor. Linux 6.16 reserves
less in small maps ("bpf: Adjust free target to avoid global starvation of LRU map").
"""
ENDS_PER_MAP = 32
"""How many of the entries that fill a map ask, on average, for the window to end with the next tick.

The programs choose these entries at random (add_entry() in common.bpf.h). The chance that a full map has none
of them is 1 in 10^14.
"""

LARGEST_INT, MASK_64 = 2**31 - 1, 2**64 - 1

THREAD_POINTER = {"x86_64": "thread.fsbase", "aarch64": "thread.uw.tp_value"}
"""The member of struct task_struct with the thread pointer, by machine."""

OFFSETS = {
    "TASK_PID": ("task_struct", "pid"),
    "TASK_TGID": ("task_struct", "tgid"),
    "TASK_COMM": ("task_struct", "comm"),
    "TASK_FLAGS": ("task_struct", "flags"),
    "TASK_STACK": ("task_struct", "stack"),
    "TASK_THREAD_POINTER": ("task_struct", THREAD_POINTER[os.uname().machine]),
    "TASK_GROUP_LEADER": ("task_struct", "group_leader"),
    "TASK_CGROUPS": ("task_struct", "cgroups"),
    "TASK_MM": ("task_struct", "mm"),
    "TASK_PENDING_SIGNAL": ("task_struct", "pending.signal"),
    "TASK_BLOCKED": ("task_struct", "blocked"),
    "TASK_SIGNAL": ("task_struct", "signal"),
    "SIGNAL_SHARED_PENDING": ("signal_struct", "shared_pending.signal"),
    "TASK_FILES": ("task_struct", "files"),
    "TASK_NVCSW": ("task_struct", "nvcsw"),
    "TASK_NIVCSW": ("task_struct", "nivcsw"),
    "TASK_ON_RQ": ("task_struct", "on_rq"),
    "TASK_THREAD_PID": ("task_struct", "thread_pid"),
    "PID_LEVEL": ("pid", "level"),
    "PID_NUMBERS": ("pid", "numbers"),
    "MM_ARG_START": ("mm_struct", "arg_start"),
    "MM_MMAP_LOCK": ("mm_struct", "mmap_lock"),
    "MM_START_CODE": ("mm_struct", "start_code"),
    "MM_END_CODE": ("mm_struct", "end_code"),
    "FILES_FDT": ("files_struct", "fdt"),
    "FDTABLE_FD": ("fdtable", "fd"),
    "FDTABLE_MAX_FDS": ("fdtable", "max_fds"),
    "FILE_INODE": ("file", "f_inode"),
    "INODE_MODE": ("inode", "i_mode"),
    "INODE_FLAGS": ("inode", "i_flags"),
    "CSS_SET_DFL_CGRP": ("css_set", "dfl_cgrp"),
    "CGROUP_KN": ("cgroup", "kn"),
    "KERNFS_NODE_ID": ("kernfs_node", "id"),
}
"""Struct and member of each offset in bytes that the programs need, by the macro that they use."""

STRUCTS = {"TASK_TYPE": "task_struct", "FILE_TYPE": "file", "POINTER_TYPE": "hlist_head"}
"""Structs that the programs name by their BTF ids, by the macro that they use. A hlist_head is one pointer
and nothing else: the programs read pointers as such structs."""


@dataclass(frozen=True)
class Source:
    """A translation unit. It is one text, because bcc rewrites map operations only in its main text."""

    text: str
    enums: dict[str, tuple[str, ...]]
    """The members of each C enumeration, as in kernel.manifest.Manifest."""
    constants: dict[str, int]
    """The integer #defines in lockd/bpf, except those that differ by architecture."""


def source_for(settings: LoadSettings, choices: Sequence[Choice], host: Host) -> Source:
    """Return the source for this host: its offsets and features, and sizes from the settings."""
    ways = [choice.way for choice in choices if choice.way]
    defines: dict[str, int | None] = {
        **SIZES,
        "ENTRIES": settings.entries,
        "THREADS_ENTRIES": settings.threads,
        "NAMESPACE_IDS_ENTRIES": settings.threads // 2,  # for threads in pid namespaces of their own
        "STACKS_ENTRIES": settings.stacks,
        "HOLDING_ENTRIES": settings.entries,
        "FEW": max(min(settings.entries, settings.stacks) // ENDS_PER_MAP, 1),
        "PAGE_SIZE": resource.getpagesize(),  # bcc computes the size of a ring from it
        **_layout_of(host.types),
        **_casts_of(host),
        **{f"WITH_{program.upper()}": None for program in settings.programs},
        **{name: None for way in ways for name in way.defines},
    }
    if host.has_sleeping_rings:
        defines["WITHOUT_RINGS"] = None
    files = ["include/common.bpf.h", "include/arch.bpf.h", "include/capture.bpf.h"]
    if settings.trace:
        defines.update(settings.trace.defines)
        files += settings.trace.files
    for name in LRU_SIZES:
        if size := defines.get(name):
            defines[name] = size + RESERVED_BY_CPU * settings.cpus
    for choice in choices:
        files += [*choice.part.files, *(choice.way.files if choice.way else ())]
    bounds = (
        f"#define MIN_BLOCK_NS {settings.min_block_ns}ULL\n#define MAX_BLOCK_NS {settings.max_block_ns}ULL\n"
    )
    source = assemble(files, defines)
    return Source(bounds + source.text, source.enums, source.constants)


def _layout_of(types: KernelTypes) -> dict[str, int | None]:
    """Return the defines for the kernel's structures and features; None for a define without a value."""
    defines: dict[str, int | None] = {name: types.offset(*member) for name, member in OFFSETS.items()}
    # A uretprobe replaces a return address on the stack, which the programs undo in a capture. On arm64 they
    # cannot: the return address is in a register, which each function saves at a place of its own.
    if types.has_member("return_instance", "orig_ret_vaddr") and os.uname().machine == "x86_64":
        defines["HAVE_RETURN_INSTANCES"] = None
        defines["TASK_UTASK"] = types.offset("task_struct", "utask")
        defines["UTASK_RETURN_INSTANCES"] = types.offset("uprobe_task", "return_instances")
        defines["RETURN_STACK"] = types.offset("return_instance", "stack")
        defines["RETURN_ADDRESS"] = types.offset("return_instance", "orig_ret_vaddr")
        defines["RETURN_NEXT"] = types.offset("return_instance", "next")
    # 2f064a59a11f (5.14) renamed `state` and made it an int.
    is_renamed = types.has_member("task_struct", "__state")
    defines["TASK_STATE"] = types.offset("task_struct", "__state" if is_renamed else "state")
    defines["TASK_STATE_BYTES"] = 4 if is_renamed else 8
    for bit in ("in_iowait", "frozen"):
        name = f"TASK_{bit.upper()}"
        defines[name], defines[f"{name}_BIT"] = divmod(types.bit_offset("task_struct", bit), 8)
    # fa2c3254d7cf (5.18) added a fourth argument: the previous thread's state, before a waker can change it.
    if (types.tracepoint_args("sched_switch") or 0) >= 4:
        defines["HAVE_PREV_STATE"] = None
    if types.has_helper("task_pt_regs"):  # since Linux 5.15; bpf_get_current_task_btf() since 5.11
        defines["HAVE_TYPED_CURRENT"] = None
    if types.has_member("task_struct", "on_cpu"):  # kernels for one processor may lack `on_cpu`
        defines["TASK_ON_CPU"] = types.offset("task_struct", "on_cpu")
    if types.has_member("sched_entity", "sched_delayed"):
        defines["TASK_SCHED_DELAYED"] = types.offset("task_struct", "se.sched_delayed")
    if types.has_member("sched_info", "last_arrival"):  # only with CONFIG_SCHED_INFO
        defines["HAVE_LAST_ARRIVAL"] = None
        defines["TASK_LAST_ARRIVAL"] = types.offset("task_struct", "sched_info.last_arrival")
        defines["TASK_SUM_EXEC"] = types.offset("task_struct", "se.sum_exec_runtime")
        defines["TASK_PREV_SUM_EXEC"] = types.offset("task_struct", "se.prev_sum_exec_runtime")
        defines["TASK_PRIO"] = types.offset("task_struct", "prio")
    # With PREEMPT_RT a mutex is an rt_mutex and has no owner of its own.
    if types.has_member("mutex", "owner") and types.has_member("rw_semaphore", "owner"):
        defines["MUTEX_OWNER"] = types.offset("mutex", "owner")
        defines["RWSEM_OWNER"] = types.offset("rw_semaphore", "owner")
    if types.has_member("rt_mutex_base", "owner"):  # since Linux 5.15 (830e6acc8a1c)
        defines["RTMUTEX_OWNER"] = types.offset("rt_mutex_base", "owner")
    if types.has_member("rw_semaphore", "osq"):  # only where writers spin for an rwsem
        defines["RWSEM_OSQ"] = types.offset("rw_semaphore", "osq")
    return defines


def _casts_of(host: Host) -> dict[str, int]:
    """Return the defines for reading structs at any address by load instructions, without a helper.

    They are empty if this host does not support that.
    """
    if not host.can_cast:
        return {}
    types = {name: host.types.struct(struct) for name, struct in STRUCTS.items()}
    return {"RDONLY_CAST": host.types.function(programs.CAST) or 0, **types}


def assemble(files: Sequence[str], defines: Mapping[str, int | None]) -> Source:
    """Join `files` of lockd/bpf below `defines`; a value of None is defined as empty."""
    parts = [f"#define {name} {'' if value is None else _number(value)}" for name, value in defines.items()]
    body = ""
    for name in files:
        text = (BPF_DIR / name).read_text()
        body += text
        parts += [f'#line 1 "{name}"', text]
    return Source("\n".join(parts), _enums(body), _constants(body))


def _number(value: int) -> str:
    """Return a number of at most 64 bits as C text.

    A negative number, or one too large for an int, becomes an unsigned one of 64 bits, in two's complement:
    -0x80000000 would be 2147483648 in C, because 0x80000000 is unsigned.
    """
    return hex(value) if 0 <= value <= LARGEST_INT else f"{value & MASK_64:#x}ULL"


def _enums(text: str) -> dict[str, tuple[str, ...]]:
    """Return the members of each `enum NAME { A, B };` in order, which are numbered from 0.

    Members are in lower case and without the prefix that all of them share. Raises ValueError if a member has
    an initialiser.
    """
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    enums: dict[str, tuple[str, ...]] = {}
    for name, body in re.findall(r"\benum\s+(\w+)\s*\{([^}]*)\}\s*;", text):
        members = tuple(member.strip() for member in body.split(",") if member.strip())
        if any("=" in member for member in members):
            raise ValueError(f"enum {name} in lockd/bpf: initialisers are not supported")
        enums[name] = _without_prefix(members)
    return enums


def _without_prefix(members: tuple[str, ...]) -> tuple[str, ...]:
    """Return the members in lower case, without the prefix that all of them share.

    KIND_PI becomes `pi`, because all members of `enum futex_kind` begin with KIND_. A member without an
    underscore, such as a number of members at the end, does not need to have the prefix.
    """
    prefixes = {member.partition("_")[0] for member in members if "_" in member}
    prefix = prefixes.pop() + "_" if len(prefixes) == 1 else ""
    return tuple(member.removeprefix(prefix).lower() for member in members)


OF_AN_ARCHITECTURE = ("NR_FUTEX", "NR_RESTART", "NR_CLONE", "NR_EPOLL", "PTHREAD_MUTEX_BYTES")
"""Beginnings of the names of macros that have other numbers on other architectures."""


def _constants(text: str) -> dict[str, int]:
    """Return every `#define NAME NUMBER`, except those that differ by architecture."""
    pairs = re.findall(r"^#define\s+(\w+)\s+\(?(-?(?:0x[0-9a-f]+|\d+))\)?\s*(?:/\*.*)?$", text, re.MULTILINE)
    return {name: int(value, 0) for name, value in pairs if not name.startswith(OF_AN_ARCHITECTURE)}
