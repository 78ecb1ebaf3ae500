"""Decide what to compile on this host, compile or take what was kept, attach, and say what came of it."""

from __future__ import annotations

import logging
import os
import resource
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from lockd.errors import HostError
from lockd.kernel.btf import KernelTypes
from lockd.kernel.manifest import Hook, Manifest
from lockd.load.bpf_object import Module
from lockd.load.choose import Choice, choices_for
from lockd.load.compile import compile_source, what_decides
from lockd.load.compile_cache import Kept, default_directory, key_of
from lockd.load.compiled import Compiled
from lockd.load.hooks import Candidate, Way, functions_of
from lockd.load.host import Host, ensure_tracefs, require_pids_of_the_host, require_privileges
from lockd.load.multi_attach import attach_together
from lockd.load.settings import LoadSettings
from lockd.load.source import Source, assemble

log = logging.getLogger(__name__)

OVER_ENTRIES = 2048
"""Keys of an overflow map: every system call, state and slot that occur; more is counted as lost."""
OVER_KERNEL_ENTRIES = 512
"""The same for kernel locks: every type and slot."""
WAITS_ENTRIES = 4096
"""Threads that wait for kernel locks at one moment."""
CAPTURES_ENTRIES = 128
"""Locks that threads block on for the first time within one period; further ones are captured in the next.
The namer takes longer for as many than a period lasts."""
KNOWN_LOCKS_ENTRIES = 16384
"""Locks in user space that are not captured again."""
HOTSPOTS_ENTRIES = 1024
"""Java machines whose waits are looked into."""
TOLD_PROCESSES_ENTRIES = 1024
"""Processes of which the namer is not told again."""
JUST_WOKEN = 0.001
"""Seconds to sleep before clocks are compared: by when this thread was last given a CPU."""
BLOCKED_PROCESSES = "blocked_processes"
"""The ring buffer that tells the namer of processes; kernels before 5.8 have none."""

THREAD_POINTER = {"x86_64": "thread.fsbase", "aarch64": "thread.uw.tp_value"}
"""Member of struct task_struct."""


@dataclass(frozen=True)
class Loaded:
    """A manifest and, in its order, the descriptors of maps, functions and attachments."""

    manifest: Manifest
    fds: list[int]


