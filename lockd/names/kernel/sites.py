"""Sorts of kernel functions, by name: locking code and tracing are not the site that takes a lock.

The site of a kernel lock is the first function in a stack that is neither locking code nor tracing, nor a
helper that takes a lock for its caller. In the stack of a thread that releases a lock, functions that wake
other threads and helpers that release a lock come before the site.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

_TAKES = r"(?:_?read|write)?(?:_?interruptible|_?killable|_?timeout|_?trylock|_?nested|_?non_owner)*"
_LOCKING = re.compile(
    r"_*(?:"
    # kernel/locking/*.c, with the names of its functions since 5.10
    r"(?:ww_)?mutex_(?:lock|unlock|trylock|spin_on_owner|optimistic_spin|add_waiter|remove_waiter)\w*"
    r"|(?:down|up)(?:_common|_" + _TAKES + r")?|downgrade_write"
    r"|rwsem_(?:down|mark|optimistic|spin|wake|can|try|set|clear)\w*|rwsem_wake"
    r"|percpu_(?:down|up)_(?:read|write)\w*|percpu_rwsem_\w+"
    r"|rt_mutex_(?!setprio|schedule|(?:pre|post)_schedule|futex_(?:pre|post))\w+|mark_wakeup_next_waiter"
    r"|task_blocks_on_rt_mutex|try_to_take_rt_mutex|remove_waiter"
    r"|rt_(?:spin|read|write)_(?:lock|unlock|trylock)\w*|rtlock_slowlock\w*|rwbase_\w+|osq_(?:lock|unlock)"
    r"|raw_(?:spin|read|write)_(?:lock|unlock|trylock)\w*"
    r"|(?:native_|pv_)?queued_(?:spin|read|write)_(?:lock|unlock)_slowpath"
    r"|raw_callee_save___pv_queued_spin_unlock\w*|resilient_(?:queued|tas)_spin_lock\w*"
    # lib/: functions for the whole kernel that take a lock along with something else
    r"|lockref_\w+|atomic_dec_and_(?:raw_)?lock\w*|refcount_dec_and_(?:mutex_)?lock\w*"
    r")"
)
_HELPERS = re.compile(
    r"_*(?:"
    r"rtnl_lock(?:_interruptible|_killable)?|genl_lock|nfnl_lock|console_lock|cpus_(?:read|write)_lock"
    r"|kernel_param_lock|lock_device_hotplug|device_pm_lock|cgroup_attach_lock|tty_lock(?:_interruptible)?"
    r"|pipe_(?:double_)?lock|mmap_(?:read|write)_lock(?:_killable|_nested)?"
    r"|lock_sock_(?:nested|fast)|folio_lruvec_lock(?:_irq|_irqsave)?|lock_task_sighand|lock_h?r?timer_base"
    r"|raw_spin_rq_lock(?:_nested|_irqsave)?|task_rq_lock|futex_q_lock|list_lru_lock(?:_irq|_irqsave)?"
    r"|pte_offset_map_lock"
    r")"
)
_RELEASING = re.compile(
    r"_*(?:"
    r"(?:ww_)?mutex_unlock\w*|up(?:_(?:read|write)\w*)?|downgrade_write|rwsem_(?:wake|downgrade_wake|mark_wake)"
    r"|percpu_up_(?:read|write)\w*"
    r")"
)
_RELEASING_HELPERS = re.compile(
    r"_*(?:"
    r"rtnl_unlock|netdev_run_todo|genl_unlock|nfnl_unlock|console_unlock|up_console_sem"
    r"|cpus_(?:read|write)_unlock|kernel_param_unlock|unlock_device_hotplug|device_pm_unlock"
    r"|cgroup_attach_unlock|tty_unlock|pipe_unlock|mmap_(?:read|write)_unlock(?:_non_owner)?"
    r"|f_unlock_pos|unlock_rename|unlock_two_\w+"
    r")"
)
_WAKING = re.compile(
    r"_*(?:try_to_wake_up|wake_up\w*|(?:default|autoremove|percpu_rwsem)_wake_function|rcuwait_wake_up)"
)
_WAKES_WRITER = "rcuwait_wake_up"
"""The function by which the last reader of a percpu rwsem wakes the writer. The rest of percpu_up_read() is
compiled into its callers."""
_TRACING = re.compile(
    r"bpf_prog_[0-9a-f]{16}(?:_\w*)?|bpf_trampoline_\d+(?:_\d+)?|bpf_dispatcher_\w+_func|bpf_trace_run\d+|bpf_get_stack\w*"
    r"|__bpf_trace_\w+|__bpf_prog_(?:enter|exit|run)\w*|__traceiter_\w+|trace_call_bpf|perf_trace_\w+|perf_call_bpf_\w+"
    r"|perf_syscall_(?:enter|exit)|trace_event_raw_event_\w+"
    r"|ftrace_(?:trampoline|caller|call|regs_caller|regs_call|stub|ops_list_func|ops_assist_func)"
    r"|arch_ftrace_ops_list_func|return_to_handler|fprobe_(?:handler|exit_handler|kprobe_handler|return|\w+_entry)"
    r"|(?:arch_)?rethook_(?:trampoline\w*|hook|try_hook)|_*kretprobe_\w*(?:trampoline|handler|func)\w*"
    r"|kprobe_(?:ftrace_handler|dispatcher|perf_func)|aggr_pre_handler|opt(?:imized_callback|_pre_handler)"
    r"|optprobe_template_\w+|kprobe_(?:opt)?insn_page"
)

_INTERRUPTS = re.compile(
    r"asm_(?:sysvec_\w+|common_interrupt|spurious_interrupt)|el[01][ht]?_(?:64_|32_)?(?:irq|fiq)"
    # With FRED (6.9, 14619d912b65) processors enter the kernel by one function for interrupts, exceptions and
    # system calls. fred_extint() is for interrupts alone. For those of devices it jumps to
    # common_interrupt().
    r"|fred_extint|common_interrupt"
)
_SCHEDULING = re.compile(r"_*(?:io_)?schedule(?:_timeout|_preempt_disabled|_hrtimeout\w*|_idle|_rtlock)?\w*")


def is_interrupt(name: str) -> bool:
    """Whether the processor enters the kernel by this function for an interrupt, such as that of a timer."""
    return _INTERRUPTS.fullmatch(name) is not None


def is_scheduling(name: str) -> bool:
    """Whether the function leaves the CPU to other threads."""
    return _SCHEDULING.fullmatch(name) is not None


def is_locking(name: str) -> bool:
    """Whether the function is part of the kernel's locks."""
    # The slow path of a spinlock has a symbol of its own in a guest of a hypervisor.
    return name == ".slowpath" or _LOCKING.fullmatch(name) is not None


