"""Tests of what lockd says about hooks that a host does not have."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from lockd.kernel.btf import KernelTypes
from lockd.load import programs
from lockd.load.hooks import Candidate
from lockd.load.host import Host


@pytest.mark.parametrize(
    ("mechanism", "hook", "since"),
    [
        ("tracepoint", "lock:contention_begin", "5.19"),
        ("tracepoint", "syscalls:sys_enter_futex_waitv", "5.16"),
        ("tracepoint", "syscalls:sys_exit_futex_wait", "6.7"),
        ("tracepoint", "syscalls:sys_enter_futex", ""),
        ("kprobe", "__x64_sys_futex_waitv", "5.16"),
        ("kprobe", "__arm64_sys_futex_requeue", "6.7"),
        ("kprobe", "futex_wait_restart", ""),
        ("kprobe", "futex_wake", ""),
    ],
)
def test_a_missing_hook_is_said_to_be_newer_only_if_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mechanism: str, hook: str, since: str
) -> None:
    """Functions such as futex_wait_restart() are old, and missing where the compiler has inlined them."""
    for category in ("lock", "syscalls"):
        (tmp_path / "events" / category).mkdir(parents=True)
    kallsyms = tmp_path / "kallsyms"
    kallsyms.write_text("ffffffff81000000 T arch_rethook_trampoline\n")
    monkeypatch.setattr(programs, "KPROBE_TYPE", kallsyms)
    host = Host(cast("KernelTypes", None), kallsyms=kallsyms)
    host.tracefs = tmp_path
    obstacle = host.obstacle(Candidate("futex", "f", mechanism, hook))
    assert obstacle.startswith("this kernel has no ") and hook in obstacle
    assert obstacle.partition(" (Linux ")[2] == (f"{since} and later have it)" if since else "")
