"""The dashboard Fleet: which hosts and services wait, and whether it is one lock everywhere or one host."""

from __future__ import annotations

from grafana_foundation_sdk.models import dashboard as d

from grafana.frame import HOST_COLUMNS, board, cell, fleet, host_link, link
from grafana.panels import (
    COUNT,
    KINDS,
    LEVEL,
    MICROSECONDS,
    PER_SECOND,
    PER_THREAD,
    SECONDS_PER_SECOND,
    SHARE,
    TIMES,
    WAIT_LIMITS,
    Row,
    Value,
    graph,
    listing,
    number,
)
from grafana.promql import BY_HOST, FLEET, longest, select, top, total

NOW = " The numbers are those of the last five minutes of the time range, maxima those of the last minute."
MEDIAN = (
    " Each point in time shows the ten hosts with the largest values. The dashed line is the median of all"
    " hosts of a cluster: a host far above it is an outlier."
)


def fleet_board() -> d.Dashboard:
    return board(
        "lockd-fleet",
        "Which hosts and services of a fleet wait, and whether it is one lock everywhere or one host with a"
        " bad disk.",
        fleet(),
        [_right_now(), _hosts(), _services(), _locks(), _lockd()],
        where=FLEET,
    )


def _all(metric: str, *matchers: str) -> str:
    return select(metric, FLEET, *matchers)


USER_LOCKS = _all("cluster_job_instance:lockd_futex_blocked_seconds_sum:rate5m")
USER_MEDIAN = _all("cluster_job:lockd_futex_blocked_seconds_sum:quantile_rate5m")
KERNEL_LOCKS = _all("cluster_job_instance:lockd_kernel_lock_wait_seconds_sum:rate5m")
RUN_QUEUE = _all("cluster_job_instance:lockd_offcpu_runqueue_seconds_sum:rate5m")
USER_MAXIMUM = _all("cluster_job_instance:lockd_futex_max_blocked_us:max")
KERNEL_MAXIMUM = _all("cluster_job_instance:lockd_kernel_lock_max_wait_us:max")
HOST_COUNT = _all("cluster_job:lockd_start_time_seconds:count")


def _outliers(metric: str, operation: str) -> dict[str, str]:
    """Return queries for the hosts with the highest values and the median host of each cluster, by legend.

    They read series of recording rules, and so cost the same for a fleet of any size.
    """
    return {
        "{{cluster}} {{instance}}": top(_all(f"cluster_job_instance:{metric}:topk_{operation}")),
        "{{cluster}} median": _all(f"cluster_job:{metric}:quantile_{operation}"),
    }


def _right_now() -> Row:
    return Row(
        "Right now",
        [
            number(
                "Hosts that answer",
                "Hosts whose lockd answers. All other panels are about them.",
                f"sum({HOST_COUNT})",
            ),
            number(
                "Hosts that do not answer",
                "Targets of the job `lockd` that Prometheus could not scrape: nothing is known of their"
                " waits. The alert LockdDown names them.",
                f"sum({_all('cluster_job:lockd_down:count')})",
                limits={"orange": 1},
            ),
            number(
                "Deadlocks",
                "Rings of threads, each blocked on a lock that the next of them holds. Unless a wait has a"
                " timeout, they do not end by themselves.",
                f"sum({_all('cluster_job:lockd_deadlocks:sum')})",
                limits={"red": 1},
            ),
            number(
                "Hosts with a wait over a minute",
                "Hosts on which some thread has waited for a user-space lock for more than a minute, or did"
                " so within the last minute." + KINDS,
                f"sum({_all('cluster_job:lockd_futex_max_blocked_us:count_max')})",
                limits={"red": 1},
            ),
            number(
                "Longest user-lock wait",
                "The largest single wait of the last minute on any host. Orange from 1 s, red from 10 s, as"
                " in the alert LockdLockWaitLong." + KINDS,
                f"max({_all('cluster_job:lockd_futex_max_blocked_us:max')})",
                MICROSECONDS,
                limits=WAIT_LIMITS,
            ),
            number(
                "Longest kernel-lock wait",
                "The largest single wait of the last minute for a lock of the kernel, on any host. Orange"
                " from 1 s, red from 10 s, as in the alert LockdKernelLockWaitLong.",
                f"max({_all('cluster_job:lockd_kernel_lock_max_wait_us:max')})",
                MICROSECONDS,
                limits=WAIT_LIMITS,
            ),
        ],
    )


