"""The kernels on which lockd is tested: the one list for continuous integration, README and skips."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.machine.kernel import NEWEST


@dataclass(frozen=True)
class Kernel:
    """A kernel to test: the newest package of a series, or of NEWEST, in a suite of Debian."""

    series: str
    suite: str
    only_thorough: str = ""
    """Why `make test` leaves the kernel to `make test-all`; empty if it does not."""


BETWEEN = "what the oldest and the newest kernel have in common seldom differs between them"
KERNELS = (
    Kernel("5.10", "bullseye-security"),
    Kernel("6.1", "bookworm-security", BETWEEN),
    Kernel("6.12", "bookworm-security", BETWEEN),
    Kernel(NEWEST, "sid"),
)
LONGEST_FIRST = (KERNELS[2], KERNELS[3], KERNELS[0], KERNELS[1])
"""The kernels by how long their tests take, longest first. Most of it is for the kernel test module."""

LEFT_OUT = {
    "test_adoption.py::test_nothing_is_lost_and_no_counter_falls": "starts under load take minutes there",
    "test_adoption.py::test_what_does_not_fit_is_let_go": "about lockd, which is the same on any kernel",
    "test_adoption.py::test_counts_that_make_no_sense_begin_at_zero": "the same",
    "test_adoption.py::test_an_interrupted_drain_is_counted_whatever_comes_next": "the same",
    "test_adoption.py::test_settings_that_load_the_same_programs": "the same",
    "test_bcc_versions.py": "about releases of bcc, not of the kernel",
    "test_bounds.py": "about the sampler when every table of it is full; filling them takes too long there",
    "test_cost.py": "about shares of processor time, which an emulated processor does not tell",
    "test_cgroups.py": "about names of control groups, which are the same on any kernel",
    "test_doctor.py::test_run_without_btf_says_the_same": "about what is hidden by mounts, on any kernel",
    "test_doctor.py::test_tracefs_is_mounted_for_lockd_alone": "the same",
    "test_doctor.py::test_without_btf_nothing_runs": "the same",
    "test_doctor.py::test_without_the_right_to_mount_it_doctor_says_how": "the same",
    "test_ends.py::test_a_churn_of_short_lived_threads_and_locks": "50,000 threads take half an hour there",
    "test_ends.py::test_a_storm_of_short_lived_processes": "so do 20,000 processes",
    "test_exporter_lost.py": "about processes of lockd, which are the same on any kernel",
    "test_faults.py": "the same; its faults take minutes",
    "test_go.py": "about programs, which no kernel sees as such",
    "test_held_back.py": "about the sampler, on maps that no program fills",
    "test_holders.py::test_the_holder_is_in_the_table_and_in_the_profiles": "about what is made of samples, "
    "the same on any kernel",
    "test_holders.py::test_few_samples_are_right_on_average": "about a number that the programs compare with",
    "test_holders.py::test_without_samples_nothing_of_it_is_there": "about programs without what is tested; "
    "compiling takes a minute there each time",
    "test_holders.py::test_it_is_found_in_other_languages_and_libraries": "about programs in many languages, "
    "which no kernel sees as such",
    "test_holders.py::test_the_mutex_profile_of_go_agrees": "the same",
    "test_lock_causes.py::test_what_the_holder_does_is_found": "about reasons of being off the CPU, as "
    "test_offcpu.py is; that in a pid namespace is run",
    "test_lock_causes.py::test_a_lock_that_does_not_store_its_owner": "about programs in many languages",
    "test_lock_causes.py::test_the_holder_of_a_short_hold_needs_not_be_followed": "nothing is short there",
    "test_lock_causes.py::test_a_holder_that_is_throttled_is_on_the_run_queue": "about shares of processor "
    "time",
    "test_lock_causes.py::test_a_chain_of_locks_ends_at_the_code_that_causes_it": "computing takes longer "
    "there than its sleeps",
    "test_idle_programs.py": "about programs and servers, which no kernel sees as such",
    "test_installed.py": "about where lockd is installed, not about the kernel",
    "test_java.py": "about programs, which no kernel sees as such",
    "test_kept_results.py": "about compiling, which takes a minute there each time",
    "test_futex_modes.py::test_both_modes_count_the_same_waits": "about programs in many languages, which no "
    "kernel sees as such; test_futex.py tests both modes there",
    "test_kernel_holding.py": "about the sampler, on maps that no program fills",
    "test_kernel_locks.py": "which locks a system call takes differs between kernels; of those that "
    "test_lock_module.py takes everything is known",
    "test_layout.py": "about what bcc compiles, which takes a minute there each time",
    "test_lock_names.py": "about programs in many languages, which no kernel sees as such",
    "test_names.py": "about names that processes have on any kernel",
    "test_nothing_left.py::test_the_daemon_killed_leaves_nothing[auto]": "the same as on any kernel; what is "
    "special is events of kprobes",
    "test_nothing_left.py::test_the_daemon_killed_leaves_nothing[fentry]": "the same",
    "test_nothing_left.py::test_attaching_and_detaching_often_leaves_nothing[auto]": "the same",
    "test_offcpu.py::test_every_reason_that_a_program_can_provoke": "its program times its calls "
    "from outside, which adds milliseconds there to a clone; the reasons are not the kernel's matter",
    "test_overhead.py": "about how long programs run, which an emulated processor does not tell",
    "test_performance_schema.py": "about a server, which is the same on any kernel",
    "test_postgresql.py": "about a server, which is the same on any kernel",
    "test_profiles.py": "about what is made of the daemon's tables, which other tests look at there",
    "test_storm.py": "about shares of processor time, which an emulated processor does not tell",
    "test_rings.py": "about locks in user space and the sampler, the same on any kernel",
    "test_reload.py": "about processes of lockd and its configuration, which are the same on any kernel",
    "test_server_names.py": "about a server, which is the same on any kernel",
    "test_signals.py": "about processes of lockd, which are the same on any kernel",
    "test_tick_cost.py": "about what the sampler does with entries, which are the same on any kernel",
    "test_trace_mutex.py": "about functions of C libraries; compiling takes a minute there each time",
    "test_trace_klock.py": "about waits that system calls make, as test_kernel_locks.py; of these "
    "kernels test_trace_klock_module.py says more",
    "test_started.py": "about processes of lockd, which are the same on any kernel",
    "test_start_failures.py": "the same",
    "test_service_restarts.py": "about systemd, which the machines of tests/system have",
    "test_sys_time.py": "about which calls are timed, on any kernel; to compile a trace takes a minute",
    "test_totals.py": "about maps that are full; filling them takes too long there",
    "test_trace_events.py": "about tracepoints and system calls, which are the same there",
    "test_trace_futex.py": "about what is made of futex calls, which test_futex.py tests there; to "
    "compile a trace takes a minute each time",
    "test_trace_futex_beside.py": "the same, beside others",
    "test_trace_futex_stacks.py": "the same, of their stacks, and needs a compiler",
    "test_trace_offcpu.py": "the same of waits, which test_offcpu.py tests there",
    "test_trace_signals.py": "about a tracepoint that is the same there",
    "test_trace_shared.py": "about how the one-shot tools begin, print and end, on any kernel",
    "test_trace_stacks.py": "about functions of programs and tracepoints, and needs a compiler; functions of "
    "the kernel are in test_trace_kernel_functions.py",
    "test_waiting.py": "about waits that go on for long, which would take too long for all kernels together",
    "test_wait_samples.py::test_each_place_and_each_waker_has_its_share_of_the_time": "takes more samples "
    "than such a machine can; what the chances are is the same on any kernel",
    "test_wait_samples.py::test_functions_of_python_are_in_the_profile": "the same; that the programs read "
    "functions of Python is seen in test_holders.py",
    "test_holders.py::test_the_function_of_python_that_keeps_the_interpreter_is_found": "computes all the "
    "time, which leaves no processor for the names of so many samples; CPython is the same on any kernel",
    "test_web.py": "about HTTP and the processes of lockd, which are the same on any kernel",
    "test_who_has_series.py": "about the sampler's tables, the same on any kernel",
    "test_windows.py": "about the sampler's maps, the same on any kernel; one that preempts itself leaves "
    "programs out in this storm, which the daemon counts and this test's collector does not",
}
"""Tests of tests/kernel that are not run in machines, and why."""

ONLY_ON = {
    "test_trace_klock_module.py": (
        "6.12",
        "the programs are the daemon's, which test_lock_module.py tests everywhere; what is made of them is "
        "the same on any kernel",
    ),
    "test_kernel_holders.py::test_a_thread_that_gives_up_and_lets_another_in_is_no_holder": (
        f"6.1 6.12 {NEWEST}",
        "readers of 5.10 spin for an rwsem and may get it without sleeping (until 617f3ef95177, 5.11)",
    ),
    "test_trace_offcpu_originals.py": ("5.10", "about what another tool says, which is the same"),
    "test_trace_kernel_functions.py::test_side_by_side_with_bcc": (NEWEST, "the same"),
    "test_trace_kernel_functions.py::test_calls_of_many_functions": (
        f"5.10 {NEWEST}",
        "about many at a time, for which there is a way of before 5.18 and one of since then",
    ),
    "test_trace_kernel_functions.py::test_offsets_and_addresses_are_those_of_kallsyms": (
        NEWEST,
        "about what is printed, which is the same",
    ),
    "test_trace_kernel_functions.py::test_events": (NEWEST, "the same"),
}
"""Tests that are run on kernels of these series alone, and why."""


A_START = "each of its daemons takes a minute to start there, and what it tests seldom depends on the kernel"
ONLY_THOROUGH = {
    "test_adoption.py": A_START,
    "test_nothing_left.py": A_START,
    "test_offcpu.py::test_a_thread_that_spins_waits_for_the_cpu_only": "every instruction costs there",
    "test_offcpu.py::test_a_wait_that_goes_on_is_in_the_maximum_only": "the same as of futex waits",
    "test_futex_modes.py": "about mode calls as well, see MODE_CALLS",
    "test_holders.py::test_the_code_that_made_threads_wait_is_found[rwlock-blocked]": "half a minute there",
    "test_holders.py::test_the_code_that_made_threads_wait_is_found[pi-blocked]": "half a minute there",
    "test_older_waits.py::test_an_uninterruptible_wait": A_START,
    "test_older_waits.py::test_waits_that_end_later_are_counted_once": A_START,
    "test_older_waits.py::test_where_the_scheduler_does_not_tell_since_when": A_START,
    "test_older_waits.py::test_threads_that_come_and_go_meanwhile_are_counted_once": A_START,
    "test_trace_kernel_functions.py::test_calls_are_counted_exactly[kprobe]": A_START,
    "test_trace_kernel_functions.py::test_calls_of_many_functions": A_START,
    "test_trace_kernel_functions.py::test_side_by_side_with_bcc": A_START,
    "test_trace_kernel_functions.py::test_offsets_and_addresses_are_those_of_kallsyms": A_START,
    "test_trace_kernel_functions.py::test_events": A_START,
}
"""Tests that `make test` does not run in machines, though it may run them on the host, and why."""


MODE_CALLS = ("calls", "tracepoint")
"""Parameters of the tests of mode calls, which `make test` leaves out in machines as well: the mode takes one
more daemon, and its hooks slow everything down there."""


def left_out(series: str, gate: bool) -> list[str]:
    """Return the tests of tests/kernel to leave out on a kernel; if `gate`, to leave out of `make test`."""
    elsewhere = [test for test, (only, _) in ONLY_ON.items() if series not in only.split()]
    return [*LEFT_OUT, *elsewhere, *(ONLY_THOROUGH if gate else ())]


@dataclass(frozen=True)
class Skip:
    """An allowed skip: of tests and with a reason that match these patterns, on kernels of these series."""

    series: str
    test: str
    reason: str
    why: str

    def allows(self, series: str, test: str, reason: str) -> bool:
        return (
            series in self.series.split()
            and re.search(self.test, test) is not None
            and re.search(self.reason, reason) is not None
        )


SKIPS = (
    Skip(
        "5.10 6.1",
        "futex2",
        "lacks what futex2 needs",
        "futex_wait() and its kin came with 0f4b5f972216 (6.7)",
    ),
)

COMPLAINTS = re.compile(
    r"\bBUG\b|\bWARNING\b|\bOops\b|Call Trace|cut here|general protection|blocked for more than"
    r"|possible (circular|recursive) locking|inconsistent lock state|detected stall|soft lockup|refcount_t"
)
"""Words in the log of a kernel that is not well."""
WAITS_FOR_DISK = re.compile(r"^.* blocked in I/O wait for more than (?:.*\n)*?.*</TASK>$", re.MULTILINE)
"""What a kernel since 7.0 says of a task that waits for the emulator's disk. While all threads wait, the
machine's clock leaps to the next timer, whatever time the host's disk takes."""


def kernel_of(series: str) -> Kernel:
    """Return the kernel of that series. Raises ValueError."""
    for kernel in KERNELS:
        if kernel.series == series:
            return kernel
    known = ", ".join(kernel.series for kernel in KERNELS)
    raise ValueError(f"{series}: not a tested kernel; there are {known}")
