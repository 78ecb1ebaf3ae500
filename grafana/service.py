"""The dashboard Service: one unit over all hosts, containers and pods on which it runs."""

from __future__ import annotations

from grafana_foundation_sdk.models import dashboard as d

from grafana.frame import HOST_COLUMNS, board, cell, choice, fleet, host_link, hosts, link
from grafana.panels import (
    COUNT,
    KINDS,
    MICROSECONDS,
    PER_SECOND,
    PER_THREAD,
    SECONDS,
    SECONDS_PER_SECOND,
    TIMES,
    WAIT_LIMITS,
    Row,
    Value,
    durations,
    graph,
    listing,
    number,
    waits,
)
from grafana.promql import (
    BY_HOST,
    CONTENTION,
    EVENTS,
    FLEET,
    HOSTS,
    MINUTE,
    UNIT,
    growth,
    longest,
    peak,
    peak_of_range,
    quantiles,
    range_rate_of_new,
    rate,
    select,
    top,
    total,
)

RECORDED = "cluster_job_unit:lockd"
UNITS = "|".join(
    f"{RECORDED}_{of}_seconds_sum:rate5m" for of in ("offcpu_runqueue", "futex_blocked", "kernel_lock_wait")
)
"""A pattern of metrics of all programs. Every unit that lockd sees has at least one of them, whichever
program is turned off."""
ALL_HOSTS = (
    " Over all hosts, whichever are chosen at the top of the dashboard; a point is a mean of five minutes."
)
OBJECTIVE = "unit:lockd_blocked_objective:ratio"
BLOCKED = "cluster_job_unit:lockd_futex_blocked_seconds_sum:avg_rate5m"


def service_board() -> d.Dashboard:
    return board(
        "lockd-service",
        "What the threads of one service wait for, over all hosts, containers and pods on which it runs.",
        [
            *fleet(),
            choice(
                "unit",
                "Unit",
                "The service: a systemd unit, or the containers that belong to it.",
                f'label_values({{__name__=~"{UNITS}", {FLEET}}}, unit)',
                has_all=False,
            ),
            hosts(),
        ],
        [_right_now(), _locks(), _hosts(), _off_cpu(), _objective()],
        where=f"{HOSTS}, {UNIT}",
    )


def _its(metric: str, *matchers: str) -> str:
    return select(metric, HOSTS, UNIT, *matchers)


def _over_range(metric: str, *matchers: str) -> str:
    return range_rate_of_new(_its(metric, *matchers), HOSTS)


def _everywhere(metric: str) -> str:
    return select(metric, FLEET, UNIT)


def _right_now() -> Row:
    active = [f"{total(BY_HOST, rate(_its(metric)))} > 0" for metric in EVENTS]
    return Row(
        "Right now",
        [
            number(
                "Hosts",
                "Hosts on which threads of the service run, or wait for locks.",
                f"count({' or '.join(active)})",
            ),
            number(
                "Threads waiting for a user lock",
                "Threads of the service that are blocked on a user-space lock at this moment, on all hosts"
                " together." + KINDS,
                f"sum({_its('lockd_futex_waiting', CONTENTION)})",
            ),
            number(
                "Longest user-lock wait, last minute",
                "The largest single wait on any host that ended in the last minute or is still going on."
                " Orange from 1 s, red from 10 s, as in the alert LockdLockWaitLong." + KINDS,
                f"max({_its('lockd_futex_max_blocked_us', CONTENTION, MINUTE)})",
                MICROSECONDS,
                limits=WAIT_LIMITS,
            ),
            number(
                "Longest kernel-lock wait, last minute",
                "The largest single wait for a lock of the kernel, on any host, that ended in the last minute"
                " or is still going on. Orange from 1 s, red from 10 s, as in the alert"
                " LockdKernelLockWaitLong.",
                f"max({_its('lockd_kernel_lock_max_wait_us', MINUTE)})",
                MICROSECONDS,
                limits=WAIT_LIMITS,
            ),
            number(
                "Deadlocks",
                "Rings of threads of the service, each blocked on a lock that the next of them holds. Unless"
                " a wait has a timeout, only a restart of the service on that host ends one.",
                f"sum({_its('lockd_deadlocks')})",
                limits={"red": 1},
            ),
            number(
                "Deadlocks found in the time range",
                "Deadlocks that lockd found in the time range. They count even if they have ended since, for"
                " instance by a restart of the service.",
                f"round(sum({growth(_its('lockd_deadlocks_found_total'), HOSTS)}))",
                limits={"orange": 1},
            ),
        ],
    )


