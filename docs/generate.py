"""Writes docs/metrics.md from the catalog of metrics and the lists of label values.

Run `/usr/bin/python3 -m docs.generate > docs/metrics.md` after a change to them. A test compares the file
with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lockd.advice import ADVICE
from lockd.export.catalog import CATALOG, Metric
from lockd.load.source import assemble
from lockd.names.labels.reasons import REASONS
from lockd.sample.locks.releases import (
    LOCK,
    NO_RELEASE,
    OWNER_ENDED,
    RUNNING,
    RUNQUEUE,
    UNKNOWN_CAUSE,
    UNKNOWN_HOLDER,
)
from lockd.sample.series.limits import SHARES
from lockd.sample.series.series import OTHER

HEAD = """\
# Metrics

<!-- Made by docs/generate.py from lockd/export/catalog.py; change it there. -->

Every metric about the host has the labels `unit` and `comm`, and those in the column *labels*. `unit` is
the systemd unit or container of the thread's cgroup ([units.md](units.md)). It is `kernel` for kernel
threads and empty if it is not known. `comm` is the name of the process: the name of its main thread, not of
the thread that waits. Threads of the kernel that form a pool, or of which each CPU has one, share a name:
`kworker`, `ksoftirqd`. Names that end in `_us` are in microseconds; all others are in base units.

Totals are exact. For each counter, the sum over all label sets and `lockd_retired_value` is what happened,
less what `lockd_dropped_events_total` counts. Some counters are estimates instead:

- `lockd_futex_sys_seconds_total`, from a sample of the calls where there are many of them;
- the seconds by holder and by cause of locks (`lockd_futex_lock_holder_seconds_total`,
  `lockd_futex_lock_cause_seconds_total`, and the same for kernel locks), from a sample of the releases;
- `lockd_go_mutex_wait_seconds_total`, from the sample that the Go runtime takes.

`/metrics` never has more lines than `series.max` (10,000). Deadlocks and advised processes are not included
in this: they have 305 lines at most. An event whose label set has no series counts in the series whose name
labels are `other`. An event that finds no room in a map of the kernel (`lockd_overflow_events_total`) counts
there too. Its process is not known, so no filter applies to it.

## Definitions

The texts of the metrics use these terms.
"""
TERMS = {
    "blocked time of a futex wait": "from the moment at which the thread is switched out inside a futex"
    " wait call until it runs again; in mode `calls` the sum of these times over the call. Preemption (the"
    " thread is switched out while it could run) is not blocking",
    "mode `blocked`, mode `calls`": "`programs.futex.mode` in the configuration: whether lockd counts the"
    " futex waits in which a thread is blocked, or every futex call ([which mode gives what](#futex-modes))",
    "sys time of a futex call": "the duration of the call less its blocked time. On each processor, the"
    " first 64 calls of each window (50 ms on a busy host, up to a second on a quiet one) are timed. Of"
    " further calls one in eight is timed, chosen at random, and counts eight times in the sum",
    "off-CPU time": "from a voluntary switch-out until the wake-up: the time that the thread waited for"
    " an event",
    "runqueue time": "from the wake-up, or from an involuntary switch-out, until the thread runs",
    "kernel-lock wait": "from asking for a contended lock until the thread gets it or gives up",
    "kernel-lock hold": "from getting the lock until its release, whichever thread releases it",
    "mode `all`": "`programs.kernel_locks.mode: all` in the configuration. Every acquisition of a mutex,"
    " rwsem or semaphore is then counted, and its hold measured. `filter.min_block` and `filter.max_block`"
    " are about waits and do not apply",
    "maximum over a `window`": "the longest single wait that ended within this time span (`1m`, `5m`), or"
    " has not ended yet. It may stay for a thirtieth of that time longer, and for ten seconds more where few"
    " threads wait. It is the same for every scraper and never reset by a scrape",
    "kind of a futex wait": "for what sort of lock or event the thread waits"
    " ([values](#kind-of-a-futex-wait)). It follows from the futex operation and the value waited for, or"
    " from the stack of a waiting thread where that says more. Alert on `lock` and `pi`",
    "site": "the code that waits for a lock: the first function outside of the code that implements locks",
    "holder": "the code that released a lock for which threads waited: the first function outside of the"
    " code that implements locks. It is charged with the time that threads have waited since the previous"
    " release ([holders.md](holders.md))",
    "cause": "what the thread that held a lock did while others waited for it: it ran, was ready to run"
    " without a CPU, or was blocked for a reason of its own ([values](#cause-of-a-wait-for-a-lock),"
    " [holders.md](holders.md#what-the-holder-did))",
    "deadlock": "a ring of threads, each blocked on a lock that the next one holds, that has lasted for a"
    " second or more ([deadlocks.md](deadlocks.md))",
    "restraint level": "what lockd leaves out to keep to its CPU budget ([restraint.md](restraint.md))",
}
NOTES = """\
Further notes on single metrics:

