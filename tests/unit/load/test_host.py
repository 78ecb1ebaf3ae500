"""Tests of what lockd says about hooks that a host does not have."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import cast

import pytest

from lockd.errors import HostError
from lockd.kernel.btf import KernelTypes
from lockd.load import host as host_module
from lockd.load import programs
from lockd.load.hooks import Candidate
from lockd.load.host import Host, tracefs


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


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The two directories on which tracefs may be mounted, for a Python whose is_dir() never raises."""
    found = tmp_path / "tracing", tmp_path / "debug/tracing"
    monkeypatch.setattr(host_module, "TRACEFS_PLACES", tuple(map(str, found)))
    monkeypatch.setattr(Path, "is_dir", os.path.isdir)
    return found


def test_tracefs_is_found_at_either_place(places: tuple[Path, Path]) -> None:
    assert tracefs() is None
    places[0].touch()  # not even a directory
    assert tracefs() is None
    (places[1] / "events").mkdir(parents=True)
    assert tracefs() == places[1]


def test_tracefs_that_is_closed_to_this_user_is_not_called_missing(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The advice is sudo and not a mount."""

    def refuse(path: str, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> os.stat_result:
        if str(path).startswith(str(places[0])):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, dir_fd=dir_fd, follow_symlinks=follow_symlinks)

    stat = os.stat
    monkeypatch.setattr(os, "stat", refuse)
    with pytest.raises(HostError) as caught:
        tracefs()
    assert str(caught.value) == (
        f"{places[0]}/events: Permission denied: tracefs is root's: run it with sudo"
    )
