"""The parts and the source files that the programs need to know who releases locks."""

from __future__ import annotations

import pytest

from lockd.load.hooks import HOLDERS, parts_of
from lockd.load.source import assemble

USER, KERNEL = "daemon/user_releases.bpf.c", "daemon/kernel_releases.bpf.c"
ALONE = {"sched_process_exec", "sched_switch", "sched_waking"}


@pytest.mark.parametrize(
    ("programs", "files"),
    [
        (("futex", "offcpu", "kernel_locks"), {USER, KERNEL}),
        (("futex", "kernel_locks"), {USER, KERNEL}),
        (("offcpu", "kernel_locks"), {KERNEL}),
        (("kernel_locks",), {KERNEL}),
        (("futex",), {USER}),
        (("offcpu",), set()),
    ],
)
@pytest.mark.parametrize("mode", ["blocked", "calls"])
def test_the_code_about_releases_is_that_of_the_locks_that_are_measured(
    programs: tuple[str, ...], files: set[str], mode: str
) -> None:
    for has_holders in (True, False):
        parts = parts_of(programs, "contention", mode, has_holders)
        compiled = [file for part in parts for file in part.files if file in (USER, KERNEL)]
        assert sorted(compiled) == sorted(files if has_holders else set())


def test_switches_are_seen_for_the_holders_of_kernel_locks_only_if_nothing_else_needs_them() -> None:
    def hooks(*programs: str, has_holders: bool = True) -> dict[str, set[str]]:
        parts = parts_of(programs, "contention", "blocked", has_holders)
        return {part.what: {hook.hook for hook in part.ways[0].hooks} for part in parts}

    assert hooks("kernel_locks")[HOLDERS] == ALONE
    assert HOLDERS not in hooks("kernel_locks", has_holders=False)
    assert HOLDERS not in hooks("offcpu", "kernel_locks")
    assert hooks("offcpu", "kernel_locks")["switches"] >= ALONE


@pytest.mark.parametrize("mechanism", ["fentry", "kprobe"])
def test_the_release_is_seen_of_every_sort_of_lock_that_is_seen_taken(mechanism: str) -> None:
    """Compilers inline mutex_unlock() in ww_mutex_unlock(): its own probe does not see these releases."""
    (holds,) = (part for part in parts_of(("kernel_locks",), "all", "blocked") if part.what == "holds")
    (way,) = (way for way in holds.ways if way.mechanism == mechanism)
    released = {hook.hook for hook in way.hooks if hook.function == "lock_released"}
    taken = {hook.hook for hook in way.hooks} - released
    assert {"mutex_lock", "ww_mutex_lock", "down_read", "down_write", "down"} <= taken
    assert {"mutex_unlock", "ww_mutex_unlock", "up_read", "up_write", "up"} <= released
    (of_ww,) = (hook for hook in way.hooks if hook.hook == "ww_mutex_unlock")
    assert (of_ww.mechanism, of_ww.given, of_ww.optional) == (mechanism, ("mutex",), True)


def test_numbers_of_macros_keep_their_values_in_c() -> None:
    """C takes 0x80000000 for an unsigned number of 32 bits, and so its negation as well."""
    defined = assemble(
        [], {"EMPTY": None, "ZERO": 0, "INT": 2**31 - 1, "MORE": 2**31, "LESS": -1, "ALL": 2**64 - 1}
    )
    assert defined.text.splitlines() == [
        "#define EMPTY ",
        "#define ZERO 0x0",
        "#define INT 0x7fffffff",
        "#define MORE 0x80000000ULL",
        "#define LESS 0xffffffffffffffffULL",
        "#define ALL 0xffffffffffffffffULL",
    ]