- `lockd_unseen_switches_total`: some kernels call no BPF program for some threads. If lockd sees neither
  the wake-up nor the return to a CPU, the blocked time lasts until the thread is next seen. If it sees the
  wake-up, the blocked time is exact. The runqueue time is not counted in either case.
- `lockd_go_mutex_wait_seconds_total`: the Go runtime measures one wait in eight. lockd reads its total
  every ten seconds. There is no series for a program whose total cannot be read: one built with a Go before
  1.20, without symbols or without DWARF. On a host with more than 500 Go programs, those with the lowest
  process ids are read.
- `lockd_cpu_ratio`: the part `programs` is what the BPF programs take, by their own measurements in a
  sample of their runs. The time that the sampler takes to answer the exporter belongs to the part
  `exporter`.
- `lockd_futex_lock_holder_seconds_total` and `lockd_kernel_lock_holder_seconds_total`:
  [holders.md](holders.md) says what the estimates mean, how exact they are, and why their sums are a little
  below the waited time. They, the same by cause, and the `lockd_holder_` metrics are absent with
  `profile.samples_per_second: 0`. The `lockd_wait_` metrics are absent with `profile.waits_per_second: 0` and
  without the program `offcpu`.
- `lockd_advised_processes`: the hundred largest numbers have lines of their own; the others count
  under `unit` and `comm` `other`.
- `lockd_unit_info`: [kubernetes.md](kubernetes.md) says what the labels contain, and how to find the pod of a
  unit with them. If there is not room for all units, pods come first, then other containers.
- `lockd_undecided_futex_calls`: these waits are held back so that they count under the right lock and kind.
- `lockd_series_retired_total`: a series is removed when its process is gone and nothing new has come for
  `series.idle` (for 30 s if others need the room), or when other locks are more contended.
