"""Decide what to compile on this host, compile, attach, and say what came of it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from lockd.errors import HostError
from lockd.load.btf import KernelTypes
from lockd.load.compile import Module
from lockd.load.host import Candidate, candidates, ensure_tracefs, require_privileges, unavailable
from lockd.load.settings import LoadSettings
from lockd.load.source import Source, assemble
from lockd.manifest import Hook, Manifest

AGGREGATES = {
    "futex": ("futex", "futex_over"),
    "offcpu": ("offcpu", "offcpu_over"),
    "kernel_locks": ("kernel_locks", "kernel_locks_over"),
}
OVER_ENTRIES = 2048
"""Keys of an overflow map: every system call, state and slot that occur; more is counted as lost."""
WAITS_ENTRIES = 4096
"""Threads that wait for kernel locks at one moment."""


@dataclass(frozen=True)
class Loaded:
    """A manifest and, in its order, the descriptors of maps, functions and attachments."""

    manifest: Manifest
    fds: list[int]


def source_for(settings: LoadSettings, types: KernelTypes) -> Source:
    """The program text for this host: offsets and features from BTF, sizes from the configuration."""
    defines: dict[str, int | None] = {
        "ENTRIES": settings.entries,
        "OVER_ENTRIES": OVER_ENTRIES,
        "THREADS_ENTRIES": settings.threads,
        "STACKS_ENTRIES": settings.stacks,
        "WAITS_ENTRIES": WAITS_ENTRIES,
        "TASK_PID": types.offset("task_struct", "pid"),
        "TASK_TGID": types.offset("task_struct", "tgid"),
        "TASK_COMM": types.offset("task_struct", "comm"),
        "TASK_FLAGS": types.offset("task_struct", "flags"),
        "TASK_STACK": types.offset("task_struct", "stack"),
        "TASK_GROUP_LEADER": types.offset("task_struct", "group_leader"),
        "TASK_CGROUPS": types.offset("task_struct", "cgroups"),
        "TASK_MM": types.offset("task_struct", "mm"),
        # Was mmap_sem before c1e8d7c6a7a6 (5.8).
        "MM_MMAP_LOCK": types.offset("mm_struct", "mmap_lock"),
        "TASK_PENDING_SIGNAL": types.offset("task_struct", "pending.signal"),
        "TASK_FILES": types.offset("task_struct", "files"),
        "FILES_FDT": types.offset("files_struct", "fdt"),
        "FDTABLE_FD": types.offset("fdtable", "fd"),
        "FILE_INODE": types.offset("file", "f_inode"),
        "INODE_MODE": types.offset("inode", "i_mode"),
        "CSS_SET_DFL_CGRP": types.offset("css_set", "dfl_cgrp"),
        "CGROUP_KN": types.offset("cgroup", "kn"),
        "KERNFS_NODE_ID": types.offset("kernfs_node", "id"),
    }
    # Renamed, and made an int, by 2f064a59a11f (5.14).
    renamed = types.has_member("task_struct", "__state")
    defines["TASK_STATE"] = types.offset("task_struct", "__state" if renamed else "state")
    defines["TASK_STATE_BYTES"] = 4 if renamed else 8
    iowait = types.bit_offset("task_struct", "in_iowait")
    defines["TASK_IN_IOWAIT"], defines["TASK_IN_IOWAIT_BIT"] = divmod(iowait, 8)
    # A fourth argument, the state before a waker could change it: fa2c3254d7cf (5.18).
    if (types.tracepoint_args("sched_switch") or 0) >= 4:
        defines["HAVE_PREV_STATE"] = None
    if types.has_helper("task_pt_regs"):
        defines["HAVE_TASK_PT_REGS"] = None

    files = ["common.bpf.h", "arch.bpf.h"]
    if "futex" in settings.programs:
        defines["WITH_FUTEX"] = None
        files.append("futex.bpf.c")
    if "offcpu" in settings.programs:
        defines["WITH_OFFCPU"] = None
    if "futex" in settings.programs or "offcpu" in settings.programs:
        files.append("sched.bpf.c")
    if "kernel_locks" in settings.programs:
        files.append("kernel_locks.bpf.c")
    bounds = (
        f"#define MIN_BLOCK_NS {settings.min_block_ns}ULL\n#define MAX_BLOCK_NS {settings.max_block_ns}ULL\n"
    )
    source = assemble(files, defines)
    return Source(bounds + source.text, source.enums, source.constants)


def load(settings: LoadSettings) -> Loaded:
    """Compile and attach what this host can do of `settings.programs`.

    A hook that is missing is in the manifest with its reason; a program whose required hook
    is missing is not attached at all. Raises HostError if nothing can be.
    """
    require_privileges()
    trace = ensure_tracefs()
    types = KernelTypes()
    source = source_for(settings, types)
    module = Module(source)
    pairs = ["stacks", *(pair for program in settings.programs for pair in AGGREGATES[program])]
    for pair in pairs:
        for index in (0, 1):
            module.put_map(pair, index, f"{pair}_{index}")
    plain = ["control", "losses", "threads"]
    if "kernel_locks" in settings.programs:
        plain.append("kernel_waits")
    maps = plain + [f"{pair}_{index}" for pair in pairs for index in (0, 1)]

    started = time.monotonic_ns()
    hooks, attachments, functions = _attach_all(module, candidates(settings.programs), types, trace)
    if not attachments:
        reasons = "; ".join(f"{hook.hook}: {hook.reason}" for hook in hooks if hook.reason)
        raise HostError(f"none of the programs {', '.join(settings.programs)} can be attached: {reasons}")
    manifest = Manifest(
        source_hash=source.hash,
        attached_ns=started,
        hooks=tuple(hooks),
        maps=tuple(module.map_info(name) for name in maps),
        functions=tuple(functions),
        enums=source.enums,
        constants=source.constants,
    )
    fds = [module.map_fd(name) for name in maps]
    fds += [module.functions[name] for _, name in functions] + attachments
    return Loaded(manifest, fds)


def _attach_all(
    module: Module, wanted: list[Candidate], types: KernelTypes, trace: Path
) -> tuple[list[Hook], list[int], list[tuple[str, str]]]:
    reasons = {one: unavailable(one, types, trace) for one in wanted}
    hooks: list[Hook] = []
    attachments: list[int] = []
    functions: dict[str, str] = {}
    crippled = {one.program: one.hook for one in wanted if one.required and reasons[one]}
    for one in wanted:
        reason = reasons[one]
        if reason and one.optional:
            continue
        if not reason and one.program in crippled:
            reason = f"of no use without {crippled[one.program]}"
        if not reason:
            try:
                attachments.append(module.attach(one))
                functions.setdefault(one.function, one.program)
            except HostError as error:
                reason = str(error)
        hooks.append(Hook(one.program, one.hook, one.mechanism, not reason, reason))
    return hooks, attachments, [(program, name) for name, program in functions.items()]
