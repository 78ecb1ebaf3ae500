"""Every metric lockd exports: its full name, kind, labels and HELP text.

The names and the definitions are the public contract (users' alerts and dashboards
are written on them); the definitions appear in the HELP texts word for word.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["histogram", "counter", "gauge", "info"]

_BLOCKED = (
    "Blocked time of a futex wait: from the thread being switched out inside a futex wait call"
    " until it runs again, summed over the call; preemption (switched out while runnable) is not"
    " blocking."
)
_SYS = "Sys time of a futex call: the call's duration minus its blocked time."
_TIMED = (
    "Timed are the first 64 calls on each processor in each 50 ms; of more, one in eight, drawn by lot, "
    "which the sum counts eightfold."
)
_OFFCPU = (
    "Off-CPU time: from a voluntary switch-out until the wake-up: the time somebody else was waited for."
)
_RUNQUEUE = "Runqueue time: from the wake-up (or from an involuntary switch-out) until running."
_KERNEL_WAIT = "Kernel-lock wait: from asking for a contended lock until getting it (or giving up)."
_KERNEL_HOLD = "Kernel-lock hold: from getting the lock until releasing it, whoever releases it."
_ALL = (
    "Only in mode all, and of mutexes, rwsems and semaphores only; filter.min_block and max_block do"
    " not apply."
)
_MAX = (
    "Max over the window W: the largest single wait that ended in the last W, or is still going"
    " on; the same for every scraper, never reset by a scrape."
)
_FUTEX_KIND = (
    "Kind: lock: a mutex-like lock; pi: a priority-inheritance lock; cond: condition variables,"
    " semaphores, thread joins, parked workers: waits for work or an event; other."
)
_DEADLOCK = (
    "Deadlock: a ring of threads, each blocked on a lock that the next of them holds, that has lasted for"
    " a second or more."
)
_TOP = 'For the most contended locks; all others are in the lock "other".'
_US = "In microseconds."
_S = "In seconds."


@dataclass(frozen=True)
class Metric:
    """One metric family; `labels` is the order in which label values travel."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str


def _futex() -> Iterator[Metric]:
    def metric(name: str, kind: Kind, labels: str, *text: str) -> Metric:
        return Metric(f"lockd_futex_{name}", kind, _labels(labels), " ".join(text))

    yield metric(
        "blocked_seconds",
        "histogram",
        "kind",
        _BLOCKED,
        "One observation per wait that blocked.",
        _S,
        _FUTEX_KIND,
    )
    yield metric("waits_total", "counter", "kind", "Futex calls that asked to wait.", _FUTEX_KIND)
    yield metric("wakes_total", "counter", "", "Futex calls that wake or requeue.")
    yield metric(
        "errors_total",
        "counter",
        "error",
        "Failed futex calls by errno name (EAGAIN, ETIMEDOUT, EINTR and so on).",
    )
    yield metric("sys_seconds_total", "counter", "", _SYS, _S, _TIMED)
    yield metric("max_blocked_us", "gauge", "kind window", _BLOCKED, _MAX, _US)
    yield metric("max_sys_us", "gauge", "window", _SYS, _MAX, _US, _TIMED)
    yield metric("waiting", "gauge", "kind", "Threads blocked in a futex wait now.", _FUTEX_KIND)
    yield metric("lock_blocked_seconds_total", "counter", "kind lock", _BLOCKED, _S, _TOP)
    yield metric("lock_blocked_total", "counter", "kind lock", "Futex waits that blocked, by lock.", _TOP)
    yield metric("lock_max_blocked_us", "gauge", "kind lock window", _BLOCKED, _MAX, _US, _TOP)
    yield metric("lock_waiting", "gauge", "kind lock", "Threads blocked on the lock now.", _TOP)
    yield metric(
        "lock_threads",
        "gauge",
        "kind lock",
        "Distinct threads that blocked on the lock in the last minute.",
        _TOP,
    )


