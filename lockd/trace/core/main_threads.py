"""Processes whose main thread has ended while other threads run on."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def is_running(pid: int) -> bool:
    """Whether a thread of the process has not ended. A zombie has no such thread, but still is in procfs."""
    return _state_of_main_thread(pid) not in (b"", b"Z", b"X") or _is_without_main_thread(pid)


def ended_main_threads(pids: Iterable[int], are_linked: bool = False) -> list[str]:
    """Remarks for the user about those of the probed processes `pids` whose main thread has ended.

    The kernel attaches a probe of one process to its main thread, so the probe ends with that thread. A link
    of several probes does not end with it. `are_linked` is whether the probes of each process may be in one
    link (hooks.Candidate.one_of_many), which depends on the kernel.
    """
    were_not_traced = "may not have been traced" if are_linked else "were not traced"
    return [
        f"process {pid}: its main thread has ended; since then, its other threads {were_not_traced}"
        for pid in pids
        if _is_without_main_thread(pid)
    ]


def _is_without_main_thread(pid: int) -> bool:
    try:
        return _state_of_main_thread(pid) == b"Z" and len(os.listdir(f"/proc/{pid}/task")) > 1
    except OSError:
        return False


def _state_of_main_thread(pid: int) -> bytes:
    """The letter in proc_pid_stat(5); empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1]
    except OSError:
        return b""
