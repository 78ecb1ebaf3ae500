"""The dashboard Lock: one lock, of a program or of the kernel, over all hosts."""

from __future__ import annotations

from collections.abc import Callable

from grafana_foundation_sdk.models import dashboard as d

from grafana.frame import ANY, HOST_COLUMNS, board, cell, choice, fleet, host_link, hosts, link
from grafana.panels import (
    COUNT,
    MICROSECONDS,
    PER_SECOND,
    PER_THREAD,
    SECONDS,
    SECONDS_PER_SECOND,
    SHARE,
    WAIT_LIMITS,
    Row,
    Value,
    graph,
    listing,
    number,
    waits,
)
from grafana.promql import (
    BY_HOST,
    COMM,
    CONTENTION,
    FLEET,
    HOSTS,
    MINUTE,
    longest,
    peak,
    peak_of_range,
    range_rate_of_new,
    rate,
    select,
    top,
    total,
)

LOCK = 'lock="$lock"'
NAMES = (
    "cluster_job_comm_lock:lockd_futex_lock_blocked_seconds:rate5m",
    "cluster_job_lock_type_lock:lockd_kernel_lock_site_wait_seconds:rate5m",
)
USER_ONLY = " Only of user-space locks: for those of the kernel there are no such series."


def lock_board() -> d.Dashboard:
    user, kernel = NAMES
    return board(
        "lockd-lock",
        "One lock, of a program or of the kernel: who waits for it, how long, on which hosts, and whether"
        " they still do.",
        [
            *fleet(),
            choice(
                "lock",
                "Lock",
                "Locks of programs and of the kernel that block somebody.",
                f'label_values({{__name__=~"{user}|{kernel}", {FLEET}}}, lock)',
                is_multiple=False,
                has_all=False,
            ),
            choice(
                "comm",
                "Process",
                "Programs may use the same name for different locks: choose one of them.",
                f"label_values({select(user, FLEET, LOCK)}, comm)",
                all_value=ANY,
            ),
            hosts(),
        ],
        [_lock(), _who()],
        where=f"{HOSTS}, {COMM}",
    )


def _its(metric: str, *matchers: str) -> str:
    return select(metric, HOSTS, COMM, LOCK, *matchers)


BLOCKED = _its("lockd_futex_lock_blocked_seconds_total", CONTENTION)
BLOCKED_WAITS = _its("lockd_futex_lock_blocked_total", CONTENTION)
WAITED = _its("lockd_kernel_lock_site_wait_seconds_total")
KERNEL_WAITS = _its("lockd_kernel_lock_site_waits_total")
WAITING = _its("lockd_futex_lock_waiting", CONTENTION)
THREADS = _its("lockd_futex_lock_threads", CONTENTION)
HELD = _its("lockd_futex_lock_holder_seconds_total", CONTENTION)
KERNEL_HELD = _its("lockd_kernel_lock_holder_seconds_total")
CAUSED = _its("lockd_futex_lock_cause_seconds_total", CONTENTION)
KERNEL_CAUSED = _its("lockd_kernel_lock_cause_seconds_total")
MAXIMUM = _its("lockd_futex_lock_max_blocked_us", CONTENTION, MINUTE)


def _either(by: str, user: str, kernel: str, rated: Callable[[str], str] = rate) -> str:
    """Return the rate of the metric that the lock has, summed by the labels `by`.

    The metric is `user` for a lock of a program, and `kernel` for a lock of the kernel. `rated` is rate() for
    graphs, and _from_first() for tables.
    """
    return f"({total(by, rated(user))} or {total(by, rated(kernel))})"


def _from_first(counter: str) -> str:
    return range_rate_of_new(counter, HOSTS)