def _kernel_lock() -> Iterator[Metric]:
    def metric(name: str, kind: Kind, labels: str, *text: str) -> Metric:
        return Metric(f"lockd_kernel_lock_{name}", kind, _labels(labels), " ".join(text))

    sites = 'For the most contended locks and call sites; all others are in "other".'
    yield metric("wait_seconds", "histogram", "lock_type", _KERNEL_WAIT, "One observation per wait.", _S)
    yield metric(
        "acquisitions_total",
        "counter",
        "lock_type",
        "Kernel locks taken, whether they were waited for or not.",
        _ALL,
    )
    yield metric(
        "hold_seconds",
        "histogram",
        "lock_type",
        _KERNEL_HOLD,
        "One observation per hold that ended.",
        _S,
        _ALL,
    )
    yield metric("max_wait_us", "gauge", "lock_type window", _KERNEL_WAIT, _MAX, _US)
    yield metric("waiting", "gauge", "lock_type", "Threads waiting for a kernel lock now.")
    yield metric("site_wait_seconds_total", "counter", "lock_type lock site", _KERNEL_WAIT, _S, sites)
    yield metric(
        "site_waits_total",
        "counter",
        "lock_type lock site",
        "Contended kernel-lock waits by lock and call site.",
        sites,
    )


def _offcpu() -> Iterator[Metric]:
    def metric(name: str, kind: Kind, labels: str, *text: str) -> Metric:
        return Metric(f"lockd_offcpu_{name}", kind, _labels(labels), " ".join(text))

    yield metric("blocked_seconds", "histogram", "state reason", _OFFCPU, "One observation per wait.", _S)
    yield metric(
        "runqueue_seconds", "histogram", "", _RUNQUEUE, "One observation each time a thread gets to run.", _S
    )
    yield metric("max_blocked_us", "gauge", "state reason window", _OFFCPU, _MAX, _US)
    yield metric(
        "waker_seconds_total",
        "counter",
        "waker",
        _OFFCPU,
        'By the comm that ended it, for the largest; all others are in "other".',
        _S,
    )


def _deadlocks() -> Iterator[Metric]:
    def metric(name: str, kind: Kind, *text: str) -> Metric:
        return Metric(f"lockd_deadlocks{name}", kind, _labels(""), " ".join(text))

    whose = "By the process of the thread that has waited longest."
    yield metric("", "gauge", "Deadlocks that exist now; /api/v1/deadlocks has them.", _DEADLOCK, whose)
    yield metric("_found_total", "counter", "Deadlocks found.", _DEADLOCK, whose)


def _processes() -> Iterator[Metric]:
    yield Metric(
        "lockd_go_mutex_wait_seconds_total",
        "counter",
        _labels(""),
        "Time that goroutines waited for a sync.Mutex or sync.RWMutex, as their program's own Go runtime"
        " counts it, from one wait in eight; since lockd first read it, which it does every ten seconds."
        " There is none of a program that it cannot be read of: with a Go before 1.20, without symbols or"
        " without DWARF. In seconds.",
    )
    yield Metric(
        "lockd_advised_processes",
        "gauge",
        _labels("advice"),
        "Processes of whose waits something has to be known, or can be done, that lockd cannot see or do by"
        " itself.",
    )