def source_for(settings: LoadSettings, choices: list[Choice], host: Host) -> Source:
    """The program text for this host: offsets and features from BTF, sizes from the configuration."""
    types = host.types
    defines: dict[str, int | None] = {
        "ENTRIES": settings.entries,
        "OVER_ENTRIES": OVER_ENTRIES,
        "OVER_KERNEL_ENTRIES": OVER_KERNEL_ENTRIES,
        "THREADS_ENTRIES": settings.threads,
        "STACKS_ENTRIES": settings.stacks,
        "WAITS_ENTRIES": WAITS_ENTRIES,
        "HOLDING_ENTRIES": settings.entries,
        "CAPTURES_ENTRIES": CAPTURES_ENTRIES,
        "KNOWN_LOCKS_ENTRIES": KNOWN_LOCKS_ENTRIES,
        "HOTSPOTS_ENTRIES": HOTSPOTS_ENTRIES,
        "TOLD_PROCESSES_ENTRIES": TOLD_PROCESSES_ENTRIES,
        "TASK_PID": types.offset("task_struct", "pid"),
        "TASK_TGID": types.offset("task_struct", "tgid"),
        "TASK_COMM": types.offset("task_struct", "comm"),
        "TASK_FLAGS": types.offset("task_struct", "flags"),
        "TASK_STACK": types.offset("task_struct", "stack"),
        "TASK_THREAD_POINTER": types.offset("task_struct", THREAD_POINTER[os.uname().machine]),
        "TASK_GROUP_LEADER": types.offset("task_struct", "group_leader"),
        "TASK_CGROUPS": types.offset("task_struct", "cgroups"),
        "TASK_MM": types.offset("task_struct", "mm"),
        "MM_ARG_START": types.offset("mm_struct", "arg_start"),
        # Was mmap_sem before c1e8d7c6a7a6 (5.8).
        "MM_MMAP_LOCK": types.offset("mm_struct", "mmap_lock"),
        "MM_START_CODE": types.offset("mm_struct", "start_code"),
        "MM_END_CODE": types.offset("mm_struct", "end_code"),
        "TASK_PENDING_SIGNAL": types.offset("task_struct", "pending.signal"),
        "TASK_FILES": types.offset("task_struct", "files"),
        "FILES_FDT": types.offset("files_struct", "fdt"),
        "FDTABLE_FD": types.offset("fdtable", "fd"),
        "FILE_INODE": types.offset("file", "f_inode"),
        "INODE_MODE": types.offset("inode", "i_mode"),
        "INODE_FLAGS": types.offset("inode", "i_flags"),
        "CSS_SET_DFL_CGRP": types.offset("css_set", "dfl_cgrp"),
        "CGROUP_KN": types.offset("cgroup", "kn"),
        "KERNFS_NODE_ID": types.offset("kernfs_node", "id"),
    }
    # On arm64 a return address is in a register, which each function keeps at a place of its own.
    if types.has_member("return_instance", "orig_ret_vaddr") and os.uname().machine == "x86_64":
        defines["HAVE_RETURN_INSTANCES"] = None
        defines["TASK_UTASK"] = types.offset("task_struct", "utask")
        defines["UTASK_RETURN_INSTANCES"] = types.offset("uprobe_task", "return_instances")
        defines["RETURN_STACK"] = types.offset("return_instance", "stack")
        defines["RETURN_ADDRESS"] = types.offset("return_instance", "orig_ret_vaddr")
        defines["RETURN_NEXT"] = types.offset("return_instance", "next")
    # Renamed, and made an int, by 2f064a59a11f (5.14).
    renamed = types.has_member("task_struct", "__state")
    defines["TASK_STATE"] = types.offset("task_struct", "__state" if renamed else "state")
    defines["TASK_STATE_BYTES"] = 4 if renamed else 8
    for bit in ("in_iowait", "frozen"):
        name = f"TASK_{bit.upper()}"
        defines[name], defines[f"{name}_BIT"] = divmod(types.bit_offset("task_struct", bit), 8)
    # A fourth argument, the state before a waker could change it: fa2c3254d7cf (5.18).
    if (types.tracepoint_args("sched_switch") or 0) >= 4:
        defines["HAVE_PREV_STATE"] = None
    if types.has_helper("task_pt_regs"):  # 5.15; the current task has a type since 5.11
        defines["HAVE_TYPED_CURRENT"] = None
    if types.has_helper("ringbuf_output"):
        defines["HAVE_RINGBUF"] = None
        defines["PAGE_SIZE"] = resource.getpagesize()  # bcc takes it for the size of a ring

    defines["TASK_NVCSW"] = types.offset("task_struct", "nvcsw")
    defines["TASK_NIVCSW"] = types.offset("task_struct", "nivcsw")
    defines["TASK_ON_RQ"] = types.offset("task_struct", "on_rq")
    if types.has_member("task_struct", "on_cpu"):  # not with one processor
        defines["TASK_ON_CPU"] = types.offset("task_struct", "on_cpu")
    if types.has_member("sched_entity", "sched_delayed"):
        defines["TASK_SCHED_DELAYED"] = types.offset("task_struct", "se.sched_delayed")
    if types.has_member("sched_info", "last_arrival"):  # CONFIG_SCHED_INFO
        defines["HAVE_LAST_ARRIVAL"] = None
        defines["TASK_LAST_ARRIVAL"] = types.offset("task_struct", "sched_info.last_arrival")
        defines["TASK_SUM_EXEC"] = types.offset("task_struct", "se.sum_exec_runtime")
        defines["TASK_PREV_SUM_EXEC"] = types.offset("task_struct", "se.prev_sum_exec_runtime")
        defines["TASK_PRIO"] = types.offset("task_struct", "prio")

    # Not with PREEMPT_RT, where a mutex is an rt_mutex; osq only where writers spin.
    if types.has_member("mutex", "owner") and types.has_member("rw_semaphore", "owner"):
        defines["MUTEX_OWNER"] = types.offset("mutex", "owner")
        defines["RWSEM_OWNER"] = types.offset("rw_semaphore", "owner")
    if types.has_member("rt_mutex_base", "owner"):  # 830e6acc8a1c (5.15)
        defines["RTMUTEX_OWNER"] = types.offset("rt_mutex_base", "owner")
    if types.has_member("rw_semaphore", "osq"):
        defines["RWSEM_OSQ"] = types.offset("rw_semaphore", "osq")
    ways = [choice.way for choice in choices if choice.way]
    defines.update((f"WITH_{program.upper()}", None) for program in settings.programs)
    defines.update((name, None) for way in ways for name in way.defines)
    files = ["include/common.bpf.h", "include/arch.bpf.h", "include/capture.bpf.h"]
    if settings.trace:
        defines.update(settings.trace.defines)
        files += settings.trace.files
    for choice in choices:
        files += [*choice.part.files, *(choice.way.files if choice.way else ())]
    bounds = (
        f"#define MIN_BLOCK_NS {settings.min_block_ns}ULL\n#define MAX_BLOCK_NS {settings.max_block_ns}ULL\n"
    )
    source = assemble(files, defines)
    return Source(bounds + source.text, source.enums, source.constants)