def _hosts() -> Row:
    return Row(
        "Which hosts wait",
        [
            listing(
                "Hosts",
                "One line per host, most time blocked on user-space locks first; click a heading to sort by"
                " another column. 'Times median' compares this time with the median host of its cluster: the"
                " same load on all hosts gives 1. It is empty while the median host does not wait at all."
                + NOW
                + " A click on a host shows it.",
                HOST_COLUMNS,
                [
                    Value("User locks", total(BY_HOST, USER_LOCKS), SECONDS_PER_SECOND),
                    Value(
                        "Times median",
                        total(
                            BY_HOST,
                            # If several servers of Prometheus share a fleet, each has recorded a median.
                            f"{USER_LOCKS} / on (cluster, job) group_left ()"
                            f" avg by (cluster, job) ({USER_MEDIAN} > 0)",
                        ),
                        TIMES,
                        {"orange": 3, "red": 10},
                    ),
                    Value("Kernel locks", total(BY_HOST, KERNEL_LOCKS), SECONDS_PER_SECOND),
                    Value("Run queue", total(BY_HOST, RUN_QUEUE), SECONDS_PER_SECOND),
                    Value(
                        "Longest user-lock wait", longest(BY_HOST, USER_MAXIMUM), MICROSECONDS, WAIT_LIMITS
                    ),
                    Value(
                        "Longest kernel-lock wait",
                        longest(BY_HOST, KERNEL_MAXIMUM),
                        MICROSECONDS,
                        WAIT_LIMITS,
                    ),
                    Value(
                        "Waiting now",
                        total(BY_HOST, _all("cluster_job_instance:lockd_futex_waiting:sum")),
                        COUNT,
                    ),
                    Value("Deadlocks", total(BY_HOST, _all("lockd_deadlocks")) + " > 0", COUNT, {"red": 1}),
                ],
                links={"instance": host_link("This host")},
            ),
            graph(
                "Time blocked on user locks, by host",
                "Time that threads are blocked on locks of programs." + PER_THREAD + MEDIAN + KINDS,
                _outliers("lockd_futex_blocked_seconds_sum", "rate5m"),
                SECONDS_PER_SECOND,
                width=8,
                reference="median",
            ),
            graph(
                "Time waiting for kernel locks, by host",
                "Time that threads wait for locks of the kernel. One host far above the others may have a bad"
                " disk or a process that misbehaves; all hosts at once point to a kernel, or to an agent that"
                " runs everywhere." + MEDIAN,
                _outliers("lockd_kernel_lock_wait_seconds_sum", "rate5m"),
                SECONDS_PER_SECOND,
                width=8,
                reference="median",
            ),
            graph(
                "Time on the run queue, by host",
                "Time that threads could run and had no processor. 1 s/s means that one more processor would"
                " have been busy all the time." + MEDIAN,
                _outliers("lockd_offcpu_runqueue_seconds_sum", "rate5m"),
                SECONDS_PER_SECOND,
                width=8,
                reference="median",
            ),
        ],
    )


def _services() -> Row:
    user = _all("cluster_job_unit:lockd_futex_blocked_seconds_sum:rate5m")
    return Row(
        "Which services wait",
        [
            listing(
                "Units",
                "One line per systemd unit or container, over all hosts, most time blocked on user-space"
                " locks first." + NOW + KINDS + " A click on a unit shows it on all its hosts.",
                {"unit": "Unit"},
                [
                    Value("User locks", total("unit", user), SECONDS_PER_SECOND),
                    Value(
                        "Kernel locks",
                        total("unit", _all("cluster_job_unit:lockd_kernel_lock_wait_seconds_sum:rate5m")),
                        SECONDS_PER_SECOND,
                    ),
                    Value(
                        "Run queue",
                        total("unit", _all("cluster_job_unit:lockd_offcpu_runqueue_seconds_sum:rate5m")),
                        SECONDS_PER_SECOND,
                    ),
                    Value(
                        "Longest user-lock wait",
                        longest("unit", _all("cluster_job_unit:lockd_futex_max_blocked_us:max")),
                        MICROSECONDS,
                        WAIT_LIMITS,
                    ),
                    Value(
                        "Longest kernel-lock wait",
                        longest("unit", _all("cluster_job_unit:lockd_kernel_lock_max_wait_us:max")),
                        MICROSECONDS,
                        WAIT_LIMITS,
                    ),
                ],
                width=14,
                height=8,
                links={"unit": link("lockd-service", "This service", unit=cell("unit"))},
            ),
            graph(
                "Time blocked on user locks, by unit",
                "Summed over all hosts, so a service with many hosts has more." + PER_THREAD + KINDS,
                {"{{unit}}": top(total("unit", user))},
                SECONDS_PER_SECOND,
                width=10,
            ),
        ],
    )


