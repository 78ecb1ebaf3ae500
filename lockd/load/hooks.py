"""What the programs want to be called from: for each part of the work the ways to do it, best first."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from dataclasses import dataclass

FUTEX_CALLS = ("futex", "futex_wait", "futex_waitv", "futex_wake", "futex_requeue")
"""The last four are futex2: waitv since 5.16, the others since 6.7."""
SYSTEM_CALL = {"aarch64": "__arm64_sys_"}.get(platform.machine(), "__x64_sys_")
"""So begin the names of the functions of system calls."""
OF_KERNEL_FUNCTIONS = ("kprobe", "kretprobe", "fentry", "fexit")
"""Mechanisms."""


@dataclass(frozen=True)
class Candidate:
    """A BPF function and a place that it can be attached to."""

    program: str
    function: str
    mechanism: str
    """`tracepoint` (hook is CATEGORY:EVENT), `raw_tracepoint` (the event), `kprobe`, `kretprobe`, `fentry`,
    `fexit` (a function of the kernel), or `uprobe`, `uretprobe` (FILE+0xOFFSET)."""
    hook: str
    required: bool = True
    """Whether the program measures wrongly, not just less, without it."""
    optional: bool = False
    """Whether a kernel without it has nothing there to be measured, or has it by another name."""
    given: tuple[str, ...] = ()
    """Lock type and meaning of what is returned, of the enums lock_type and success; see GIVEN in
    lockd/bpf/include/common.bpf.h."""
    variants: bool = False
    """Whether copies that the compiler made of the function (`.isra.0` and the like) are meant as well."""
    pid: int = 0
    """Of uprobes: the process in which alone the code is to be stopped at; 0: in all."""
    one_of_many: bool = False
    """Whether it may be attached together with others (lockd/load/multi_attach.py)."""


@dataclass(frozen=True)
class Way:
    """One way of doing a part, with one mechanism as the configuration calls it."""

    mechanism: str
    hooks: tuple[Candidate, ...]
    """In the order of attachment."""
    files: tuple[str, ...]
    """Of lockd/bpf, in the order of compilation."""
    defines: tuple[str, ...] = ()
    """For all files."""


@dataclass(frozen=True)
class Part:
    """Something to be observed, and the ways to do it, the preferred one first."""

    program: str
    what: str
    ways: tuple[Way, ...]
    files: tuple[str, ...] = ()
    """Of lockd/bpf, whichever way is taken."""
    on_demand: tuple[str, ...] = ()
    """Functions that are attached nowhere: the sampler has them run."""


def parts_of(programs: tuple[str, ...], lock_mode: str) -> list[Part]:
    """Everything that the programs consist of, in the order of compilation."""
    parts = []
    if "futex" in programs:
        parts.append(_futex_calls())
    if "futex" in programs or "offcpu" in programs:
        parts.append(_switches(programs))
    if "kernel_locks" in programs:
        parts.append(_lock_waits())
        if lock_mode == "all":
            parts.append(_lock_holds())
    return parts


def hooked_functions() -> list[str]:
    """The functions of the kernel that any way may hook."""
    return functions_of(parts_of(("futex", "offcpu", "kernel_locks"), "all"))


def functions_of(parts: Iterable[Part]) -> list[str]:
    """The functions of the kernel that `parts` may hook."""
    hooks = (hook for part in parts for way in part.ways for hook in way.hooks)
    return sorted({hook.hook for hook in hooks if hook.mechanism in OF_KERNEL_FUNCTIONS})


def _futex_calls() -> Part:
    """Ends before beginnings: a call seen to end but not to begin is recognised; one seen to begin but
    not to end would look like a wait that goes on."""
    tracepoint: list[Candidate] = []
    fentry: list[Candidate] = []
    kprobe: list[Candidate] = []
    for call in (*FUTEX_CALLS, "restart_syscall"):
        restarts, newer = call == "restart_syscall", call not in ("futex", "restart_syscall")
        for function, hook in (
            ("futex_exit", "exit"),
            ("futex_restart" if restarts else "futex_enter", "enter"),
        ):
            event = f"syscalls:sys_{hook}_{call}"
            tracepoint.append(Candidate("futex", function, "tracepoint", event, call == "futex", newer))
        enter = "futex_reentered" if restarts else "futex_entered"
        name = "futex_wait_restart" if restarts else f"{SYSTEM_CALL}{call}"
        for hooks, function, mechanism in (
            (fentry, "futex_left", "fexit"),
            (fentry, enter, "fentry"),
            # See kprobe.bpf.h for this order.
            (kprobe, enter, "kprobe"),
            (kprobe, "futex_left", "kretprobe"),
        ):
            hooks.append(Candidate("futex", function, mechanism, name, call == "futex", newer))
    probes = "daemon/futex_probes.bpf.c"
    tracepoints = "include/system_calls.bpf.h", "daemon/futex_tracepoints.bpf.c"
    return Part(
        "futex",
        "calls",
        (
            Way("tracepoint", tuple(tracepoint), tracepoints),
            Way("fentry", tuple(fentry), ("include/fentry.bpf.h", probes)),
            Way("kprobe", tuple(kprobe), ("include/kprobe.bpf.h", probes)),
        ),
        ("daemon/captures.bpf.c", "daemon/hotspot.bpf.c", "daemon/futex.bpf.c"),
    )


def _switches(programs: tuple[str, ...]) -> Part:
    """Served to both programs that need it; it is the off-CPU program's if that runs."""
    program = "offcpu" if "offcpu" in programs else "futex"
    hooks = [
        Candidate(program, "on_sched_process_exec", "raw_tracepoint", "sched_process_exec", required=False),
        Candidate(program, "on_sched_switch", "raw_tracepoint", "sched_switch"),
    ]
    if "offcpu" in programs:
        waking = Candidate(program, "on_sched_waking", "raw_tracepoint", "sched_waking", required=False)
        hooks.append(waking)
    files = ("daemon/sched.bpf.c", "daemon/older_waits.bpf.c")
    return Part(program, "switches", (Way("tracepoint", tuple(hooks), ()),), files)


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
"""Lock type, what success returns, function that is called if the lock is contended."""


