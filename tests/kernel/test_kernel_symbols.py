"""The locking functions of the running kernel, which are in sections of their own, are no sites."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lockd.names.kernel.sites import is_helper, is_locking, is_tracing

WAITING = re.compile(
    r"_*(?:preempt_)?schedule\w*|io_schedule\w*|_*cond_resched\w*|console_conditional_schedule|yield\w*"
    r"|_*(?:out_of_line_)?wait_(?:on_bit|for_com)\w*|bit_wait\w*|do_nanosleep|\w+_nsleep_restart|usleep_range\w*"
    r"|hrtimer_nanosleep_restart|_*closure_(?:return_)?sync\w*|ldsem_down_\w+|_*ww_mutex_check_waiters"
    r"|futex_wait_\w+|console_\w+_schedule"
)
"""Functions in the section of functions that sleep which wait for something else than one of these locks."""


@pytest.fixture(scope="module")
def sections() -> dict[str, set[str]]:
    """The functions in the sections `sched` and `lock`, without what compilers append to their names."""
    found: dict[str, set[str]] = {"sched": set(), "lock": set()}
    at = ""
    for line in sorted(Path("/proc/kallsyms").read_text().splitlines()):
        address, kind, name, *module = line.split()
        if mark := re.fullmatch(r"__(sched|lock)_text_(start|end)", name):
            if not int(address, 16):
                pytest.skip("host: kernel.kptr_restrict hides the addresses of functions")
            if mark[2] == "start":
                at = mark[1]
            elif at == mark[1]:  # else the other section begins where this one ends
                at = ""
        elif at and kind in "tTwW" and not module and not name.startswith(("__pfx_", "__cfi_")):
            found[at].add(re.sub(r"(?<=.)\..*", "", name))
    return found


def test_the_section_of_spinlocks_is_locking(sections: dict[str, set[str]]) -> None:
    assert len(sections["lock"]) > 10
    assert {name for name in sections["lock"] if not is_locking(name)} == set()


def test_the_section_of_what_sleeps_is_locking_or_known(sections: dict[str, set[str]]) -> None:
    assert len(sections["sched"]) > 40
    others = {name for name in sections["sched"] if not is_locking(name)}
    assert {name for name in others if not WAITING.fullmatch(name)} == set()


def test_nothing_else_is_taken_for_locking() -> None:
    """System calls and well-known sites are not locking code, even if their names begin like such code's."""
    names = {line.split()[2] for line in Path("/proc/kallsyms").read_text().splitlines()}
    sites = {name for name in names if re.match(r"__x64_sys_|__arm64_sys_|vfs_|do_sys_|ext4_|tcp_", name)}
    sites |= names & {"lock_rename", "lock_two_nondirectories", "perf_event_ctx_lock_nested", "bpf_prog_load"}
    assert len(sites) > 300
    assert {name for name in sites if is_locking(name) or is_helper(name) or is_tracing(name)} == set()
