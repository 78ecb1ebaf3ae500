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

LEFT_OUT_BY_REASON = {
    "It is about lockd's processes, tables and output, which are the same on every kernel.": (
        "test_adoption.py::test_what_does_not_fit_is_let_go",
        "test_adoption.py::test_counts_that_make_no_sense_begin_at_zero",
        "test_adoption.py::test_an_interrupted_drain_is_counted_whatever_comes_next",
        "test_adoption.py::test_settings_that_load_the_same_programs",
        "test_cgroups.py",
        "test_exporter_lost.py",
        "test_faults.py",
        "test_held_back.py",
        "test_holders.py::test_few_samples_are_right_on_average",
        "test_holders.py::test_the_holder_is_in_the_table_and_in_the_profiles",
        "test_installed.py",
        "test_kernel_holding.py",
        "test_names.py",
        "test_profiles.py",
        "test_reload.py",
        "test_rings.py",
        "test_signals.py",
        "test_start_failures.py",
        "test_started.py",
        "test_tick_cost.py",
        "test_web.py",
        "test_who_has_series.py",
    ),
    "It is about programs in many languages, or about a server, which run alike on every kernel.": (
        "test_futex_modes.py::test_both_modes_count_the_same_waits",
        "test_go.py",
        "test_holders.py::test_it_is_found_in_other_languages_and_libraries",
        "test_holders.py::test_the_function_of_python_that_keeps_the_interpreter_is_found",
        "test_holders.py::test_the_mutex_profile_of_go_agrees",
        "test_idle_programs.py",
        "test_java.py",
        "test_lock_causes.py::test_a_lock_that_does_not_store_its_owner",
        "test_lock_names.py",
        "test_mariadb_holders.py",
        "test_performance_schema.py",
        "test_postgresql.py",
        "test_server_names.py",
    ),
    "It is about shares of processor time, which an emulated processor does not show.": (
        "test_cost.py",
        "test_lock_causes.py::test_a_chain_of_locks_ends_at_the_code_that_causes_it",
        "test_lock_causes.py::test_a_holder_that_is_throttled_is_on_the_run_queue",
        "test_lock_causes.py::test_the_holder_of_a_short_hold_needs_not_be_followed",
        "test_overhead.py::test_a_call_that_does_not_block_runs_few_instructions",
        "test_storm.py",
    ),
    "It takes too long in a machine: it compiles often, fills large maps, or makes very many threads.": (
        "test_adoption.py::test_nothing_is_lost_and_no_counter_falls",
        "test_bounds.py",
        "test_ends.py::test_a_churn_of_short_lived_threads_and_locks",
        "test_ends.py::test_a_storm_of_short_lived_processes",
        "test_holders.py::test_without_samples_nothing_of_it_is_there",
        "test_kept_results.py",
        "test_layout.py",
        "test_sys_time.py",
        "test_totals.py",
        "test_trace_mutex.py",
        "test_wait_samples.py::test_each_place_and_each_waker_has_its_share_of_the_time",
        "test_wait_samples.py::test_functions_of_python_are_in_the_profile",
        "test_waiting.py",
    ),
    "It is about releases of bcc, about hidden files or about systemd, which other tiers test.": (
        "test_bcc_versions.py",
        "test_doctor.py::test_run_without_btf_says_the_same",
        "test_doctor.py::test_tracefs_is_mounted_for_lockd_alone",
        "test_doctor.py::test_without_btf_nothing_runs",
        "test_doctor.py::test_without_the_right_to_mount_it_doctor_says_how",
        "test_service_restarts.py",
    ),
    "The daemon's tests that run in machines have the same hooks, and each trace compiles for a minute.": (
        "test_trace_events.py",
        "test_trace_futex.py",
        "test_trace_futex_beside.py",
        "test_trace_futex_stacks.py",
        "test_trace_offcpu.py",
        "test_trace_shared.py",
        "test_trace_signals.py",
        "test_trace_stacks.py",
    ),
    "Which locks a system call takes differs between kernels; what the test module takes is known.": (
        "test_kernel_locks.py",
        "test_trace_klock.py",
    ),
    "Only events of kprobes can outlive a killed daemon, and the tests with kprobes run in machines.": (
        "test_nothing_left.py::test_attaching_and_detaching_often_leaves_nothing[auto]",
        "test_nothing_left.py::test_the_daemon_killed_leaves_nothing[auto]",
        "test_nothing_left.py::test_the_daemon_killed_leaves_nothing[fentry]",
    ),
    "The reasons are lockd's own. Timed from outside, a clone takes milliseconds longer in a machine.": (
        "test_lock_causes.py::test_what_the_holder_does_is_found",
        "test_offcpu.py::test_every_reason_that_a_program_can_provoke",
    ),
    "A kernel that preempts itself skips programs in this storm, and the test does not count these skips.": (
        "test_windows.py",
    ),
}
"""Tests of tests/kernel that are not run in machines, by the reason."""
LEFT_OUT = {test: reason for reason, tests in LEFT_OUT_BY_REASON.items() for test in tests}

