"""The hooks of the BPF programs: for each part of the work the ways to do it, the preferred one first."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

FUTEX_CALLS = ("futex", "futex_wait", "futex_waitv", "futex_wake", "futex_requeue")
"""The futex system calls. The last four are futex2: futex_waitv since Linux 5.16, the others since 6.7."""
SYSTEM_CALL = {"aarch64": "__arm64_sys_"}.get(os.uname().machine, "__x64_sys_")
"""Prefix of the kernel functions of system calls."""
FUNCTION_MECHANISMS = ("kprobe", "kretprobe", "fentry", "fexit")
"""The mechanisms whose hooks are kernel functions."""


@dataclass(frozen=True)
class Candidate:
    """A BPF function and a hook that it can be attached to."""

    program: str
    function: str
    mechanism: str
    """`tracepoint`, `raw_tracepoint`, `kprobe`, `kretprobe`, `fentry`, `fexit`, `uprobe` or `uretprobe`."""
    hook: str
    """CATEGORY:EVENT of a tracepoint, the event of a raw tracepoint, PATH+0xOFFSET of a uprobe or uretprobe.
    For the other mechanisms it is a kernel function."""
    required: bool = True
    """Whether the program measures wrongly without this hook. Without a hook that is not required it only
    measures less."""
    optional: bool = False
    """Whether a kernel without this hook has nothing to be measured there, or has it under another name."""
    given: tuple[str, ...] = ()
    """Members of the enums lock_type and success: the type of the lock, and which return value of the hooked
    function means success (see GIVEN in lockd/bpf/include/common.bpf.h)."""
    variants: bool = False
    """Whether to hook copies that the compiler made of the function (`.isra.0` and others) as well."""
    pid: int = 0
    """For a uprobe, the only process in which it takes effect; 0 for all processes."""
    file: str = ""
    """For a uprobe, a path by which the kernel finds the file. The PATH of `hook` is only for people: it may
    lead to another file by the time the probe is attached."""
    one_of_many: bool = False
    """Whether it may be attached by one link together with others (BpfObject.attach_many())."""


@dataclass(frozen=True)
class Way:
    """A set of hooks that does one part of the work by one mechanism."""

    mechanism: str
    """As in the configuration: `tracepoint`, `fentry` or `kprobe`."""
    hooks: tuple[Candidate, ...]
    """In the order of attachment."""
    files: tuple[str, ...]
    """Files of lockd/bpf, in the order of compilation."""
    defines: tuple[str, ...] = ()
    """Names of macros that are defined, as empty, for all files."""


@dataclass(frozen=True)
class Part:
    """A part of a program's work, and the ways to do it."""

    program: str
    what: str
    """What is observed: `calls`, `switches`, `waits`, `holds` or `holders`; something else for a trace."""
    ways: tuple[Way, ...]
    """The preferred way comes first."""
    files: tuple[str, ...] = ()
    """Files of lockd/bpf that are compiled for every way, before the way's own. They are compiled even if
    this host has no way: the sampler reads the maps in them."""
    on_demand: tuple[str, ...] = ()
    """BPF functions that are attached to nothing. They are loaded, and the sampler runs them."""


def parts_of(
    programs: tuple[str, ...],
    lock_mode: str,
    futex_mode: str,
    has_holders: bool = True,
    has_wait_samples: bool = True,
) -> list[Part]:
    """Return the parts of the programs' work in these modes, in the order of compilation.

    `has_holders` is whether the holders of locks are sampled, `has_wait_samples` whether waits off the CPU
    are.
    """
    parts = []
    if "futex" in programs and futex_mode == "calls":
        parts.append(_futex_calls())
    if "futex" in programs or "offcpu" in programs:
        parts.append(_switches(programs, futex_mode, has_holders, has_wait_samples))
    elif has_holders and "kernel_locks" in programs:
        parts.append(_lock_holders())
    if "kernel_locks" in programs:
        parts.append(_lock_waits())
        if lock_mode == "all":
            parts.append(_lock_holds())
    return parts


def hooked_functions() -> list[str]:
    """Return the names of the kernel functions that any way of the daemon may hook."""
    return functions_of(parts_of(("futex", "offcpu", "kernel_locks"), "all", "calls"))


def functions_of(parts: Iterable[Part]) -> list[str]:
    """Return the sorted names of the kernel functions that `parts` may hook."""
    hooks = (hook for part in parts for way in part.ways for hook in way.hooks)
    return sorted({hook.hook for hook in hooks if hook.mechanism in FUNCTION_MECHANISMS})