def is_helper(name: str) -> bool:
    """Whether the function does nothing but take a lock for its caller."""
    return _HELPERS.fullmatch(name) is not None


def is_waking(name: str) -> bool:
    """Whether the function does nothing but wake threads."""
    return _WAKING.fullmatch(name) is not None


def is_releasing_helper(name: str) -> bool:
    """Whether the function does nothing, or next to nothing, but release a lock for its caller."""
    return _RELEASING_HELPERS.fullmatch(name) is not None


def from_release(names: Sequence[str]) -> Sequence[str]:
    """The part of a waker's stack that begins with the function that releases a lock.

    `names` are the functions of the stack, innermost first, without tracing functions. The result is empty if
    the stack does not show a release: the waker waits for a lock itself, or sends a signal, or an interrupt
    has come.
    """
    waking = list(itertools.takewhile(is_waking, names))
    below = names[len(waking) :]
    locking = list(itertools.takewhile(is_locking, below))
    is_release = bool(locking or _WAKES_WRITER in waking) and all(map(_RELEASING.fullmatch, locking))
    return below if is_release and not any(map(is_interrupt, below)) else ()


def is_tracing(name: str) -> bool:
    """Whether a function is in a stack only for tracing: on top, or further out as a trampoline."""
    return _TRACING.fullmatch(name) is not None
