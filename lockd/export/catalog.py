"""Every metric lockd exports: its full name, kind, labels and HELP text.

Users' alerts and dashboards rely on the names, kinds and labels. docs/generate.py defines the terms that
several HELP texts use (blocked time, sys time and so on) once, in docs/metrics.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["histogram", "counter", "gauge", "info"]

_SO_FAR = "A wait that has not ended counts with its time so far."
_TOP_LOCKS = 'The most contended locks have series of their own; all others are counted as "other".'
_TOP_SITES = 'The most contended locks and sites have series of their own; all others are counted as "other".'
_HOLDERS = (
    "Time for which the code named by the label holder made threads wait for the lock, in seconds, estimated"
    " from a sample of the lock's releases.",
    'The holders that made threads wait longest have series of their own; all others are counted as "other".',
)
_CAUSES = (
    "Time that threads waited for the lock, in seconds, by what the thread that held it did meanwhile (label"
    " cause), estimated from a sample of the lock's releases.",
    "Only if the program offcpu is on.",
)
_MODE_ALL = "Only in mode all (programs.kernel_locks.mode), and only for mutexes, rwsems and semaphores."
_MODE_CALLS = "Only in mode calls (programs.futex.mode)."
_LONGEST_WAITER = "The labels unit and comm are of the process whose thread has waited longest."


@dataclass(frozen=True)
class Metric:
    """One metric. `labels` are in the order of the label values in a snapshot."""

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
        "Blocked time of futex waits, in seconds.",
        "There is one observation for each wait in which the thread was switched out.",
    )
    yield metric(
        "waits_total",
        "counter",
        "kind",
        "Futex calls that asked to wait, whether the thread was blocked or not.",
        _MODE_CALLS,
    )
    yield metric(
        "wakes_total",
        "counter",
        "",
        "Futex calls that wake waiting threads, or move them to another futex (requeue).",
        _MODE_CALLS,
    )
    yield metric(
        "errors_total",
        "counter",
        "error",
        "Futex calls that failed, by the name of the error (EAGAIN, ETIMEDOUT, EINTR and so on).",
        _MODE_CALLS,
    )
    yield metric(
        "sys_seconds_total",
        "counter",
        "",
        "Time spent in futex calls less the blocked time, in seconds, estimated from a sample of the calls"
        " where there are many.",
        _MODE_CALLS,
    )
    yield metric(
        "max_blocked_us",
        "gauge",
        "kind window",
        "Blocked time of the longest futex wait in the time span named by the label window, in microseconds.",
        _SO_FAR,
    )
    yield metric(
        "max_sys_us",
        "gauge",
        "window",
        "Longest sys time (duration less blocked time) of a futex call in the time span named by the label"
        " window, in microseconds, taken from a sample of the calls where there are many.",
        _MODE_CALLS,
    )
    yield metric("waiting", "gauge", "kind", "Threads that are blocked in a futex wait now.")
    yield metric(
        "lock_blocked_seconds_total",
        "counter",
        "kind lock",
        "Blocked time of futex waits for the lock, in seconds.",
        _TOP_LOCKS,
    )
    yield metric(
        "lock_blocked_total",
        "counter",
        "kind lock",
        "Futex waits for the lock in which the thread was blocked.",
        _TOP_LOCKS,
    )
    yield metric(
        "lock_max_blocked_us",
        "gauge",
        "kind lock window",
        "Blocked time of the longest futex wait for the lock in the time span named by the label window, in"
        " microseconds.",
        _SO_FAR,
    )
    yield metric(
        "lock_waiting", "gauge", "kind lock", "Threads that are blocked on the lock now.", _TOP_LOCKS
    )
    yield metric(
        "lock_threads",
        "gauge",
        "kind lock",
        "Distinct threads that were blocked on the lock in the last minute.",
        _TOP_LOCKS,
    )
    yield metric(
        "lock_holder_seconds_total",
        "counter",
        "kind lock holder",
        *_HOLDERS,
    )
    yield metric(
        "lock_cause_seconds_total",
        "counter",
        "kind lock cause",
        *_CAUSES,
    )


def _kernel_lock() -> Iterator[Metric]:
    def metric(name: str, kind: Kind, labels: str, *text: str) -> Metric:
        return Metric(f"lockd_kernel_lock_{name}", kind, _labels(labels), " ".join(text))

    yield metric(
        "wait_seconds",
        "histogram",
        "lock_type",
        "Time that threads waited for contended kernel locks, in seconds.",
        "There is one observation for each wait, whether the thread got the lock or gave up.",
    )
    yield metric(
        "acquisitions_total",
        "counter",
        "lock_type",
        "Acquisitions of kernel locks, with or without a wait.",
        _MODE_ALL,
    )
    yield metric(
        "hold_seconds",
        "histogram",
        "lock_type",
        "Time that kernel locks were held, in seconds, with one observation for each hold that ended.",
        _MODE_ALL,
    )
    yield metric(
        "max_wait_us",
        "gauge",
        "lock_type window",
        "Longest wait for a kernel lock in the time span named by the label window, in microseconds.",
        _SO_FAR,
    )
    yield metric(
        "waiting",
        "gauge",
        "lock_type",
        "Threads that sleep now while they wait for a kernel lock. Threads that spin are not counted.",
    )
    yield metric(
        "site_wait_seconds_total",
        "counter",
        "lock_type lock site",
        "Time that threads waited for the kernel lock at the site, in seconds.",
        _TOP_SITES,
    )
    yield metric(
        "site_waits_total",
        "counter",
        "lock_type lock site",
        "Waits for the kernel lock at the site.",
        _TOP_SITES,
    )
    yield metric(
        "holder_seconds_total",
        "counter",
        "lock_type lock holder",
        *_HOLDERS,
    )
    yield metric(
        "cause_seconds_total",
        "counter",
        "lock_type lock cause",
        *_CAUSES,
    )


def _offcpu() -> Iterator[Metric]:
    def metric(name: str, kind: Kind, labels: str, *text: str) -> Metric:
        return Metric(f"lockd_offcpu_{name}", kind, _labels(labels), " ".join(text))

    yield metric(
        "blocked_seconds",
        "histogram",
        "state reason",
        "Off-CPU time of threads, from a voluntary switch-out to the wake-up, in seconds.",
        "There is one observation for each wait.",
    )
    yield metric(
        "runqueue_seconds",
        "histogram",
        "",
        "Time that threads were ready to run and waited for a CPU, in seconds.",
        "There is one observation for each such time whose beginning and end lockd saw.",
    )
    yield metric(
        "max_blocked_us",
        "gauge",
        "state reason window",
        "Longest off-CPU time of a thread in the time span named by the label window, in microseconds.",
        _SO_FAR,
    )
    yield metric(
        "waker_seconds_total",
        "counter",
        "waker",
        "Off-CPU time by the comm of the process that ended it, in seconds (`irq`: an interrupt on an idle"
        " processor; `unknown`: a wake-up that no program saw, or one by a process that ended before its name"
        " was read).",
        'The wakers with the most time have series of their own; all others are counted as "other".',
    )


def _deadlocks() -> Iterator[Metric]:
    def metric(name: str, kind: Kind, *text: str) -> Metric:
        return Metric(f"lockd_deadlocks{name}", kind, _labels(""), " ".join(text))

    yield metric(
        "",
        "gauge",
        "Rings of threads, each blocked for a second or more on a lock that the next one holds;"
        " /api/v1/deadlocks describes them.",
        _LONGEST_WAITER,
    )
    yield metric("_found_total", "counter", "Deadlocks that were found.", _LONGEST_WAITER)


def _processes() -> Iterator[Metric]:
    yield Metric(
        "lockd_go_mutex_wait_seconds_total",
        "counter",
        _labels(""),
        "Time that goroutines waited for a sync.Mutex or sync.RWMutex, in seconds, as the Go runtime of the"
        " program counts it. lockd adds what has come since it first read this total.",
    )
    yield Metric(
        "lockd_advised_processes",
        "gauge",
        _labels("advice"),
        "Processes with waits that lockd cannot see or name fully by itself."
        " The label advice says which limit applies.",
    )


def _units() -> Iterator[Metric]:
    yield Metric(
        "lockd_unit_info",
        "info",
        ("unit", "container_id", "pod_uid", "slice", "runtime"),
        "What the path of its cgroup says of each unit that has other series; always 1."
        " A label is empty where the path does not say it.",
    )


def _itself() -> Iterator[Metric]:
    def metric(name: str, kind: Kind, labels: str, text: str) -> Metric:
        return Metric(f"lockd_{name}", kind, tuple(labels.split()), text)

    yield metric(
        "build_info",
        "info",
        "version python kernel",
        "Versions of lockd, of the Python that runs it and of the kernel; always 1.",
    )
    yield metric(
        "start_time_seconds",
        "gauge",
        "",
        "Time at which counting began, in seconds since the Unix epoch."
        " A start that takes over the counts of the one before (lockd_taken_over_total) leaves it unchanged.",
    )
    yield metric(
        "hook_attached",
        "gauge",
        "program hook mechanism",
        "1 if the hook is attached by this mechanism, 0 if not, for instance because the kernel lacks it.",
    )
    yield metric(
        "program_runs_total",
        "counter",
        "program",
        "Runs of the BPF program. Absent where the kernel does not count them.",
    )
    yield metric(
        "program_run_seconds_total",
        "counter",
        "program",
        "Time that the BPF program ran, in seconds. Absent where the kernel does not measure it.",
    )
    yield metric(
        "map_entries", "gauge", "map", "Entries in the BPF map in the last window, or when it was last read."
    )
    yield metric("map_capacity", "gauge", "map", "Entries that the BPF map has room for.")
    yield metric(
        "dropped_events_total",
        "counter",
        "map reason",
        "Events that no series counts: by this number the totals are too low.",
    )
    yield metric(
        "overflow_events_total",
        "counter",
        "map",
        "Events that found no entry of their own because the map was full, or because lockd kept to totals to"
        ' save CPU time. They are not lost: series whose labels say "other" count them.',
    )
    yield metric(
        "unseen_switches_total",
        "counter",
        "",
        "Waits whose end lockd did not see, because the kernel called no BPF program when the thread returned"
        " to a CPU (some kernels do so for some threads). The wait counts when the thread is next seen, but"
        " its runqueue time is missing and its blocked time may be too long.",
    )
    yield metric("stack_misses_total", "counter", "reason", "Stacks that lockd could not record.")
    yield metric(
        "holder_samples_total",
        "counter",
        "",
        "Releases of locks that were sampled to find out which code held the lock.",
    )
    yield metric(
        "holder_samples_refused_total",
        "counter",
        "",
        "Sampled releases of locks that were thrown away, because there were too many at a time.",
    )
    yield metric(
        "holder_refused_seconds_total",
        "counter",
        "",
        "Time, in seconds, that the refused samples stood for."
        " The sum of lockd_futex_lock_holder_seconds_total and lockd_kernel_lock_holder_seconds_total is too"
        " low by it.",
    )
    yield metric(
        "holder_seconds_per_sample",
        "gauge",
        "",
        "Waited time that one sample of a release of a lock stands for at least, in seconds."
        " lockd adapts it to profile.samples_per_second.",
    )
    yield metric(
        "wait_samples_total",
        "counter",
        "",
        "Waits off the CPU that were sampled with the stacks of the thread that waited and of its waker.",
    )
    yield metric(
        "wait_samples_refused_total",
        "counter",
        "",
        "Sampled waits off the CPU that were thrown away, because there were too many at a time.",
    )
    yield metric(
        "wait_refused_seconds_total",
        "counter",
        "",
        "Time, in seconds, that the refused samples of waits off the CPU stood for.",
    )
    yield metric(
        "wait_seconds_per_sample",
        "gauge",
        "",
        "Time off the CPU that one sample of a wait stands for at least, in seconds."
        " lockd adapts it to profile.waits_per_second.",
    )
    yield metric(
        "deadlock_locks_skipped_total",
        "counter",
        "",
        "Locks that a search for deadlocks left out because there were too many."
        " They have their turn in later searches.",
    )
    yield metric(
        "ticks_total",
        "counter",
        "",
        "Rounds of the sampler that drained a window of the maps, or had none to drain yet. Rounds in which"
        " programs were still writing to the window are not counted.",
    )
    yield metric("tick_seconds", "histogram", "", "Time that one round of the sampler took, in seconds.")
    yield metric(
        "tick_late_seconds",
        "histogram",
        "",
        "Delay between the time at which a round of the sampler was due and its start, in seconds.",
    )
    yield metric(
        "series",
        "gauge",
        "family",
        "Lines of /metrics that the series of the family take. All lines of a histogram count.",
    )
    yield metric(
        "series_overflow_total",
        "counter",
        "family",
        "Label sets that got no series when they first appeared because there was no room."
        ' Until they get one, series whose labels say "other" count their events.',
    )
    yield metric(
        "series_retired_total",
        "counter",
        "family",
        "Series that were removed, because their process had ended and nothing new came, or because others"
        " needed the room. lockd_retired_value has their counts.",
    )
    yield metric(
        "retired_value",
        "gauge",
        "metric",
        "Sum of what removed series of the metric had counted. The sum over the exported series is too low"
        " by this value.",
    )
    yield metric(
        "cpu_seconds_total",
        "counter",
        "process",
        "CPU time, user and system, that a process of lockd and its children took, in seconds.",
    )
    yield metric(
        "cpu_ratio",
        "gauge",
        "part",
        "Share of the CPU time of the whole machine that a part of lockd takes."
        " The shares of the namer and the exporter are means over a minute.",
    )
    yield metric(
        "cpu_budget_ratio",
        "gauge",
        "",
        "Share of the CPU time of the whole machine that lockd may take (budget.cpu); +Inf without a limit.",
    )
    yield metric(
        "restraint_level",
        "gauge",
        "",
        "What lockd leaves out to keep to its CPU budget. 0: nothing; 1: stacks, and so new names;"
        " 2: threads and locks as well; 3: everything but totals.",
    )
    yield metric(
        "restraint_seconds_total", "counter", "level", "Time spent at each restraint level, in seconds."
    )
    yield metric(
        "resident_bytes",
        "gauge",
        "process",
        "Resident memory of a process of lockd, in bytes; 0 for the namer while nothing needs it.",
    )
    yield metric(
        "undecided_futex_calls",
        "gauge",
        "",
        "Futex waits that are not counted yet, because the name of their lock is being looked up."
        " This takes 5 s at most.",
    )
    yield metric(
        "namer_restarts_total",
        "counter",
        "",
        "Times that the namer, the process that looks up the names of locks, was lost and started again.",
    )
    yield metric(
        "namer_refused_total",
        "counter",
        "",
        "Look-ups that were refused because the process, or its user, had used up its share of the namer's"
        " time, or because a namer hangs on it. New locks of the process are called `anon`, and deadlocks in"
        " it may not be found.",
    )
    yield metric(
        "config_last_reload_successful",
        "gauge",
        "",
        "1 if the last reload found the configuration and the web configuration valid, or if there was none."
        " 0 if one of the two has an error, whose file is then not in force, or if the exporter did not"
        " answer whether the web configuration is valid.",
    )
    yield metric(
        "config_last_reload_success_timestamp_seconds",
        "gauge",
        "",
        "Time of the last successful reload, or else of the start, in seconds since the Unix epoch.",
    )
    yield metric(
        "config_keys_waiting",
        "gauge",
        "",
        "Keys of the configuration file that were changed but take effect only at a restart.",
    )
    yield metric(
        "taken_over_total",
        "counter",
        "after",
        "Starts that took over the BPF programs and the counts of the start before."
        " The label after says how that one had ended: by a clean `end` or by a `crash`.",
    )
    yield metric(
        "interrupted_drains_total",
        "counter",
        "",
        "Crashes that interrupted lockd while it drained a map."
        " Up to one window of one pair of maps may be missing from the totals for each of them.",
    )
    yield metric(
        "exporter_restarts_total",
        "counter",
        "",
        "Restarts of the exporter, the process that answers HTTP requests.",
    )


def _labels(names: str) -> tuple[str, ...]:
    return ("unit", "comm", *names.split())


CATALOG: dict[str, Metric] = {
    metric.name: metric
    for group in (_futex, _kernel_lock, _offcpu, _deadlocks, _processes, _units, _itself)
    for metric in group()
}