- `lockd_retired_value`: when a series comes back, its old value is subtracted from this one.
- `lockd_cpu_seconds_total`: the value `namer` includes the namer's children.
- `lockd_taken_over_total`: the counters began at zero at the last start that took no counts over. If it took
  over the programs all the same, [a few about lockd itself](processes.md#from-one-start-to-the-next) went on.

## Which label sets have series

- **As long as there is room, every label set has a series.** The last quarter of the room is kept for names
  (`unit`, `comm`) that have had a process for 20 s, whatever the process was doing. Each metric family has
  a share of the room that no other family can take. Room that belongs to no share goes to the families that
  need more.
- **When room is short, names with living processes come first.** Series of names that have no process any
  more are removed first, beginning with the smallest and oldest; then those of names that have had a
  process only for a short time. A service has its series within a minute. Processes of a unit that live
  too briefly for series of their own count together in one series of the unit, with `comm` `other`. If
  the unit does not last either, `unit` is `other` too.
- **Locks have series while they are among the most contended**: `series.top_locks` locks of user space, and
  as many call sites of kernel locks. The measure is blocked time, which counts half after a minute. No wait
  counts for more than 87 s, however long it is. One for a lock of user space counts while it goes on too.
  Locks of the kinds `lock` and `pi` come before the others. Up to half of the places are reserved for the
  two most contended locks of each unit, so that one service does not take all. The order is examined every
  10 s. A lock takes another's place only if its threads have waited twice as long, and for 5 ms at least.
- **A series that is removed** shows its last numbers for 30 s. Events of that time count in the series of
  its unit or in `other`, and its maxima are there afterwards. A Prometheus that scrapes less often than every
  30 s may miss the last change.
  `lockd_series_retired_total` counts removed series, and `lockd_retired_value` has what they had counted.
- **A series that comes back** goes on from its old value, as a counter should. lockd remembers the last
  1,000 removed series of each family. So `rate()` and `increase()` see no reset, and give exactly what was
  counted in this series; events from the time in which it was gone are in `other`. If the series began at 0
  instead, a value above the old one would look like an ordinary increase, and `increase()` would miss the
  part below the old value. For a job that does the same amount of work every time, that part is everything.
  A series that lockd no longer remembers begins at 0, as after a restart.
"""

MODES_HEAD = """\
## Futex modes

`programs.futex.mode` in the configuration says what is counted of futexes. What a mode does not count is
absent from `/metrics`, never zero. `lockd trace futex` counts every call, whatever the daemon's mode is.

| | mode `blocked`, the default | mode `calls` |
|---|---|---|
"""
MODES = {
    "what lockd is attached to": (
        "context switches",
        "context switches, and the futex system calls",
    ),
    "what takes longer": (
        "each context switch",
        "each context switch and each futex call; by tracepoints every other system call too, a little",
    ),
    "waits that blocked (`lockd_futex_blocked_seconds`), their maxima, and threads that wait now": (
        "yes",
        "yes",
    ),
    "kinds and names of locks, sites, holders, deadlocks, `lockd top`, `/api/v1`, profiles": ("yes", "yes"),
    "waits that did not block": ("no", "in `lockd_futex_waits_total`, with those that did"),
    "wakes and errors": ("no", "`lockd_futex_wakes_total`, `lockd_futex_errors_total`"),
    "sys time": ("no", "`lockd_futex_sys_seconds_total`, `lockd_futex_max_sys_us`"),
    "a deadlock that the kernel refuses to close (EDEADLK for a PI mutex)": (
        "not found: the refused thread counts as one that waits",
        "found",
    ),
    "a call that sleeps twice, as its first wake-up was not meant for it, or a real-time thread was given"
    " the PI mutex instead": ("two waits, which together have the time of the call", "one wait"),
    "a page fault, or a lock of the kernel, that a futex call waits for": (
        "time off the CPU",
        "time off the CPU, and blocked time of the call",
    ),
    "waits of 32-bit programs": ("yes, but locks have no names", "no"),
    "waits through io_uring": ("no", "no"),
}

GROUPS = {
    "lockd_futex_": (
        "Futex waits: locks, condition variables and all other waits in user space",
        True,
    ),
    "lockd_kernel_lock_": ("Kernel locks", True),
    "lockd_offcpu_": ("Threads off the CPU", True),
    "lockd_deadlocks": ("Deadlocks", True),
    "lockd_go_": ("Go", True),
    "lockd_advised_": ("Processes with limits to what lockd can see", True),
    "lockd_unit_": ("Units", False),
    "lockd_": ("lockd itself", False),
}
"""The title of each group of metrics, and whether they have the base labels, by the prefix of their names.

A metric belongs to the first prefix that fits.
"""
BASE = ("unit", "comm")

KINDS = {
    "lock": "a lock that one thread holds while others wait, such as a mutex or a rwlock",
    "pi": "a priority-inheritance lock",
    "cond": "a wait for work or an event: a condition variable, a semaphore, a thread join, a parked worker",
    "other": "futex_waitv, which waits for any of several futexes",
}
STATES = {
    "interruptible": "asleep until an event or a signal comes",
    "uninterruptible": "asleep until an event comes, mostly for a short time: I/O, a kernel lock",
    "other": "stopped, traced, frozen, or idle in the way of kernel threads",
}
LOCK_TYPES = {
    "mutex": "struct mutex, also ww_mutex",
    "rwsem_read": "a reader of struct rw_semaphore",
    "rwsem_write": "a writer of struct rw_semaphore",
    "semaphore": "struct semaphore",
    "rtmutex": "struct rt_mutex; on a PREEMPT_RT kernel most other locks are built on it",
    "percpu_rwsem_read": "a reader of struct percpu_rw_semaphore",
    "percpu_rwsem_write": "a writer of struct percpu_rw_semaphore",
    "spinlock": "a queued spinlock, whose waiter spins",
    "rwlock_read": "a reader of a queued rwlock, whose waiter spins",
    "rwlock_write": "a writer of a queued rwlock, whose waiter spins",
}
DROPS = {
    "threads_full": "no room for the thread in the table of threads: raise `maps.threads`",
    "full": "no room in the map, nor in its overflow map: raise `maps.entries`",
    "waits_full": "more waits for kernel locks at the same moment than the programs can follow",
    "holding_full": "more kernel locks held or asked for at the same moment than the programs can follow",
    "release_missed": "a thread takes a lock that it already holds: the end of the first hold was not seen",
    "taken_unseen": "a lock was released whose acquisition was not seen: acquisition and hold are missing; or"
    " a thread that was not the first one of its process released a lock that it had taken before its exec,"
    " which gave it another id: the hold is missing",
    "too_nested": "a thread holds the same lock more than four times: the oldest of these holds is missing",
    "return_missed": "the kernel did not report the return of a function, because too many threads were in"
    " it at a time (kprobes only)",
    "holder_gone": "a thread ended without releasing its lock, or an exec gave it another id before it did:"
    " the hold will never end (checked after a minute)",
    "recursion": "the kernel skipped a BPF program, because it had interrupted or preempted another one, or"
    " a call on a map, on the same CPU (counted since Linux 5.12 for fentry, since 6.7 for tracepoints and"
    " kprobes)",
}
STACK_MISSES = {
    "full": "more stacks in one window than there is room for: raise `maps.stacks`",
    "unreadable": "the kernel could not walk the stack",
    "captures_full": "threads blocked on more new locks in one window than there is room for; the lock is"
    " captured when a thread next blocks on it",
    "refused": "too many questions wait for the namer; the lock is captured again when a thread next blocks"
    " on it. Until then the kind of its waits follows from the arguments of their calls, as with"
    " `captures_full`",
}
HOLDERS = {
    NO_RELEASE: "no release was seen to end the wait: a timeout or a signal did, for instance",
    OWNER_ENDED: "(user-space locks) the thread that held the lock ended, and the kernel released its robust"
    " lock",
    UNKNOWN_HOLDER: "a thread released the lock, but no function on its stack could be named",
    OTHER: "holders without a series of their own",
}
CAUSES = {
    RUNNING: "the holder was on a CPU: its code takes that long",
    RUNQUEUE: "the holder was ready to run and had no CPU: the host is busy, or the limit of its cgroup"
    " (`cpu.max`) stopped it",
    LOCK: "the holder waited for another lock itself, of a program or of the kernel",
    UNKNOWN_CAUSE: "it is not known which thread held the lock, or no thread released it",
    "any other": "the `reason` why the holder was off the CPU, as below: `disk`, `sleep`, `socket` and so on;"
    " where the lock is `other` as well, `other` is whatever holders did whose label sets have no series",
}
PROCESSES = {
    "sampler": "drains the maps and counts",
    "namer": "looks up the names of locks",
    "exporter": "answers HTTP requests",
}
FAMILIES = {
    "futex": "futex waits by process and kind",
    "futex_process": "wakes and sys time by process, in mode `calls`",
    "futex_error": "errors by process, in mode `calls`",
    "futex_lock": "futex waits by lock",
    "futex_lock_holder": "the time that threads waited for a user-space lock, by the code that held it",
    "futex_lock_cause": "the same time, by what the holder did meanwhile",
    "offcpu": "off-CPU time by process, state and reason",
    "offcpu_runqueue": "runqueue time by process",
    "offcpu_waker": "off-CPU time by process and waker",
    "kernel_lock": "kernel-lock waits by process and type",
    "kernel_lock_site": "kernel-lock waits by lock and site",
    "kernel_lock_holder": "the time that threads waited for a kernel lock, by the code that held it",
    "kernel_lock_cause": "the same time, by what the holder did meanwhile",
    "kernel_hold": "kernel-lock acquisitions and holds by process and type, in mode `all`",
    "go_mutex": "waits of goroutines for mutexes, by process",
    "unit": "what cgroups say of units",
}


def as_markdown() -> str:
    """Return the text of docs/metrics.md."""
    return "\n".join([HEAD, *_terms(), NOTES, *_modes(), *_metrics(), *_values()])


def group_of(metric: Metric) -> str:
    """Return the key of GROUPS to which the metric belongs."""
    return next(prefix for prefix in GROUPS if metric.name.startswith(prefix))


def _terms() -> Iterator[str]:
    yield "| term | meaning |"
    yield "|---|---|"
    yield from (f"| {term} | {meaning} |" for term, meaning in TERMS.items())
    yield ""


def _modes() -> Iterator[str]:
    yield MODES_HEAD + "\n".join(f"| {what} | {' | '.join(by_mode)} |" for what, by_mode in MODES.items())
    yield ""


def _metrics() -> Iterator[str]:
    for prefix, (title, has_base) in GROUPS.items():
        yield f"## {title}\n"
        yield "| metric | kind | labels | meaning |"
        yield "|---|---|---|---|"
        for metric in CATALOG.values():
            if group_of(metric) == prefix:
                labels = metric.labels[len(BASE) :] if has_base else metric.labels
                named = ", ".join(f"`{label}`" for label in labels)
                yield f"| `{metric.name}` | {metric.kind} | {named} | {metric.help} |"
        yield ""


def _values() -> Iterator[str]:
    yield "## Values of labels\n"
    yield from _table("`kind` of a futex wait", KINDS)
    yield from _table("`holder` of a lock, if it is no function", HOLDERS)
    yield from _table("`cause` of a wait for a lock", CAUSES)
    yield from _table("`state` of a thread off the CPU", STATES)
    yield from _table("`reason` why a thread is off the CPU", REASONS)
    yield from _table("`lock_type` of a kernel lock", LOCK_TYPES)
    yield from _table("`reason` of `lockd_dropped_events_total`", DROPS)
    yield from _table("`reason` of `lockd_stack_misses_total`", STACK_MISSES)
    yield from _table("`advice` of `lockd_advised_processes`", ADVICE)
    yield from _table("`process` of lockd", PROCESSES)
    yield from _table("`family` of series", FAMILIES)


def _table(title: str, values: Mapping[str, str]) -> Iterator[str]:
    yield f"### {title}\n"
    yield "| value | meaning |"
    yield "|---|---|"
    yield from (f"| `{value}` | {meaning} |" for value, meaning in values.items())
    yield ""


def values_in_the_code() -> dict[str, set[str]]:
    """Return the label values that the programs and the sampler use, by the name of their table here."""
    enums = assemble(["include/common.bpf.h", "daemon/futex.bpf.c", "daemon/kernel_locks.bpf.c"], {}).enums
    kinds = enums["futex_kind"]
    losses = [name.removeprefix("loss_").split("__") for name in enums["loss"] if "__" in name]
    return {
        "KINDS": set(kinds[: kinds.index("wake")]),  # the kinds from `wake` on are not waits
        "STATES": set(enums["state"]) - {"runnable"},
        "LOCK_TYPES": set(enums["lock_type"]),
        "DROPS": {reason for where, reason in losses if where not in ("stacks", "trace")}
        | {"recursion", "holder_gone"},
        "STACK_MISSES": {reason for where, reason in losses if where == "stacks"} | {"refused"},
        "FAMILIES": set(SHARES),
    }


if __name__ == "__main__":
    print(as_markdown(), end="")