FUTEX_FILES = ("daemon/captures.bpf.c", "daemon/hotspot.bpf.c", "daemon/futex.bpf.c")
"""Files of the futex program in both modes."""


def _futex_calls() -> Part:
    """Return the part that sees futex calls.

    Except with kprobes, hooks at the end of a call are attached before those at its beginning. A call whose
    end alone is seen is recognised as such. A call whose beginning alone is seen would look like a wait that
    has not ended.

    The file with the code for calls, and the macro FUTEX_CALLS, belong to the ways and not to the part. If
    this host has no way, no call is seen. The code for switches, compiled without the macro, then does not
    take a wait that began before lockd for a call that goes on.
    """
    tracepoint: list[Candidate] = []
    fentry: list[Candidate] = []
    kprobe: list[Candidate] = []
    for call in (*FUTEX_CALLS, "restart_syscall"):
        is_restart, is_newer = call == "restart_syscall", call not in ("futex", "restart_syscall")
        for function, hook in (
            ("futex_exit", "exit"),
            ("futex_restart" if is_restart else "futex_enter", "enter"),
        ):
            event = f"syscalls:sys_{hook}_{call}"
            tracepoint.append(Candidate("futex", function, "tracepoint", event, call == "futex", is_newer))
        enter = "futex_reentered" if is_restart else "futex_entered"
        name = "futex_wait_restart" if is_restart else f"{SYSTEM_CALL}{call}"
        for hooks, function, mechanism in (
            (fentry, "futex_left", "fexit"),
            (fentry, enter, "fentry"),
            # kprobe.bpf.h explains the order of kprobes.
            (kprobe, enter, "kprobe"),
            (kprobe, "futex_left", "kretprobe"),
        ):
            hooks.append(Candidate("futex", function, mechanism, name, call == "futex", is_newer))
    calls, probes = "daemon/futex_calls.bpf.c", "daemon/futex_probes.bpf.c"
    tracepoints = calls, "include/system_calls.bpf.h", "daemon/futex_tracepoints.bpf.c"
    return Part(
        "futex",
        "calls",
        (
            Way("tracepoint", tuple(tracepoint), tracepoints, ("FUTEX_CALLS",)),
            Way("fentry", tuple(fentry), (calls, "include/fentry.bpf.h", probes), ("FUTEX_CALLS",)),
            Way("kprobe", tuple(kprobe), (calls, "include/kprobe.bpf.h", probes), ("FUTEX_CALLS",)),
        ),
        FUTEX_FILES,
    )


def _switches(programs: tuple[str, ...], futex_mode: str, has_holders: bool, has_wait_samples: bool) -> Part:
    """Return the part that sees context switches, which `futex` and `offcpu` share.

    It belongs to `offcpu` if that program runs, else to `futex`. In mode blocked it sees futex waits too.
    With `has_holders` it also sees who ends the waits for locks. With `has_wait_samples` it samples waits.
    """
    program = "offcpu" if "offcpu" in programs else "futex"
    hooks = [
        Candidate(program, f"on_{EXEC}", "raw_tracepoint", EXEC, required=False),
        Candidate(program, "on_sched_switch", "raw_tracepoint", "sched_switch"),
    ]
    has_holders = has_holders and ("futex" in programs or "kernel_locks" in programs)
    if "offcpu" in programs or has_holders:
        waking = Candidate(program, "on_sched_waking", "raw_tracepoint", "sched_waking", required=False)
        hooks.append(waking)
    files: tuple[str, ...] = ("daemon/sched.bpf.c", "daemon/older_waits.bpf.c")
    defines: tuple[str, ...] = ()
    if has_holders:
        of_releases, defines = _releases(programs)
        files = (*of_releases, *files)
    if has_wait_samples and "offcpu" in programs:
        files = ("daemon/wait_samples.bpf.c", *files)
        defines = (*defines, "WITH_WAIT_SAMPLES")
    if {"WITH_USER_HOLDERS", "WITH_WAIT_SAMPLES"}.intersection(defines):
        files = ("daemon/cpython.bpf.c", *files)
    if "futex" in programs and futex_mode == "blocked":
        files = (*FUTEX_FILES, "daemon/futex_waits.bpf.c", *files)
        defines = ("FUTEX_WAITS", *defines)
    return Part(program, "switches", (Way("tracepoint", tuple(hooks), (), defines),), files)


