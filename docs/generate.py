"""Writes docs/metrics.md from the catalogue of metrics and the lists of label values.

`python3 -m docs.generate > docs/metrics.md` after a change there; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lockd.advice import ADVICE
from lockd.export.catalog import CATALOG, Metric
from lockd.load.source import assemble
from lockd.names.labels.reasons import REASONS
from lockd.sample.series.limits import SHARES

HEAD = """\
# Metrics

<!-- Made by docs/generate.py from lockd/export/catalog.py; change it there. -->

The metrics of a host all have the labels `unit` (systemd unit or container of the thread's cgroup,
`kernel` for kernel threads, empty if unknown) and `comm` (name of the process, that is of its thread-group
leader, not of the thread), and besides those in the column *labels*. Names that end in `_us` are in
microseconds, all others in base units.

Totals are exact: for each counter, the sum over all label sets and `lockd_retired_value` is what happened,
less what `lockd_dropped_events_total` says; but for `lockd_futex_sys_seconds_total`, which is a sample where
calls are many. There are never more lines than `series.max` (10,000): what has no series of its own is
counted in the one whose names are `other`. So is what found no place in a map of the kernel
(`lockd_overflow_events_total`); as its process is not known, no filter applies to it.

## Who has series

- **As long as there is room, everybody.** The last quarter is kept for what lasts: a name (`unit`, `comm`)
  that has had a process for 20 s, whatever it was doing. Each family has a share that no other can take,
  and what is nobody's share goes to those that need more.
- **Then those that last.** Series of names that have no process any more give way, the smallest and oldest
  first; then those of names that have one for a moment only. A service has its series within a minute. What
  short-lived processes of a unit do is counted in one series of the unit, `comm` being `other`, if it can
  have none of its own; where the unit does not last either, `unit` is `other` too.
- **Of locks, the most contended now**: `series.top_locks` of those in user space, and as many call sites of
  kernel locks. What counts is blocked time, half as much after a minute; a wait that goes on counts while
  it lasts. Kinds `lock` and `pi` come before the others. Up to half of the places are for the two most
  contended locks of each unit, so that one service does not take all. Looked at every 10 s; another lock
  must have waited for twice as long to take a place, and for 5 ms at least.
- **A series that goes** shows its last numbers for 30 s; what happens meanwhile is counted in that of its
  unit or in `other`. (Who scrapes less often than every 30 s may miss what came after his last look.)
  `lockd_series_retired_total` counts it, and `lockd_retired_value` has what it had counted.
- **A series that comes back** goes on from where it was, as counters do: of each family lockd remembers the
  1,000 that went last. So `rate()` and `increase()` see no reset, and just what was counted in this series:
  nothing for the time when it was gone, which is in `other`. Were it to begin at 0, they would take a value
  past the old one for a series that went on, and leave out the part below: all of it, for a job that does
  the same every time. One that is not remembered begins at 0, as after a restart.