def _locks() -> Row:
    lock = "comm, kind, lock"
    blocked = _over_range("lockd_futex_lock_blocked_seconds_total", CONTENTION)
    return Row(
        "Which locks",
        [
            listing(
                "Locks of the service",
                "One line per lock, most blocked time first, over the time range of the dashboard and all"
                " chosen hosts. If threads wait for a lock on many hosts, the cause is in the program; if on"
                " a single host, it is on that host." + KINDS + " A click on a lock shows it.",
                {"lock": "Lock", "comm": "Process", "kind": "Kind"},
                [
                    Value("Blocked", total(lock, blocked) + " > 0", SECONDS_PER_SECOND),
                    Value(
                        "Waits",
                        total(lock, _over_range("lockd_futex_lock_blocked_total", CONTENTION)) + " > 0",
                        PER_SECOND,
                    ),
                    Value(
                        "Longest wait",
                        longest(
                            lock,
                            peak_of_range(_its("lockd_futex_lock_max_blocked_us", CONTENTION, MINUTE)),
                        )
                        + " > 0",
                        MICROSECONDS,
                        WAIT_LIMITS,
                    ),
                    Value(
                        "Waiting now",
                        total(lock, _its("lockd_futex_lock_waiting", CONTENTION)) + " > 0",
                        COUNT,
                    ),
                    Value(
                        "Hosts",
                        f"count by ({lock}) ({total(f'{BY_HOST}, {lock}', blocked)} > 0)",
                        COUNT,
                    ),
                ],
                links={"lock": link("lockd-lock", "This lock", lock=cell("lock"), comm=cell("comm"))},
            ),
            durations(
                "Blocked time of user-lock waits",
                "A second band high up, apart from the usual one, is what users notice." + KINDS + ALL_HOSTS,
                f"sum by (le) ({_everywhere(f'{RECORDED}_futex_blocked_seconds_bucket:rate5m')})",
                what="waits per second",
            ),
            graph(
                "How long waits for user locks take",
                "Half of the waits are shorter than the median, 99 in 100 shorter than the 99% line."
                + KINDS
                + ALL_HOSTS,
                quantiles(f"sum by (le) ({_everywhere(f'{RECORDED}_futex_blocked_seconds_bucket:rate5m')})"),
                SECONDS,
                is_logarithmic=True,
            ),
            listing(
                "Kernel locks of the service",
                "One line per lock of the kernel and function that asks for it, over the time range of the"
                " dashboard and all chosen hosts.",
                {"lock": "Lock", "site": "Site", "lock_type": "Type"},
                [
                    Value(
                        "Waited",
                        total(
                            "lock_type, lock, site",
                            _over_range("lockd_kernel_lock_site_wait_seconds_total"),
                        )
                        + " > 0",
                        SECONDS_PER_SECOND,
                    ),
                    Value(
                        "Waits",
                        total(
                            "lock_type, lock, site",
                            _over_range("lockd_kernel_lock_site_waits_total"),
                        )
                        + " > 0",
                        PER_SECOND,
                    ),
                ],
                width=12,
                height=8,
                links={"lock": link("lockd-lock", "This lock", lock=cell("lock"))},
            ),
            graph(
                "How long waits for kernel locks take",
                "Half of the waits are shorter than the median, 99 in 100 shorter than the 99% line."
                + ALL_HOSTS,
                quantiles(
                    f"sum by (le) ({_everywhere(f'{RECORDED}_kernel_lock_wait_seconds_bucket:rate5m')})"
                ),
                SECONDS,
                is_logarithmic=True,
            ),
        ],
    )