ONLY_ON = {
    "test_trace_klock_module.py": (
        "6.12",
        "the programs are the daemon's, which test_lock_module.py tests on every kernel; what the tool "
        "prints is the same everywhere",
    ),
    "test_kernel_holders.py::test_a_thread_that_gives_up_and_lets_another_in_is_no_holder": (
        f"6.1 6.12 {NEWEST}",
        "readers of 5.10 spin for an rwsem and may get it without sleeping (until 617f3ef95177, 5.11)",
    ),
    "test_kernel_sites.py::test_long_waits_count_where_they_happen_beside_short_ones_of_the_same_thread": (
        f"6.1 6.12 {NEWEST}",
        "readers of 5.10 spin for an rwsem, and get it in the short waits without sleeping",
    ),
    "test_trace_offcpu_originals.py": ("5.10", "the other tool says the same on every kernel"),
    "test_trace_kernel_functions.py::test_side_by_side_with_bcc": (
        NEWEST,
        "the other tool says the same on every kernel",
    ),
    "test_trace_kernel_functions.py::test_calls_of_many_functions": (
        f"5.10 {NEWEST}",
        "many functions are attached in one way before 5.18, and in another way since then",
    ),
    "test_trace_kernel_functions.py::test_offsets_and_addresses_are_those_of_kallsyms": (
        NEWEST,
        "what is printed is the same on every kernel",
    ),
    "test_trace_kernel_functions.py::test_events": (NEWEST, "what is printed is the same on every kernel"),
}
"""Tests that are run on kernels of these series alone, and why."""


A_START = "each of its daemons takes a minute to start there, and what it tests seldom depends on the kernel"
ONLY_THOROUGH = {
    "test_adoption.py": A_START,
    "test_nothing_left.py": A_START,
    "test_offcpu.py::test_a_thread_that_spins_waits_for_the_cpu_only": "emulated instructions take long",
    "test_offcpu.py::test_a_wait_that_goes_on_is_in_the_maximum_only": "a test of futex waits shows the same",
    "test_futex_modes.py": "it needs mode calls as well, see MODE_CALLS",
    "test_holders.py::test_the_code_that_made_threads_wait_is_found[rwlock-blocked]": "half a minute there",
    "test_holders.py::test_the_code_that_made_threads_wait_is_found[pi-blocked]": "half a minute there",
    "test_older_waits.py::test_a_32_bit_program_that_was_stuck_before": A_START,
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
    Skip(
        "5.10",
        "the_verifier_examines",
        "does not say what its verifier examined",
        "the number came with aba64c7da983 (5.16)",
    ),
    Skip(
        "5.10 6.1",
        "takes_our_word_for_a_struct",
        "has no bpf_rdonly_cast",
        "the function came with a35b9af4ec2c (6.2)",
    ),
)

COMPLAINTS = re.compile(
    r"\bBUG\b|\bWARNING\b|\bOops\b|Call Trace|cut here|general protection|blocked for more than"
    r"|possible (circular|recursive) locking|inconsistent lock state|detected stall|soft lockup|refcount_t"
)
"""Words in the log of a kernel that is not well."""
WAITS_FOR_DISK = re.compile(
    r"^.* blocked in I/O wait for more than (?:.*\n)*?.*</TASK>$"
    r"|^.* blocked for more than (?:(?!.* R13: ).*\n)*?.* io_schedule\+(?:.*\n)*?.* R13: .*$",
    re.MULTILINE,
)
"""What a kernel since 7.0, and one before, says of a task that waits for the emulator's disk. While all
threads wait, the machine's clock leaps to the next timer, whatever time the host's disk takes."""


def kernel_of(series: str) -> Kernel:
    """Return the kernel of that series. Raises ValueError."""
    for kernel in KERNELS:
        if kernel.series == series:
            return kernel
    known = ", ".join(kernel.series for kernel in KERNELS)
    raise ValueError(f"{series}: not a tested kernel; there are {known}")
