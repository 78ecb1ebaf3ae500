"""The dashboard Host: where the threads of one host wait, and what lockd costs there."""

from __future__ import annotations

from grafana_foundation_sdk.models import dashboard as d

from grafana.frame import ANY, board, cell, choice, fleet, hosts, link
from grafana.panels import (
    BYTES,
    COUNT,
    KINDS,
    LEVEL,
    MICROSECONDS,
    PER_SECOND,
    PER_THREAD,
    SECONDS,
    SECONDS_PER_SECOND,
    SHARE,
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
    CONTENTION,
    EVENTS,
    HOST,
    MINUTE,
    PROCESSES,
    UNIT,
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

ANY_EVENT = f'__name__=~"{"|".join(EVENTS)}"'
MODE_CALLS = "Only in mode calls (programs.futex.mode). "
MODE_ALL = "Only in mode all (programs.kernel_locks.mode). "


def host_board() -> d.Dashboard:
    return board(
        "lockd-host",
        "Where the threads of one host wait, for how long, on what, and who makes them wait; and what lockd"
        " costs.",
        [
            *fleet(),
            hosts(is_multiple=False),
            choice(
                "unit",
                "Unit",
                "Systemd units or containers. Threads of no known unit are part of All.",
                f"label_values({select('', ANY_EVENT, HOST)}, unit)",
                all_value=ANY,
            ),
            choice(
                "comm",
                "Process",
                "Names of processes.",
                f"label_values({select('', ANY_EVENT, HOST, UNIT)}, comm)",
                all_value=ANY,
            ),
            choice(
                "lock_type",
                "Kernel-lock type",
                "Which heatmaps of kernel locks to show.",
                f"label_values({select('lockd_kernel_lock_wait_seconds_count', HOST)}, lock_type)",
            ),
            choice(
                "reason",
                "Off-CPU reason",
                "Reasons that the off-CPU panels show.",
                f"label_values({select('lockd_offcpu_blocked_seconds_count', HOST)}, reason)",
            ),
        ],
        [
            _right_now(),
            _user_locks(),
            _kernel_locks(),
            _kernel_holds(),
            _off_cpu(),
            _all_futex_waits(),
            _futex_calls(),
            _lockd(),
        ],
        where=HOST,
    )


def _here(metric: str, *matchers: str) -> str:
    """Return a selector of the series of the processes that were chosen."""
    return select(metric, HOST, PROCESSES, *matchers)


def _right_now() -> Row:
    return Row(
        "Right now",
        [
            number(
                "Threads waiting for a user lock",
                "Threads that are blocked on a user-space lock at this moment."
                + KINDS
                + " A few that change all the time are normal on a busy host; a number that never returns to"
                " 0 deserves a look at the longest wait beside it.",
                f"sum({_here('lockd_futex_waiting', CONTENTION)})",
                limits={"orange": 10},
                width=5,
            ),
            number(
                "Longest user-lock wait, last minute",
                "The largest single wait for a user-space lock that ended in the last minute or is still"
                " going on. Orange from 1 s, red from 10 s: the limits of the alert LockdLockWaitLong. If it"
                " climbs by one second per second, some thread is stuck." + KINDS,
                f"max({_here('lockd_futex_max_blocked_us', CONTENTION, MINUTE)})",
                MICROSECONDS,
                limits=WAIT_LIMITS,
                width=5,
            ),
            number(
                "Threads waiting for a kernel lock",
                "Threads that wait inside the kernel for a mutex, semaphore or similar lock at this moment."
                " Threads that spin for a spinlock are not counted. Usually 0 or close to it.",
                f"sum({_here('lockd_kernel_lock_waiting')})",
                limits={"orange": 10},
                width=5,
            ),
            number(
                "Longest kernel-lock wait, last minute",
                "The largest single wait for a kernel lock that ended in the last minute or is still going"
                " on. Orange from 1 s, red from 10 s: the limits of the alert LockdKernelLockWaitLong.",
                f"max({_here('lockd_kernel_lock_max_wait_us', MINUTE)})",
                MICROSECONDS,
                limits=WAIT_LIMITS,
                width=5,
            ),
            number(
                "Deadlocks",
                "Rings of threads, each blocked on a lock that the next of them holds, that have lasted for a"
                " second or more. Unless a wait has a timeout, they do not end by themselves."
                " /api/v1/deadlocks on the host has the threads, the locks and the places in the code.",
                f"sum({_here('lockd_deadlocks')})",
                limits={"red": 1},
            ),
            graph(
                "Threads waiting now: user locks",
                "How many threads of each process are blocked on a user-space lock."
                + KINDS
                + " A flat line above 0 mostly means that the same threads go on waiting; a jagged one means"
                " that waits begin and end.",
                {"{{unit}} {{comm}}": top(total("unit, comm", _here("lockd_futex_waiting", CONTENTION)))},
                COUNT,
            ),
            graph(
                "Threads waiting now: kernel locks",
                "How many threads wait for a kernel lock, by type of lock and process. Many threads on one"
                " rwsem_write or mutex of one process usually means that they all want the same lock, such as"
                " mmap_lock, which protects its memory map.",
                {
                    "{{lock_type}} {{unit}} {{comm}}": top(
                        total("lock_type, unit, comm", _here("lockd_kernel_lock_waiting"))
                    )
                },
                COUNT,
            ),
        ],
    )


def _user_locks() -> Row:
    blocked = rate(_here("lockd_futex_blocked_seconds_sum", CONTENTION))
    by_lock = "unit, comm, kind, lock"
    return Row(
        "User-space locks (futex)",
        [
            durations(
                "Blocked time of user-lock waits",
                "A second band high up, apart from the usual one, is what users notice: few waits, but long"
                " ones." + KINDS + " A wait is counted when it ends.",
                _increase("lockd_futex_blocked_seconds_bucket", CONTENTION),
            ),
            waits(
                "Longest user-lock wait over time",
                "The largest single wait of each process that ended in the last minute or was still going on,"
                " on a logarithmic axis. A line that climbs by one second per second is one thread that still"
                " waits; a step that lasts a minute is one wait that has ended." + KINDS,
                {
                    "{{unit}} {{comm}} ({{kind}})": top(
                        longest(
                            "unit, comm, kind", peak(_here("lockd_futex_max_blocked_us", CONTENTION, MINUTE))
                        )
                    )
                },
            ),
            graph(
                "Top units by time blocked on user locks",
                "Time that the threads of each systemd unit or container spend blocked on user-space locks."
                + PER_THREAD
                + KINDS,
                {"{{unit}}": top(total("unit", blocked))},
                SECONDS_PER_SECOND,
            ),
            graph(
                "Top processes by time blocked on user locks",
                "Time that the threads of each process spend blocked on user-space locks. The name is that of"
                " the process, not of the thread." + PER_THREAD + KINDS,
                {"{{unit}} {{comm}}": top(total("unit, comm", blocked))},
                SECONDS_PER_SECOND,
            ),
            listing(
                "Top user locks",
                "One line per lock, most blocked time first, over the time range of the dashboard. A lock is"
                " named by its symbol, else by the code that takes it. Much time with few, long waits: the"
                " holder keeps it too long. Much time with many short waits: too many threads want it. A lock"
                " with threads waiting now but no blocked time yet has a wait that has not ended. The line"
                " `other` sums up locks that have none of their own. A click on a lock shows it on all"
                " hosts." + KINDS,
                {"lock": "Lock", "unit": "Unit", "comm": "Process", "kind": "Kind"},
                [
                    Value(
                        "Blocked",
                        total(
                            by_lock,
                            range_rate_of_new(
                                _here("lockd_futex_lock_blocked_seconds_total", CONTENTION), HOST
                            ),
                        )
                        + " > 0",
                        SECONDS_PER_SECOND,
                    ),
                    Value(
                        "Waits",
                        total(
                            by_lock,
                            range_rate_of_new(_here("lockd_futex_lock_blocked_total", CONTENTION), HOST),
                        )
                        + " > 0",
                        PER_SECOND,
                    ),
                    Value(
                        "Longest wait",
                        longest(
                            by_lock,
                            peak_of_range(_here("lockd_futex_lock_max_blocked_us", CONTENTION, MINUTE)),
                        )
                        + " > 0",
                        MICROSECONDS,
                        WAIT_LIMITS,
                    ),
                    Value(
                        "Waiting now",
                        total(by_lock, _here("lockd_futex_lock_waiting", CONTENTION)) + " > 0",
                        COUNT,
                    ),
                    Value(
                        "Threads, last minute",
                        total(by_lock, _here("lockd_futex_lock_threads", CONTENTION)) + " > 0",
                        COUNT,
                    ),
                ],
                links={
                    "lock": link(
                        "lockd-lock", "This lock on all hosts", lock=cell("lock"), comm=cell("comm")
                    ),
                    "unit": link("lockd-service", "This unit on all hosts", unit=cell("unit")),
                },
            ),
            listing(
                "Code that held user locks",
                "One line per lock and function that released it after it had made threads wait, by the time"
                " that threads waited because of it, over the time range of the dashboard. The times are"
                " estimated from samples of releases. `(no release)` are waits that a timeout or a signal"
                " ended. A holder that has not released the lock yet is not in here: `lockd top` names the"
                " thread." + KINDS,
                {"holder": "Holder", "lock": "Lock", "unit": "Unit", "comm": "Process"},
                [
                    Value(
                        "Made threads wait",
                        total(
                            "holder, lock, unit, comm",
                            range_rate_of_new(
                                _here("lockd_futex_lock_holder_seconds_total", CONTENTION), HOST
                            ),
                        )
                        + " > 0",
                        SECONDS_PER_SECOND,
                    ),
                ],
                links={
                    "lock": link(
                        "lockd-lock", "This lock on all hosts", lock=cell("lock"), comm=cell("comm")
                    ),
                },
            ),
            graph(
                "Top user locks over time",
                "Time that threads were blocked on each lock: the ten largest values at each point in time."
                + PER_THREAD
                + KINDS,
                {
                    "{{lock}} ({{unit}} {{comm}})": top(
                        total(
                            "unit, comm, lock",
                            rate(_here("lockd_futex_lock_blocked_seconds_total", CONTENTION)),
                        )
                    )
                },
                SECONDS_PER_SECOND,
            ),
            waits(
                "Longest wait by user lock",
                "The largest single wait for each lock that ended in the last minute or was still going on."
                + KINDS,
                {
                    "{{lock}} ({{unit}} {{comm}})": top(
                        longest(
                            "unit, comm, lock",
                            peak(_here("lockd_futex_lock_max_blocked_us", CONTENTION, MINUTE)),
                        )
                    )
                },
            ),
            graph(
                "Time goroutines wait for Go mutexes",
                "As the Go runtime of each program counts it, for sync.Mutex and sync.RWMutex. A goroutine"
                " that waits for one blocks no thread, so the panels above have nothing of it." + PER_THREAD,
                {
                    "{{unit}} {{comm}}": top(
                        total("unit, comm", rate(_here("lockd_go_mutex_wait_seconds_total")))
                    )
                },
                SECONDS_PER_SECOND,
                width=24,
            ),
        ],
    )


def _increase(buckets: str, *matchers: str) -> str:
    return f"sum by (le) (increase({_here(buckets, *matchers)}[$__rate_interval]))"


def _kernel_locks() -> Row:
    by_site = "unit, comm, lock_type, lock, site"
    waited = total(by_site, range_rate_of_new(_here("lockd_kernel_lock_site_wait_seconds_total"), HOST))
    count = total(by_site, range_rate_of_new(_here("lockd_kernel_lock_site_waits_total"), HOST))
    return Row(
        "Kernel locks",
        [
            waits(
                "Longest kernel-lock wait over time",
                "The largest single wait for each type of kernel lock that ended in the last minute or was"
                " still going on. Spinlocks should stay far below a millisecond; mutexes and semaphores may"
                " be held while a disk works.",
                {
                    "{{lock_type}} {{unit}} {{comm}}": top(
                        longest("lock_type, unit, comm", peak(_here("lockd_kernel_lock_max_wait_us", MINUTE)))
                    )
                },
            ),
            graph(
                "Top processes by time waiting for kernel locks",
                "Time that threads of each process spend waiting for kernel locks." + PER_THREAD,
                {
                    "{{unit}} {{comm}}": top(
                        total("unit, comm", rate(_here("lockd_kernel_lock_wait_seconds_sum")))
                    )
                },
                SECONDS_PER_SECOND,
            ),
            listing(
                "Top kernel-lock sites",
                "One line per lock and kernel function that asks for it, most waiting time first, over the"
                " time range of the dashboard. A lock is named by its kernel symbol, else by a known name"
                " such as mmap_lock, else by its site. The site tells what the kernel was doing. The mean"
                " wait tells whether the holder keeps the lock long or too many ask for it. The line `other`"
                " sums up what has no line of its own.",
                {"lock": "Lock", "site": "Site", "lock_type": "Type", "unit": "Unit", "comm": "Process"},
                [
                    Value("Waiting", f"{waited} > 0", SECONDS_PER_SECOND),
                    Value("Waits", f"{count} > 0", PER_SECOND),
                    Value("Mean wait", f"{waited} / ({count} > 0)", SECONDS),
                ],
                links={"lock": link("lockd-lock", "This lock on all hosts", lock=cell("lock"))},
            ),
            listing(
                "Code that held kernel locks",
                "One line per lock and kernel function that released it after it had made threads wait, by"
                " the time that threads waited because of it, over the time range of the dashboard. The times"
                " are estimated from samples of releases. `(no release)` are waits that a timeout or a signal"
                " ended. The process is the one that waited. Spinlocks, rwlocks and rt_mutexes are not in"
                " here.",
                {"holder": "Holder", "lock": "Lock", "lock_type": "Type", "unit": "Unit", "comm": "Process"},
                [
                    Value(
                        "Made threads wait",
                        total(
                            "holder, lock, lock_type, unit, comm",
                            range_rate_of_new(_here("lockd_kernel_lock_holder_seconds_total"), HOST),
                        )
                        + " > 0",
                        SECONDS_PER_SECOND,
                    ),
                ],
                links={"lock": link("lockd-lock", "This lock on all hosts", lock=cell("lock"))},
            ),
            durations(
                "Kernel-lock wait: $lock_type",
                "One panel for each type chosen at the top of the dashboard. Spinlock waits beyond a"
                " millisecond are unusual.",
                _increase("lockd_kernel_lock_wait_seconds_bucket", 'lock_type=~"$lock_type"'),
                width=24,
                repeat="lock_type",
            ),
        ],
    )


def _kernel_holds() -> Row:
    taken = total("lock_type", rate(_here("lockd_kernel_lock_acquisitions_total")))
    waited = total("lock_type", rate(_here("lockd_kernel_lock_wait_seconds_count")))
    return Row(
        "Kernel locks: every acquisition and hold (mode all)",
        [
            graph(
                "Top processes by time holding kernel locks",
                MODE_ALL
                + "Time that threads of each process hold mutexes, rwsems and semaphores of the kernel,"
                " counted when a hold ends. 1 s/s means that, on average, one lock is held all the time. Many"
                " readers may hold the same rwsem.",
                {
                    "{{unit}} {{comm}}": top(
                        total("unit, comm", rate(_here("lockd_kernel_lock_hold_seconds_sum")))
                    )
                },
                SECONDS_PER_SECOND,
            ),
            graph(
                "Kernel locks taken, by type",
                MODE_ALL
                + "Acquisitions of mutexes, rwsems and semaphores of the kernel, whether they had to be"
                " waited for or not.",
                {"{{lock_type}}": taken},
                PER_SECOND,
            ),
            graph(
                "Share of acquisitions that had to wait",
                MODE_ALL
                + "Of all acquisitions of a type of kernel lock, those that were waited for. A lock may be"
                " held for long and do no harm as long as nobody else asks for it; this is where holding"
                " hurts.",
                {"{{lock_type}}": f"{waited} / ({taken} > 0)"},
                SHARE,
            ),
            durations(
                "Time kernel locks are held",
                MODE_ALL + "Choose processes at the top of the dashboard to see theirs.",
                _increase("lockd_kernel_lock_hold_seconds_bucket"),
                what="holds",
            ),
        ],
        is_collapsed=True,
    )


def _off_cpu() -> Row:
    reason = 'reason=~"$reason"'
    woken = _here("lockd_offcpu_waker_seconds_total")
    return Row(
        "Off the CPU",
        [
            graph(
                "Off-CPU time by reason",
                "Time that threads spent off the CPU until a wake-up, by what they waited for, stacked. This"
                " includes idle threads: one that sleeps or polls for work all the time adds 1 s/s, and that"
                " is no problem. Look for changes, and for reasons that should not be there, such as disk"
                " input for a program that keeps everything in memory. A wait is counted when it ends.",
                {"{{reason}}": total("reason", rate(_here("lockd_offcpu_blocked_seconds_sum", reason)))},
                SECONDS_PER_SECOND,
                is_stacked=True,
            ),
            waits(
                "Longest uninterruptible wait",
                "The largest single wait in state D that ended in the last minute or was still going on, by"
                " reason and process. Signals do not end such a wait, though SIGKILL may. The thread waits"
                " for a disk, a network file system or a kernel lock. Tens of seconds mostly mean that a"
                " device is in trouble.",
                {
                    "{{reason}} {{unit}} {{comm}}": top(
                        longest(
                            "reason, unit, comm",
                            peak(
                                _here(
                                    "lockd_offcpu_max_blocked_us", reason, 'state="uninterruptible"', MINUTE
                                )
                            ),
                        )
                    )
                },
            ),
            durations(
                "Runqueue time",
                "This is time in which a thread could run but had no processor. A cloud above some 10 ms"
                " means that the host, or the cgroup's CPU limit, is too small for the load.",
                _increase("lockd_offcpu_runqueue_seconds_bucket"),
            ),
            graph(
                "Top processes by runqueue time",
                "Time that threads of each process were ready to run and had no processor. 1 s/s means that"
                " one more processor would have been busy all the time.",
                {
                    "{{unit}} {{comm}}": top(
                        total("unit, comm", rate(_here("lockd_offcpu_runqueue_seconds_sum")))
                    )
                },
                SECONDS_PER_SECOND,
            ),
            graph(
                "Wakers",
                "Who ended the waits: off-CPU time by the name of the process that woke the sleeper. For lock"
                " waits this is usually the holder that released the lock. A wait that a timer or a device"
                " ended appears under the process that it interrupted, or as irq on an idle processor."
                " unknown is a wake-up that no program saw. Idle waits are part of it.",
                {"{{waker}}": top(total("waker", rate(woken)))},
                SECONDS_PER_SECOND,
            ),
            listing(
                "Who waits for whom",
                "Off-CPU time by the process that waited and the process that woke it, over the time range of"
                " the dashboard. Choose a process at the top to see what a slow service depends on.",
                {"unit": "Unit", "comm": "Process", "waker": "Woken by"},
                [
                    Value(
                        "Waited",
                        top(total("unit, comm, waker", range_rate_of_new(woken, HOST)), 50),
                        SECONDS_PER_SECOND,
                    )
                ],
                width=12,
                height=8,
            ),
            durations(
                "Off-CPU time: $reason",
                "One panel for each reason chosen at the top of the dashboard. A row that stands out all the"
                " time shows waits of a regular length, which are mostly timers.",
                _increase("lockd_offcpu_blocked_seconds_bucket", reason),
                width=24,
                repeat="reason",
            ),
        ],
    )


def _all_futex_waits() -> Row:
    return Row(
        "All futex waits, idle ones included",
        [
            graph(
                "Threads blocked in a futex wait, by kind",
                "All threads blocked in a futex wait, by the kind that lockd has found for the wait. Most are"
                " of kind cond: workers that wait for work. This is not contention.",
                {"{{kind}}": total("kind", _here("lockd_futex_waiting"))},
                COUNT,
                is_stacked=True,
            ),
            graph(
                "Futex waits in which the thread was blocked",
                "Futex waits per second that took a thread off the processor, by kind. A wait is counted when"
                " it ends. Many waits of kind lock with hardly any blocked time mean that threads contend for"
                " a lock that is held for a very short time.",
                {"{{kind}}": total("kind", rate(_here("lockd_futex_blocked_seconds_count")))},
                PER_SECOND,
            ),
        ],
        is_collapsed=True,
    )


def _futex_calls() -> Row:
    return Row(
        "Every futex call (mode calls)",
        [
            graph(
                "Futex calls",
                MODE_CALLS
                + "Calls per second that asked to wait, whether they blocked or not, by kind, and calls that"
                " wake or requeue. Many more waits than blocked ones mean that threads contend for a lock"
                " that is released before they can sleep.",
                {
                    "wait ({{kind}})": total("kind", rate(_here("lockd_futex_waits_total"))),
                    "wake": f"sum({rate(_here('lockd_futex_wakes_total'))})",
                },
                PER_SECOND,
            ),
            graph(
                "Failed futex calls",
                MODE_CALLS
                + "Failed calls per second by error. EAGAIN is ordinary: the value of the futex changed"
                " before the caller could sleep. ETIMEDOUT is a wait that reached its time limit.",
                {"{{error}}": total("error", rate(_here("lockd_futex_errors_total")))},
                PER_SECOND,
            ),
            graph(
                "Time spent working in futex calls",
                MODE_CALLS
                + "Time that futex calls took, less the time for which the thread was blocked in them, by"
                " process. This is the cost of locking itself. Time in which a thread was preempted in a call"
                " is included. 1 s/s means that at all times one thread works in such a call.",
                {"{{unit}} {{comm}}": top(total("unit, comm", rate(_here("lockd_futex_sys_seconds_total"))))},
                SECONDS_PER_SECOND,
            ),
            graph(
                "Longest work in one futex call",
                MODE_CALLS + "The longest duration of a call less its blocked time, over the last minute."
                " Milliseconds mean contention on the kernel's own futex tables, or preemption.",
                {
                    "{{unit}} {{comm}}": top(
                        longest("unit, comm", peak(_here("lockd_futex_max_sys_us", MINUTE)))
                    )
                },
                MICROSECONDS,
                is_logarithmic=True,
            ),
        ],
        is_collapsed=True,
    )


def _own(metric: str) -> str:
    """Return a selector of series about lockd itself, which have no unit and no process."""
    return select(metric, HOST)


def _lockd() -> Row:
    ticks = f"sum by (le) ({rate(_own('lockd_tick_seconds_bucket'))})"
    lateness = f"sum by (le) ({rate(_own('lockd_tick_late_seconds_bucket'))})"
    run_seconds = total("program", rate(_own("lockd_program_run_seconds_total")))
    runs = total("program", rate(_own("lockd_program_runs_total")))
    return Row(
        "lockd's own cost",
        [
            graph(
                "Share of the machine, and the budget",
                "Share of the CPU time of the whole machine that each part of lockd takes: the BPF programs"
                " by their own measurements, the sampler, the namer and the exporter. The values of the last"
                " two are means over a minute. Above the budget lockd leaves out detail; the cost of the"
                " exporter has no such effect.",
                {
                    "{{part}}": total("part", _own("lockd_cpu_ratio")),
                    "budget": f"max({_own('lockd_cpu_budget_ratio')})",
                },
                SHARE,
                is_stacked=True,
                reference="budget",
            ),
            graph(
                "Restraint",
                "What lockd leaves out to keep to its CPU budget: 0 nothing; 1 stacks, and so new names;"
                " 2 threads and locks as well; 3 everything but totals.",
                {"level": f"max({_own('lockd_restraint_level')})"},
                LEVEL,
                maximum=3,
            ),
            graph(
                "CPU by process",
                "Processor time of each process of lockd; 100% is one processor. The work of the BPF programs"
                " runs in the threads that they observe, and is not included.",
                {"{{process}}": total("process", rate(_own("lockd_cpu_seconds_total")))},
                SHARE,
                width=8,
                is_stacked=True,
            ),
            graph(
                "CPU of BPF programs",
                "Processor time of each BPF program, as the kernel counts it; 100% is one processor. Empty"
                " where the kernel keeps no such statistics (kernel.bpf_stats_enabled). The cost of calling"
                " a program is not included.",
                {"{{program}}": run_seconds},
                SHARE,
                width=8,
                is_stacked=True,
            ),
            graph(
                "Time per run of a BPF program",
                "Mean duration of one run of each BPF program. Tens to a few hundred nanoseconds are"
                " expected. Multiplied by the number of context switches (and of futex calls in mode calls),"
                " it is the effect on the host.",
                {"{{program}}": f"{run_seconds} / {runs}"},
                SECONDS,
                width=8,
            ),
            graph(
                "Resident memory by process",
                "Resident memory of each process of lockd. It should not keep growing.",
                {"{{process}}": total("process", _own("lockd_resident_bytes"))},
                BYTES,
                width=8,
                is_stacked=True,
            ),
            graph(
                "Tick work",
                "How long one tick (flip the maps, drain, fold) takes: half of the ticks take less than the"
                " median, 99 in 100 less than the 99% line. It must stay well below the period, 50 ms by"
                " default. Time in which the sampler has no processor is included.",
                quantiles(ticks),
                SECONDS,
                width=8,
            ),
            graph(
                "Tick lateness",
                "How late ticks start. If the sampler uses little CPU time meanwhile (CPU by process), the"
                " host or its cgroup has none left for it. The alert LockdTicksLate fires when the 99% line"
                " stays above 65.5 ms.",
                quantiles(lateness),
                SECONDS,
                width=8,
                limits={"orange": 0.065536},
            ),
            graph(
                "Dropped events",
                "Events lost per second, by map and reason: every event here is missing from the totals"
                " above. The reasons recursion, return_missed, release_missed, taken_unseen, holder_gone and"
                " too_nested are ordinary: the kernel skips some runs of programs, and of some holds of"
                " kernel locks no beginning or no end is seen. Other reasons should not occur at all.",
                {"{{map}}: {{reason}}": total("map, reason", rate(_own("lockd_dropped_events_total")))},
                PER_SECOND,
                width=8,
            ),
            graph(
                "Map fill",
                "How full each BPF map was when it was last read. If futex, offcpu, kernel_locks or"
                " kernel_holds is full, new events count as other (raise maps.entries). If threads (raise"
                " maps.threads), kernel_holding or a map whose name ends in _over is full, new events are"
                " lost. If stacks or captures is full, only stacks are missing.",
                {
                    "{{map}}": longest(
                        "map", f"{_own('lockd_map_entries')} / ({_own('lockd_map_capacity')} > 0)"
                    )
                },
                SHARE,
                width=8,
                maximum=1,
            ),
            graph(
                "Stacks not recorded",
                "Stack traces per second that could not be taken, by reason. The waits themselves are counted"
                " all the same; only the place in the code is unknown.",
                {"{{reason}}": total("reason", rate(_own("lockd_stack_misses_total")))},
                PER_SECOND,
                width=8,
            ),
            graph(
                "Series by family",
                "Time series that lockd exports, by family, stacked. The sum has a limit (series.max), so it"
                " levels off on a host with very many units and processes.",
                {"{{family}}": total("family", _own("lockd_series"))},
                COUNT,
                width=8,
                is_stacked=True,
            ),
            graph(
                "Series overflow",
                "Label sets per second that were new and got no series of their own because the limit of"
                " series was reached. They count as other: totals stay right, names are missing. For"
                " families of locks the limit is series.top_locks, and a host with more contended locks than"
                " that always has some overflow. If it matters, raise this or series.max, or narrow the"
                " filter.",
                {"{{family}}": total("family", rate(_own("lockd_series_overflow_total")))},
                PER_SECOND,
                width=8,
            ),
            graph(
                "Ticks",
                "Rounds of the sampler per second: 20 with the default period of 50 ms, five to nine on a"
                " quiet host, and 5 at restraint level 3. There are fewer if ticks are late, or come while"
                " BPF programs may still be writing to the maps that are to be drained.",
                {"ticks": f"sum({rate(_own('lockd_ticks_total'))})"},
                PER_SECOND,
                width=8,
            ),
            listing(
                "Hooks attached",
                "Every place in the kernel that lockd listens to, and by what mechanism. Some places need"
                " two: one for the entry of a function and one for its return. If a line says not attached,"
                " numbers are missing above, or waits seem to go on for ever; `lockd doctor` on the host says"
                " why.",
                {"program": "Program", "hook": "Hook", "mechanism": "Mechanism"},
                [Value("State", longest("program, hook, mechanism", _own("lockd_hook_attached")), LEVEL)],
                width=12,
                height=8,
                states={0: ("not attached", "red"), 1: ("attached", "green")},
            ),
            listing(
                "Processes that lockd cannot see fully",
                "Processes with waits that lockd cannot see or name by itself, and the limit that applies:"
                " docs/metrics.md, under lockd_advised_processes, says what helps.",
                {"unit": "Unit", "comm": "Process", "advice": "Limit"},
                [
                    Value(
                        "Processes",
                        total("unit, comm, advice", _here("lockd_advised_processes")) + " > 0",
                        COUNT,
                    )
                ],
                width=12,
                height=8,
            ),
            listing(
                "Build",
                "The version that runs, and for how long its counters have counted: since lockd started. A"
                " start that takes over the counts of the start before does not reset this time.",
                {"version": "Version", "kernel": "Kernel", "python": "Python"},
                [
                    Value(
                        "Counting for",
                        f"(time() - {longest('job, instance', _own('lockd_start_time_seconds'))})"
                        f" * on (job, instance) group_right () {_own('lockd_build_info')}",
                        SECONDS,
                    )
                ],
                height=4,
            ),
        ],
    )