def _hosts() -> Row:
    blocked = total(BY_HOST, rate(_its("lockd_futex_blocked_seconds_sum", CONTENTION)))
    return Row(
        "Which hosts",
        [
            listing(
                "The service on its hosts",
                "One line per host, most time blocked on user-space locks first, over the time range of the"
                " dashboard. A click on a host shows the service there.",
                HOST_COLUMNS,
                [
                    Value(
                        "User locks",
                        total(BY_HOST, _over_range("lockd_futex_blocked_seconds_sum", CONTENTION)),
                        SECONDS_PER_SECOND,
                    ),
                    Value(
                        "Kernel locks",
                        total(BY_HOST, _over_range("lockd_kernel_lock_wait_seconds_sum")),
                        SECONDS_PER_SECOND,
                    ),
                    Value(
                        "Run queue",
                        total(BY_HOST, _over_range("lockd_offcpu_runqueue_seconds_sum")),
                        SECONDS_PER_SECOND,
                    ),
                    Value("Waiting now", total(BY_HOST, _its("lockd_futex_waiting", CONTENTION)), COUNT),
                ],
                links={"instance": host_link("The service on this host", "unit")},
            ),
            graph(
                "Time blocked on user locks, by host",
                "Time that threads of the service are blocked on user-space locks. The dashed line is the"
                " median of the hosts on which they have waited: a host far above it is an outlier."
                + PER_THREAD
                + KINDS,
                {"{{cluster}} {{instance}}": top(blocked), "median": f"quantile(0.5, {blocked})"},
                SECONDS_PER_SECOND,
                reference="median",
            ),
            waits(
                "Longest user-lock wait, by host",
                "The largest single wait that ended in the last minute or was still going on." + KINDS,
                {
                    "{{cluster}} {{instance}}": top(
                        longest(BY_HOST, peak(_its("lockd_futex_max_blocked_us", CONTENTION, MINUTE)))
                    )
                },
            ),
        ],
    )


def _off_cpu() -> Row:
    return Row(
        "Off the CPU, and waiting for one",
        [
            graph(
                "Off-CPU time by reason",
                "What the threads waited for, stacked. Idle threads are part of it; look for changes, and for"
                " reasons that should not be there.",
                {"{{reason}}": total("reason", rate(_its("lockd_offcpu_blocked_seconds_sum")))},
                SECONDS_PER_SECOND,
                width=8,
                is_stacked=True,
            ),
            graph(
                "How long threads wait for a processor",
                "Time on the run queue by quantile. Tens of milliseconds mean that the hosts, or the CPU"
                " limit of the service, are too small for the load." + ALL_HOSTS,
                quantiles(
                    f"sum by (le) ({_everywhere(f'{RECORDED}_offcpu_runqueue_seconds_bucket:rate5m')})"
                ),
                SECONDS,
                width=8,
                is_logarithmic=True,
            ),
            graph(
                "Wakers",
                "Who ended the waits: off-CPU time by the name of the process that woke the sleeper."
                " Processes of other services here are what this one depends on.",
                {"{{waker}}": top(total("waker", rate(_its("lockd_offcpu_waker_seconds_total"))))},
                SECONDS_PER_SECOND,
                width=8,
            ),
        ],
    )


def _objective() -> Row:
    needs = " Empty until the service publishes an objective (docs/fleet.md says how)."
    objective = f"max by (unit) ({select(OBJECTIVE, UNIT)})"
    blocked = _everywhere(BLOCKED)

    def burn(hours: int) -> str:
        return f"sum_over_time({blocked}[{hours}h:1m]) / {60 * hours} / on (unit) group_left () {objective}"

    return Row(
        "Objective",
        [
            graph(
                "Blocked time and its objective",
                "Time that threads of the service are blocked on user-space locks, as the mean of its hosts"
                " in a cluster. The alert LockdObjectiveBurn compares it with the objectives, which are the"
                " dashed lines." + needs,
                {
                    "{{cluster}} {{unit}}": f"{blocked} and on (unit) {objective}",
                    "{{unit}}, objective": objective,
                },
                SECONDS_PER_SECOND,
                reference="objective",
            ),
            graph(
                "Burn rate",
                "Blocked time as a multiple of the objective: at 1, the service waits just as much as the"
                " objective allows. The dashed lines are the limits of the alert LockdObjectiveBurn: 6 over"
                " six hours, 14.4 over one hour." + needs,
                {"{{cluster}} {{unit}}, one hour": burn(1), "{{cluster}} {{unit}}, six hours": burn(6)},
                TIMES,
                limits={"orange": 6, "red": 14.4},
            ),
        ],
        is_collapsed=True,
    )