def _lock() -> Row:
    seconds = _either(BY_HOST, BLOCKED, WAITED)
    count = _either(BY_HOST, BLOCKED_WAITS, KERNEL_WAITS)
    return Row(
        "$lock",
        [
            number(
                "Hosts",
                "Hosts on which waits for the lock ended in the last interval of the graphs (a minute or"
                " more). One host points to that host; all of them point to the program, or to the kernel.",
                f"count({seconds} > 0)",
                width=5,
            ),
            number(
                "Time blocked",
                "Time that threads are blocked on the lock, summed over all chosen hosts." + PER_THREAD,
                f"sum({seconds})",
                SECONDS_PER_SECOND,
                width=5,
            ),
            number(
                "Waits", "Waits for the lock that blocked a thread.", f"sum({count})", PER_SECOND, width=4
            ),
            number(
                "Threads waiting now",
                "Threads that are blocked on the lock now. If the same threads stay blocked for long, the"
                " holder is stuck." + USER_ONLY,
                f"sum({WAITING})",
                limits={"orange": 10},
                width=5,
            ),
            number(
                "Longest wait, last minute",
                "The largest single wait that ended in the last minute or is still going on." + USER_ONLY,
                f"max({MAXIMUM})",
                MICROSECONDS,
                limits=WAIT_LIMITS,
                width=5,
            ),
            graph(
                "Time blocked, by host",
                "Shows whether threads wait for the lock on one host or on all. The dashed line is the median"
                " of the chosen hosts." + PER_THREAD,
                {"{{cluster}} {{instance}}": top(seconds), "median": f"quantile(0.5, {seconds})"},
                SECONDS_PER_SECOND,
                reference="median",
            ),
            graph(
                "Mean wait, by host",
                "If waits are long, the holder keeps the lock too long, perhaps while it does input or"
                " output. If they are short but many, too many threads want it.",
                {"{{cluster}} {{instance}}": top(f"{seconds} / ({count} > 0)")},
                SECONDS,
                is_logarithmic=True,
            ),
            waits(
                "Longest wait, by host",
                "The largest single wait that ended in the last minute or was still going on. A line that"
                " climbs by one second per second is one thread that still waits." + USER_ONLY,
                {"{{cluster}} {{instance}}": top(longest(BY_HOST, peak(MAXIMUM)))},
            ),
            graph(
                "Threads that want it, by host",
                "Distinct threads that were blocked on the lock in the last minute. A convoy has many."
                + USER_ONLY,
                {"{{cluster}} {{instance}}": top(total(BY_HOST, THREADS))},
                COUNT,
            ),
        ],
    )


def _who() -> Row:
    process = f"{BY_HOST}, unit, comm"
    holder = "holder, comm"
    by_host = total(f"{BY_HOST}, lock_type, site", _from_first(WAITED))
    seconds = _either(process, BLOCKED, WAITED, _from_first)
    count = _either(process, BLOCKED_WAITS, KERNEL_WAITS, _from_first)
    held = _either(holder, HELD, KERNEL_HELD, _from_first)
    held_by_host = _either(f"{BY_HOST}, {holder}", HELD, KERNEL_HELD, _from_first)
    return Row(
        "Who waits for it, and where",
        [
            listing(
                "Processes that wait",
                "One line per host and process, most time first, over the time range of the dashboard. Which"
                " thread holds the lock is not in the metrics: while threads wait, /api/v1/locks on the host"
                " and `lockd top` name it.",
                {**HOST_COLUMNS, "unit": "Unit", "comm": "Process"},
                [
                    Value("Blocked", f"{seconds} > 0", SECONDS_PER_SECOND),
                    Value("Waits", f"{count} > 0", PER_SECOND),
                    Value(
                        "Longest wait",
                        longest(process, peak_of_range(MAXIMUM)) + " > 0",
                        MICROSECONDS,
                        WAIT_LIMITS,
                    ),
                    Value("Waiting now", total(process, WAITING) + " > 0", COUNT),
                ],
                links={
                    "instance": host_link("This host", unit=cell("unit")),
                    "unit": link("lockd-service", "This service", unit=cell("unit")),
                },
            ),
            listing(
                "Code that held it",
                "Functions that released the lock after they had made threads wait, by the time that threads"
                " waited because of them, over the time range of the dashboard. The times are estimated from"
                " samples. The code of these functions is what to make shorter. `(no release)` are waits that"
                " a timeout or a signal ended.",
                {"holder": "Holder", "comm": "Process"},
                [
                    Value("Made threads wait", f"{held} > 0", SECONDS_PER_SECOND),
                    Value(
                        "Share",
                        f"({held} > 0) / on () group_left () sum({held})",
                        SHARE,
                    ),
                    Value("Hosts", f"count by ({holder}) ({held_by_host} > 0)", COUNT),
                ],
                height=8,
            ),
            graph(
                "What the holder did",
                "The time that threads waited for the lock, by what the thread that held it did meanwhile."
                " `running`: its code takes that long. `runqueue`: it had no CPU. `lock`: it waited for"
                " another lock itself. `unknown`: no release ended the wait, or what the holder did was not"
                " seen. Any other value is the reason for which it was off the CPU. Estimated from samples.",
                {"{{cause}}": _either("cause", CAUSED, KERNEL_CAUSED)},
                SECONDS_PER_SECOND,
                width=24,
                is_stacked=True,
            ),
            listing(
                "Where the kernel asks for it",
                "Functions of the kernel that wait for the lock, over the time range of the dashboard. They"
                " tell what the threads were doing. Empty for a lock of a program.",
                {"site": "Site", "lock_type": "Type"},
                [
                    Value(
                        "Waited", total("lock_type, site", _from_first(WAITED)) + " > 0", SECONDS_PER_SECOND
                    ),
                    Value("Waits", total("lock_type, site", _from_first(KERNEL_WAITS)) + " > 0", PER_SECOND),
                    Value(
                        "Hosts",
                        f"count by (lock_type, site) ({by_host} > 0)",
                        COUNT,
                    ),
                ],
                height=8,
            ),
        ],
    )