def compiled(source: Source, kept: Kept) -> Compiled:
    """What `source` compiles to, on this host. Raises LockdError as compile_source() does."""
    key = key_of(what_decides(source))
    if found := kept.find(key):
        log.info("the BPF programs were compiled by an earlier start and kept in %s", kept.directory)
        return found
    started = time.monotonic()
    made = compile_source(source)
    log.info("compiled the BPF programs in %.1f s", time.monotonic() - started)
    kept.keep(key, made)
    return made


def load(settings: LoadSettings) -> Loaded:
    """Attach what this host can do of `settings.programs`.

    A hook that is missing is in the manifest with its reason; a part without any way is not
    attached at all. Raises HostError if nothing can be.
    """
    require_pids_of_the_host()
    require_privileges()
    host = Host(KernelTypes(), ensure_tracefs(), functions_of(settings.trace.parts) if settings.trace else ())
    refused: dict[Way, str] = {}
    while True:
        try:
            return _load(settings, host, refused)
        except WayRefused as error:
            refused[error.way] = str(error)


class WayRefused(Exception):
    """The kernel refuses what a way needs, though it seemed to have it."""

    def __init__(self, way: Way, reason: str) -> None:
        super().__init__(reason)
        self.way = way


def _load(settings: LoadSettings, host: Host, refused: Mapping[Way, str]) -> Loaded:
    """As load(), with the ways that are not refused. Raises WayRefused, with nothing attached."""
    choices = choices_for(settings, host, refused)
    _require_any(choices)
    source = source_for(settings, choices, host)
    module = Module(compiled(source, Kept(default_directory())), source, host)
    pairs, plain = _maps(settings, choices)
    if module.has_map(BLOCKED_PROCESSES):
        plain.append(BLOCKED_PROCESSES)
    for pair in pairs:
        for index in (0, 1):
            module.put_map(pair, index, f"{pair}_{index}")
    maps = plain + [f"{pair}_{index}" for pair in pairs for index in (0, 1)]

    attached = Attached()
    try:
        for choice in reversed(choices):  # kernel locks first: attaching takes them
            attached.add(module, choice)
    except WayRefused:
        module.close()
        raise
    if not attached.attachments:
        reasons = "; ".join(f"{hook.hook}: {hook.reason}" for hook in attached.hooks if hook.reason)
        raise HostError(f"none of the programs {', '.join(settings.programs)} can be attached: {reasons}")
    attached_ns = time.monotonic_ns()
    if "kernel_holding" in plain:
        module.set("armed", attached_ns)
    if not settings.trace and any(choice.way and choice.part.what == "switches" for choice in choices):
        _enter_older_waits(module, attached_ns)
    manifest = Manifest(
        source_hash=source.hash,
        attached_ns=attached_ns,
        chosen=tuple(choice.told for choice in choices),
        hooks=tuple(attached.hooks),
        maps=tuple(module.map_info(name) for name in maps),
        functions=tuple((program, name) for program, name, _ in attached.functions),
        enums=source.enums,
        constants=source.constants,
    )
    fds = [module.map_fd(name) for name in maps]
    fds += [fd for _, _, fd in attached.functions] + attached.attachments
    return Loaded(manifest, fds)