"""

GROUPS = {
    "lockd_futex_": ("Futex waits: locks, condition variables and whatever else user space waits with", True),
    "lockd_kernel_lock_": ("Locks inside the kernel", True),
    "lockd_offcpu_": ("Threads off the CPU", True),
    "lockd_deadlocks": ("Deadlocks: threads that wait for each other", True),
    "lockd_go_": ("Go", True),
    "lockd_advised_": ("Processes of which something has to be known", True),
    "lockd_": ("lockd itself", False),
}
"""By the beginning of a name, the first that fits: title, and whether it has the base labels."""
BASE = ("unit", "comm")

KINDS = {
    "lock": "a mutex-like lock",
    "pi": "a priority-inheritance lock",
    "cond": "condition variables, semaphores, thread joins, parked workers: waits for work or an event",
    "other": "futex_waitv, which waits for any of several",
}
STATES = {
    "interruptible": "asleep until something happens or a signal comes",
    "uninterruptible": "asleep until something happens, mostly for a moment: I/O, a kernel lock",
    "other": "stopped, traced, frozen, or idle as kernel threads are",
}
LOCK_TYPES = {
    "mutex": "struct mutex, also ww_mutex",
    "rwsem_read": "a reader of struct rw_semaphore",
    "rwsem_write": "a writer of struct rw_semaphore",
    "semaphore": "struct semaphore",
    "rtmutex": "struct rt_mutex; on a PREEMPT_RT kernel most other locks are one",
    "percpu_rwsem_read": "a reader of struct percpu_rw_semaphore",
    "percpu_rwsem_write": "a writer of struct percpu_rw_semaphore",
    "spinlock": "a queued spinlock: its waiter spins",
    "rwlock_read": "a reader of a queued rwlock: its waiter spins",
    "rwlock_write": "a writer of a queued rwlock: its waiter spins",
}
DROPS = {
    "threads_full": "the thread found no place among those that are followed: raise `maps.threads`",
    "full": "neither the map nor the one for what does not fit had room: raise `maps.entries`",
    "waits_full": "more waits for kernel locks at one moment than can be followed",
    "holding_full": "more kernel locks held, or tried, at one moment than can be followed",
    "release_missed": "the thread takes a lock again that it holds: the end of the first hold was not seen",
    "taken_unseen": "a lock was released that nobody was seen to take: its acquisition and hold",
    "too_nested": "the thread holds a lock more than four times: the oldest of these holds",
    "return_missed": "the kernel did not say when the function returned, as it was in it too often at a time"
    " (kprobes only)",
    "holder_gone": "the thread ended with the lock: a hold that will never end (looked for after a minute)",
    "recursion": "the kernel left the program out: on the same CPU it, or a system call on a map, had been"
    " interrupted or preempted (counted since 5.12 for fentry, since 6.7 for tracepoints and kprobes)",
}
STACK_MISSES = {
    "full": "more stacks in one period than there is room for: raise `maps.stacks`",
    "unreadable": "the kernel could not walk it",
    "captures_full": "threads blocked on more new locks in one period than there is room for; "
    "one that is left out is captured when a thread blocks on it again",
    "refused": "the namer is behind; the lock is captured again when a thread blocks on it. Until then its "
    "waits, as those of `captures_full`, are of the kind that their calls look like",
}
PROCESSES = {"sampler": "counts", "namer": "looks up names", "exporter": "answers HTTP"}
FAMILIES = {
    "futex": "futex waits by process and kind",
    "futex_process": "wakes and sys time by process",
    "futex_error": "errors by process",
    "futex_lock": "futex waits by lock",
    "offcpu": "off-CPU time by process, state and reason",
    "offcpu_runqueue": "runqueue time by process",
    "offcpu_waker": "off-CPU time by process and waker",
    "kernel_lock": "kernel-lock waits by process and type",
    "kernel_lock_site": "kernel-lock waits by lock and site",
    "kernel_hold": "kernel-lock acquisitions and holds by process and type, in mode `all`",
    "go_mutex": "what goroutines wait for mutexes, by process",
}


def as_markdown() -> str:
    """The whole file."""
    return "\n".join([HEAD, *_metrics(), *_values()])


def group_of(metric: Metric) -> str:
    return next(prefix for prefix in GROUPS if metric.name.startswith(prefix))


def _metrics() -> Iterator[str]:
    for prefix, (title, has_base) in GROUPS.items():
        yield f"## {title}\n"
        yield "| metric | kind | labels | definition |"
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
    yield from _table("`state` of a thread off the CPU", STATES)
    yield from _table("`reason` of a thread to be off the CPU", REASONS)
    yield from _table("`lock_type` of a kernel lock", LOCK_TYPES)
    yield from _table("`reason` of `lockd_dropped_events_total`", DROPS)
    yield from _table("`reason` of `lockd_stack_misses_total`", STACK_MISSES)
    yield from _table("`advice` for who looks at a process", ADVICE)
    yield from _table("`process` of lockd", PROCESSES)
    yield from _table("`family` of series", FAMILIES)


def _table(title: str, values: Mapping[str, str]) -> Iterator[str]:
    yield f"### {title}\n"
    yield "| value | meaning |"
    yield "|---|---|"
    yield from (f"| `{value}` | {meaning} |" for value, meaning in values.items())
    yield ""


def values_in_the_code() -> dict[str, set[str]]:
    """By the name of a table above, the values that the programs and the sampler really use."""
    enums = assemble(["include/common.bpf.h", "daemon/futex.bpf.c", "daemon/kernel_locks.bpf.c"], {}).enums
    kinds = [name.removeprefix("KIND_").lower() for name in enums["futex_kind"]]
    losses = [name.lower().removeprefix("loss_").split("__") for name in enums["loss"] if "__" in name]
    return {
        "KINDS": set(kinds[: kinds.index("wake")]),  # the others are no waits
        "STATES": {name.removeprefix("STATE_").lower() for name in enums["state"]} - {"runnable"},
        "LOCK_TYPES": {name.removeprefix("LOCK_").lower() for name in enums["lock_type"]},
        "DROPS": {reason for where, reason in losses if where not in ("stacks", "trace")}
        | {"recursion", "holder_gone"},
        "STACK_MISSES": {reason for where, reason in losses if where == "stacks"} | {"refused"},
        "FAMILIES": set(SHARES),
    }


if __name__ == "__main__":
    print(as_markdown(), end="")