def _releases(programs: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the files and the macros with which the programs at switches and wake-ups find out who releases
    locks."""
    files, defines = ["daemon/lock_causes.bpf.c", "daemon/lock_queues.bpf.c"], ["WITH_HOLDERS"]
    if "offcpu" in programs:  # only the program `offcpu` sees what holders do
        defines.append("WITH_CAUSES")
    if "futex" in programs:
        files.append("daemon/user_releases.bpf.c")
        defines.append("WITH_USER_HOLDERS")
    if "kernel_locks" in programs:
        files.append("daemon/kernel_releases.bpf.c")
        defines.append("WITH_KERNEL_HOLDERS")
    return tuple(files), tuple(defines)


EXEC = "sched_process_exec"
"""The tracepoint of execve(). A thread that is not the main thread takes over the main thread's id there, so
the entry of the BPF programs' maps under its old id is of no use any more."""
HOLDERS = "holders"
"""The value of Part.what for the part that is of no use without the other parts of its program."""


def _lock_holders() -> Part:
    """Return the part that sees who ends waits for kernel locks if neither `futex` nor `offcpu` runs.

    It follows only threads that wait for a kernel lock.
    """
    files, defines = _releases(("kernel_locks",))
    hooks = tuple(
        Candidate("kernel_locks", f"on_{event}", "raw_tracepoint", event, required=event != EXEC)
        for event in (EXEC, "sched_switch", "sched_waking")
    )
    way = Way("tracepoint", hooks, (), (*defines, "ONLY_KERNEL_LOCKS"))
    return Part("kernel_locks", HOLDERS, (way,), (*files, "daemon/sched.bpf.c"))


SLOW_PATHS = (
    ("mutex", "always", "__mutex_lock_slowpath"),
    ("mutex", "0", "__mutex_lock_interruptible_slowpath"),
    ("mutex", "0", "__mutex_lock_killable_slowpath"),
    ("mutex", "0", "__ww_mutex_lock_slowpath"),
    ("mutex", "0", "__ww_mutex_lock_interruptible_slowpath"),
    ("rwsem_read", "pointer", "rwsem_down_read_slowpath"),
    ("rwsem_write", "pointer", "rwsem_down_write_slowpath"),
    ("semaphore", "always", "__down"),
    ("semaphore", "0", "__down_interruptible"),
    ("semaphore", "0", "__down_killable"),
    ("semaphore", "0", "__down_timeout"),
)
"""Lock type, return value for success (enum success), and function that is called if the lock is
contended."""


def _lock_waits() -> Part:
    """Return the part that sees waits for contended kernel locks."""
    tracepoint = Way(
        "tracepoint",
        (
            Candidate("kernel_locks", "on_contention_end", "raw_tracepoint", "contention_end"),
            Candidate("kernel_locks", "on_contention_begin", "raw_tracepoint", "contention_begin"),
        ),
        ("daemon/kernel_lock_tracepoints.bpf.c",),
    )
    fentry: list[Candidate] = []
    kprobe: list[Candidate] = []
    for lock_type, success, name in SLOW_PATHS:
        given = (lock_type, success)
        fentry += [
            _probe("slow_path_left", "fexit", name, given, variants=True),
            _probe("slow_path_entered", "fentry", name, given, variants=True),
        ]
        kprobe += [  # kprobe.bpf.h explains this order
            _probe("slow_path_entered", "kprobe", name, given, variants=True),
            _probe("slow_path_left", "kretprobe", name, given, variants=True),
        ]
    slow_paths = "daemon/kernel_lock_slow_paths.bpf.c"
    return Part(
        "kernel_locks",
        "waits",
        (
            tracepoint,
            Way("fentry", tuple(fentry), ("include/fentry.bpf.h", slow_paths)),
            Way("kprobe", tuple(kprobe), ("include/kprobe.bpf.h", slow_paths)),
        ),
        ("daemon/kernel_locks.bpf.c", "daemon/lock_owner.bpf.c"),
        ("read_owner",),
    )


ONLY_DEBUG = ("_nested", "_non_owner", "_nest_lock")
"""Suffixes of functions that only kernels with CONFIG_DEBUG_LOCK_ALLOC have."""
TAKING = (
    ("mutex", "always", "mutex_lock mutex_lock_nested _mutex_lock_nest_lock"),
    ("mutex", "0", "mutex_lock_interruptible mutex_lock_interruptible_nested"),
    ("mutex", "0", "mutex_lock_killable mutex_lock_killable_nested _mutex_lock_killable"),
    ("mutex", "0", "ww_mutex_lock ww_mutex_lock_interruptible"),
    ("rwsem_read", "always", "down_read down_read_nested down_read_non_owner"),
    ("rwsem_read", "0", "down_read_interruptible down_read_killable down_read_killable_nested"),
    ("rwsem_write", "always", "down_write down_write_nested _down_write_nest_lock"),
    ("rwsem_write", "0", "down_write_killable down_write_killable_nested"),
    ("semaphore", "always", "down"),
    ("semaphore", "0", "down_interruptible down_killable down_timeout"),
)
"""Lock type, return value for success (enum success), and functions that take the lock and may sleep."""
TRYING = (
    ("mutex", "1", "mutex_trylock _mutex_trylock_nest_lock ww_mutex_trylock"),
    ("rwsem_read", "1", "down_read_trylock"),
    ("rwsem_write", "1", "down_write_trylock"),
    ("semaphore", "0", "down_trylock"),
)
"""Lock type, return value for success (enum success), and functions that try to take the lock and never
sleep."""
TAKING_BY_ANOTHER = ("mutex_lock_io", "mutex_lock_io_nested")
"""Functions that call mutex_lock() to take a mutex. If the compiler has inlined it, that call is not seen."""
RELEASING = (
    ("mutex", "mutex_unlock"),
    ("rwsem_read", "up_read"),
    ("rwsem_write", "up_write"),
    ("semaphore", "up"),
)
"""Lock type, and function that releases the lock."""


def _lock_holds() -> Part:
    """Return the part that sees acquisitions and releases of the kernel's mutexes, rwsems and semaphores."""
    fentry: list[Candidate] = []
    kprobe: list[Candidate] = []
    for lock_type, name in RELEASING:
        fentry.append(_probe("lock_released", "fentry", name, (lock_type,), required=True))
        kprobe.append(_probe("lock_released", "kprobe", name, (lock_type,), required=True))
    for hooks, mechanism, after in ((fentry, "fentry", "fexit"), (kprobe, "kprobe", "kprobe")):
        # downgrade_write() makes a writer a reader, so the release must be seen before the acquisition. Of
        # two kprobes on one function, the kernel first calls the one that was attached last.
        hooks.append(_probe("lock_taken", after, "downgrade_write", ("rwsem_read", "always")))
        hooks.append(_probe("lock_released", mechanism, "downgrade_write", ("rwsem_write",)))
        hooks.append(_probe("lock_released", mechanism, "up_read_non_owner", ("rwsem_read",)))
        # Compilers inline mutex_unlock() in ww_mutex_unlock(). In a kernel in which it is called instead,
        # every release is seen twice: the second one counts as one of a lock whose acquisition was not seen.
        hooks.append(_probe("lock_released", mechanism, "ww_mutex_unlock", ("mutex",)))
    for lock_type, success, names in (*TAKING, *TRYING):
        fentry += [_probe("lock_taken", "fexit", name, (lock_type, success)) for name in names.split()]
    for lock_type, _, names in TAKING:
        kprobe += [_probe("lock_asked", "kprobe", name, (lock_type,)) for name in names.split()]
    for lock_type, success, names in TRYING:
        for name in names.split():
            kprobe.append(_probe("lock_tried_for", "kprobe", name, (lock_type,)))
            kprobe.append(_probe("lock_tried", "kretprobe", name, (lock_type, success)))
    for name in TAKING_BY_ANOTHER:
        fentry.append(_probe("lock_taken_if_asked", "fexit", name, ("mutex",)))
        fentry.append(_probe("lock_asked", "fentry", name, ("mutex",)))
        kprobe.append(_probe("lock_asked", "kprobe", name, ("mutex",)))
    kprobe.append(_probe("lock_spun_for", "kprobe", "osq_unlock", ()))
    holds = "daemon/kernel_holds.bpf.c"
    return Part(
        "kernel_locks",
        "holds",
        (
            Way("fentry", tuple(fentry), ("include/fentry.bpf.h", holds), ("WITH_HOLDS",)),
            Way("kprobe", tuple(kprobe), ("include/kprobe.bpf.h", holds), ("WITH_HOLDS", "WITH_ASKED_HOLDS")),
        ),
    )


def _probe(
    function: str,
    mechanism: str,
    hook: str,
    given: tuple[str, ...],
    required: bool = False,
    variants: bool = False,
) -> Candidate:
    is_newer = hook == "down_read_interruptible"  # since Linux 5.11 (31784cff7ee0)
    is_special = hook.startswith(("_mutex", "_down", "ww_", "__ww_")) or hook.endswith(ONLY_DEBUG)
    optional = is_newer or is_special
    return Candidate("kernel_locks", function, mechanism, hook, required, optional, given, variants)