def _locks() -> Row:
    user = "cluster_job_comm_lock:lockd_futex_lock"
    kernel = "cluster_job_lock_type_lock:lockd_kernel_lock_site_wait_seconds"
    user_hosts = total("comm, lock", _all(f"{user}_blocked_seconds:count_rate5m"))
    kernel_hosts = total("lock_type, lock", _all(f"{kernel}:count_rate5m"))
    meaning = (
        " 'Share' is the share of all hosts on which a thread was blocked on the lock."
        + NOW
        + " Locks that have no name of their own are left out. A click on a lock shows it on all its hosts."
    )
    return Row(
        "One lock everywhere, or one host?",
        [
            listing(
                "User locks across hosts",
                "One line per lock of a program, most blocked time first." + meaning + KINDS,
                {"lock": "Lock", "comm": "Process"},
                [
                    Value(
                        "Blocked",
                        total("comm, lock", _all(f"{user}_blocked_seconds:rate5m")),
                        SECONDS_PER_SECOND,
                    ),
                    Value("Hosts", user_hosts, COUNT),
                    Value("Share", f"{user_hosts} / scalar(sum({HOST_COUNT}))", SHARE),
                    Value(
                        "Longest wait",
                        longest("comm, lock", _all(f"{user}_max_blocked_us:max")),
                        MICROSECONDS,
                        WAIT_LIMITS,
                    ),
                ],
                width=12,
                links={"lock": link("lockd-lock", "This lock", lock=cell("lock"), comm=cell("comm"))},
            ),
            listing(
                "Kernel locks across hosts",
                "One line per lock of the kernel, most waiting time first." + meaning,
                {"lock": "Lock", "lock_type": "Type"},
                [
                    Value("Waited", total("lock_type, lock", _all(f"{kernel}:rate5m")), SECONDS_PER_SECOND),
                    Value("Hosts", kernel_hosts, COUNT),
                    Value("Share", f"{kernel_hosts} / scalar(sum({HOST_COUNT}))", SHARE),
                ],
                width=12,
                links={"lock": link("lockd-lock", "This lock", lock=cell("lock"))},
            ),
        ],
    )


def _lockd() -> Row:
    missing = _all("lockd_hook_attached")
    return Row(
        "lockd over the fleet",
        [
            graph(
                "Share of the machine that lockd takes",
                "CPU time that lockd takes, with its BPF programs, as a share of the CPU time of the whole"
                " machine." + MEDIAN,
                _outliers("lockd_cpu_ratio", "sum"),
                SHARE,
                width=8,
                reference="median",
            ),
            graph(
                "Time under restraint",
                "Share of the time in which lockd left out detail to keep to its CPU budget. Names of locks"
                " and, at the last level, of processes are missing then. Totals stay exact.",
                {
                    "{{cluster}} {{instance}}": top(
                        _all("cluster_job_instance:lockd_restraint_seconds:rate5m")
                    )
                },
                SHARE,
                width=8,
                maximum=1,
            ),
            graph(
                "Dropped events",
                "Events that no series counts, by host and reason. The alert LockdDroppedEvents leaves out"
                " those that are ordinary: recursion, return_missed, release_missed, taken_unseen,"
                " holder_gone and too_nested. All others deserve a look at the host.",
                {
                    "{{cluster}} {{instance}} {{reason}}": top(
                        _all("cluster_job_instance_reason:lockd_dropped_events:rate5m")
                    )
                },
                PER_SECOND,
                width=8,
            ),
            listing(
                "Versions",
                "How many hosts run which lockd on which kernel.",
                {"version": "Version", "kernel": "Kernel"},
                [Value("Hosts", f"count by (version, kernel) ({_all('lockd_build_info')})", COUNT)],
                width=8,
                height=8,
            ),
            listing(
                "Hooks that are missing",
                "Hooks that could not be attached, and on how many hosts. The metrics of the program are"
                " incomplete there; `lockd doctor` on such a host says why.",
                {"program": "Program", "hook": "Hook"},
                [
                    Value(
                        "Hosts",
                        f"count by (program, hook) (min by ({BY_HOST}, program, hook) ({missing}) == 0)",
                        COUNT,
                    )
                ],
                width=8,
                height=8,
            ),
            listing(
                "Configurations not in force",
                "Hosts on which the last reload found an error, so that the configuration from before is in"
                " force. A host is in this list until a reload succeeds.",
                HOST_COLUMNS,
                [
                    Value(
                        "Last reload",
                        longest(BY_HOST, _all("lockd_config_last_reload_successful")) + " == 0",
                        LEVEL,
                    )
                ],
                width=8,
                height=8,
                links={"instance": host_link("This host")},
                states={0: ("refused", "red")},
            ),
        ],
    )