def _lock_waits() -> Part:
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
        kprobe += [  # see kprobe.bpf.h for this order
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


ONLY_DEBUGGED = ("_nested", "_non_owner", "_nest_lock")
"""So end functions that only kernels with CONFIG_DEBUG_LOCK_ALLOC have."""
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
"""Lock type, what success returns, functions that may sleep."""
TRYING = (
    ("mutex", "1", "mutex_trylock _mutex_trylock_nest_lock ww_mutex_trylock"),
    ("rwsem_read", "1", "down_read_trylock"),
    ("rwsem_write", "1", "down_write_trylock"),
    ("semaphore", "0", "down_trylock"),
)
"""The same of functions that never sleep."""
TAKING_BY_ANOTHER = ("mutex_lock_io", "mutex_lock_io_nested")
"""They call mutex_lock(), unless the compiler has inlined it."""
RELEASING = (
    ("mutex", "mutex_unlock"),
    ("rwsem_read", "up_read"),
    ("rwsem_write", "up_write"),
    ("semaphore", "up"),
)


def _lock_holds() -> Part:
    fentry: list[Candidate] = []
    kprobe: list[Candidate] = []
    for lock_type, name in RELEASING:
        fentry.append(_probe("lock_released", "fentry", name, (lock_type,), required=True))
        kprobe.append(_probe("lock_released", "kprobe", name, (lock_type,), required=True))
    for hooks, mechanism, after in ((fentry, "fentry", "fexit"), (kprobe, "kprobe", "kprobe")):
        # A writer becomes a reader. Of two kprobes the one that was attached later is called first.
        hooks.append(_probe("lock_taken", after, "downgrade_write", ("rwsem_read", "always")))
        hooks.append(_probe("lock_released", mechanism, "downgrade_write", ("rwsem_write",)))
        hooks.append(_probe("lock_released", mechanism, "up_read_non_owner", ("rwsem_read",)))
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
    newer = hook == "down_read_interruptible"  # 31784cff7ee0 (5.11)
    optional = newer or hook.startswith(("_mutex", "_down", "ww_", "__ww_")) or hook.endswith(ONLY_DEBUGGED)
    return Candidate("kernel_locks", function, mechanism, hook, required, optional, given, variants)