def _enter_older_waits(module: Module, attached_ns: int) -> None:
    """Let the programs know of the waits that none of them saw begin."""
    module.set("looked_at", attached_ns)
    time.sleep(JUST_WOKEN)
    try:
        module.run_for_tasks("enter_older_wait")
    except HostError as error:
        log.warning("waits that began before are not seen until their threads next leave the CPU: %s", error)


def _require_any(choices: list[Choice]) -> None:
    """Raise HostError if no program can do the first, essential part of its work."""
    essential: dict[str, Choice] = {}
    for choice in choices:
        essential.setdefault(choice.part.program, choice)
    if not any(choice.way for choice in essential.values()):
        reasons = "; ".join(
            f"{program}: {choice.instead_of or choice.hooks[0][1]}" for program, choice in essential.items()
        )
        raise HostError(f"none of the programs {', '.join(essential)} can run here: {reasons}")


def _maps(settings: LoadSettings, choices: list[Choice]) -> tuple[list[str], list[str]]:
    """The maps that the sampler reads: pairs, and others."""
    pairs, plain = ["stacks"], ["control", "losses", "run_times", "threads"]
    for program in settings.programs:
        pairs += [program, f"{program}_over"]
    if "futex" in settings.programs:
        pairs.append("captures")
        plain += ["known_locks", "hotspots"]
    if "kernel_locks" in settings.programs:
        plain.append("kernel_waits")
    if any(choice.way and choice.part.what == "holds" for choice in choices):
        pairs += ["kernel_holds", "kernel_holds_over"]
        plain.append("kernel_holding")
    if settings.trace:
        pairs += settings.trace.pairs
        plain += settings.trace.maps
    return pairs, plain


@dataclass
class Attached:
    """What has been attached, in order."""

    hooks: list[Hook] = field(default_factory=list)
    attachments: list[int] = field(default_factory=list)
    functions: list[tuple[str, str, int]] = field(default_factory=list)
    """(program, function, descriptor) of everything loaded."""

    def add(self, module: Module, choice: Choice) -> None:
        """Attach one part of the work, or say why not. Raises WayRefused."""
        crippled = "" if choice.way else choice.instead_of
        together = self._attach_together(module, choice)
        for hook, reason in choice.hooks:
            if reason and hook.optional:
                continue
            if not reason and crippled:
                reason = f"of no use, as the way it belongs to cannot be taken: {crippled}"
            if not reason and hook not in together:
                try:
                    self._keep(hook, module.attach(hook))
                except HostError as error:
                    reason = str(error)
                    if hook.required and choice.way:
                        raise WayRefused(choice.way, reason) from error
            self.hooks.append(Hook(hook.program, hook.hook, hook.mechanism, not reason, reason))
        for function in choice.part.on_demand if choice.way else ():
            try:
                self.functions.append((choice.part.program, function, module.load_on_demand(function)))
            except HostError as error:
                log.warning("%s", error)

    def _attach_together(self, module: Module, choice: Choice) -> set[Candidate]:
        """What can be attached at once; which ones that were."""
        hooks = [hook for hook, reason in choice.hooks if not reason] if choice.way else []
        links = attach_together(module, hooks)
        for group, link in links:
            self._keep(group[0], link)
        return {hook for group, _ in links for hook in group}

    def _keep(self, hook: Candidate, attached: tuple[int, int]) -> None:
        program, attachment = attached
        self.attachments.append(attachment)
        if program not in (fd for _, _, fd in self.functions):
            self.functions.append((hook.program, hook.function, program))