def _itself() -> Iterator[Metric]:
    def metric(name: str, kind: Kind, labels: str, text: str) -> Metric:
        return Metric(f"lockd_{name}", kind, tuple(labels.split()), text)

    yield metric(
        "build_info",
        "info",
        "version python kernel",
        "Version of lockd, of the Python that runs it and of the kernel; always 1.",
    )
    yield metric(
        "start_time_seconds",
        "gauge",
        "",
        "When counting began, in seconds since the Unix epoch: at the last start that did not go on where the"
        " one before it was (lockd_taken_over_total). All counters were zero then.",
    )
    yield metric(
        "hook_attached",
        "gauge",
        "program hook mechanism",
        "1 if the hook is attached by this mechanism, 0 if it could not be.",
    )
    yield metric(
        "program_runs_total", "counter", "program", "Runs of the BPF program (where the kernel keeps them)."
    )
    yield metric(
        "program_run_seconds_total",
        "counter",
        "program",
        "Time spent in the BPF program (where the kernel keeps it). In seconds.",
    )
    yield metric("map_entries", "gauge", "map", "Entries in the BPF map when it was last drained.")
    yield metric("map_capacity", "gauge", "map", "Entries the BPF map can hold.")
    yield metric(
        "dropped_events_total", "counter", "map reason", "Events that are in no series: what the totals lack."
    )
    yield metric(
        "overflow_events_total",
        "counter",
        "map",
        "Events of which only the totals were kept because the map was full, or as the last step of"
        ' restraint: they are in series whose labels say "other", not dropped.',
    )
    yield metric(
        "unseen_switches_total",
        "counter",
        "",
        "Returns to a CPU of which the kernel told no program (there are kernels that hide"
        " some threads): the wait is counted, with the time until the thread was next"
        " seen if its wake-up was not seen either; its runqueue time is not.",
    )
    yield metric("stack_misses_total", "counter", "reason", "Stacks that could not be kept.")
    yield metric(
        "deadlock_locks_skipped_total",
        "counter",
        "",
        "Locks whose owners were not asked for in a look for deadlocks as there were too many:"
        " they have their turn in the next one.",
    )
    yield metric(
        "ticks_total", "counter", "", "Sampling periods done: windows drained from the kernel's maps."
    )
    yield metric("tick_seconds", "histogram", "", "Time the work of one sampling period took. In seconds.")
    yield metric("tick_late_seconds", "histogram", "", "How late a sampling period began. In seconds.")
    yield metric(
        "series",
        "gauge",
        "family",
        "Series of the family, in lines of exposition (a histogram's lines all count).",
    )
    yield metric(
        "series_overflow_total",
        "counter",
        "family",
        "Label sets that got no series of their own when they were first seen, as there was no room for all;"
        ' until they have one, their events are in series whose labels say "other".',
    )
    yield metric(
        "series_retired_total",
        "counter",
        "family",
        "Series that went: with no live process and nothing new for series.idle (or for 30 s, when others"
        " needed the room), or as others are waited for more. lockd_retired_value has what they had counted.",
    )
    yield metric(
        "retired_value",
        "gauge",
        "metric",
        "What series that are not exported any more had counted, by metric: what sums over all series lack."
        " A series that comes back takes its part along.",
    )
    yield metric(
        "cpu_seconds_total",
        "counter",
        "process",
        "CPU time, user and system, of lockd's own process; of the namer with its children. In seconds.",
    )
    yield metric(
        "cpu_ratio",
        "gauge",
        "part",
        "Share of the CPU time of the whole machine that lockd takes: its BPF programs, by what they time"
        " themselves now and then, the sampler, the namer and the exporter, with what the sampler takes to"
        " answer it (of these two, who work now and then, the mean over a minute).",
    )
    yield metric("cpu_budget_ratio", "gauge", "", "What lockd may take: budget.cpu; +Inf if that is none.")
    yield metric(
        "restraint_level",
        "gauge",
        "",
        "How much lockd leaves out, as it costs more than its budget: 0 nothing; 1 stacks, and so new names;"
        " 2 threads and locks as well; 3 all but totals.",
    )
    yield metric(
        "restraint_seconds_total", "counter", "level", "Time at each level of restraint. In seconds."
    )
    yield metric("resident_bytes", "gauge", "process", "Resident memory of lockd's own process. In bytes.")
    yield metric(
        "undecided_futex_calls",
        "gauge",
        "",
        "Futex calls not counted yet, as the lock they waited for is being looked up; for 5 s at most.",
    )
    yield metric(
        "namer_restarts_total",
        "counter",
        "",
        "Times the process that looks up the names of locks had to be started again.",
    )
    yield metric(
        "namer_refused_total",
        "counter",
        "",
        "Times nothing was looked up about a process because it, or its user, had taken its share of the time"
        " for that: a new lock of it is `anon`, and a ring of waits through it may not be found.",
    )
    yield metric(
        "config_last_reload_successful",
        "gauge",
        "",
        "Whether the configuration in force is the one that was read last: 0 after a reload that found the"
        " configuration, or the web configuration, wrong; the one before is then still in force.",
    )
    yield metric(
        "config_last_reload_success_timestamp_seconds",
        "gauge",
        "",
        "When a reload last found nothing wrong, or else lockd started, since the Unix epoch. In seconds.",
    )
    yield metric(
        "config_keys_waiting",
        "gauge",
        "",
        "Keys of the configuration that a reload found changed and could not take: they take effect at a"
        " restart.",
    )
    yield metric(
        "taken_over_total",
        "counter",
        "after",
        "Starts that went on where the last one was, with its programs and counts: after: end: it was ended;"
        " crash: it was not. All counts are since the last start that did not.",
    )
    yield metric(
        "interrupted_drains_total",
        "counter",
        "",
        "Of the starts after a crash, those before which lockd was taking a sampling period out of the"
        " kernel's maps: what it had taken of one pair of maps may be in no series.",
    )
    yield metric(
        "exporter_restarts_total",
        "counter",
        "",
        "Times the process that answers HTTP had to be started again.",
    )


def _labels(names: str) -> tuple[str, ...]:
    return ("unit", "comm", *names.split())


CATALOG: dict[str, Metric] = {
    metric.name: metric
    for group in (_futex, _kernel_lock, _offcpu, _deadlocks, _processes, _itself)
    for metric in group()
}
