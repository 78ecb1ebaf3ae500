"""Whatever processes call themselves, lockd goes on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from lockd_process import Lockd

SEEN_SECONDS = 10.0
ASKED_AGAIN_US = 2e6
"""A name is asked for again if it is older than the wait, that is at the first look at it."""

LEADERLESS = r"""
import ctypes, os, sys, threading
libc = ctypes.CDLL(None)
libc.prctl(15, b"lockd\xff\n\x1b", 0, 0, 0)  # PR_SET_NAME
def wait():
    print(os.getpid(), flush=True)
    word = ctypes.c_uint32(2)
    libc.syscall(202 if os.uname().machine == "x86_64" else 98, ctypes.byref(word), 128, 2, None)
threading.Thread(target=wait, daemon=True).start()
libc.syscall(60 if os.uname().machine == "x86_64" else 93, 0)  # exit, of this thread alone
"""


@pytest.fixture
def leaderless() -> Iterator[subprocess.Popen[str]]:
    """A thread that waits for ever; its process has a strange name, and no first thread any more."""
    process = subprocess.Popen([sys.executable, "-c", LEADERLESS], stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def lockd(tmp_path: Path, host: None) -> Iterator[Lockd]:
    """One of its own: should it not survive, it is missed nowhere else."""
    daemon = Lockd(tmp_path, {"filter": {"comms": ["lockd?*"]}})
    yield daemon
    assert daemon.stop() == 0, "".join(daemon.log)


def test_a_name_of_any_bytes_and_no_command_line(lockd: Lockd, leaderless: subprocess.Popen[str]) -> None:
    assert leaderless.stdout
    assert leaderless.stdout.readline() == f"{leaderless.pid}\n"
    comm = "lockd\ufffd??"
    lockd.until(lambda m: m.sum("lockd_futex_waiting", comm=comm, kind="lock") == 1, SEEN_SECONDS)
    threads = lockd.api("threads", kind="lock", limit="1000")
    mine = [row for row in threads if row["comm"] == comm and row["program"] == "futex"]
    (row,) = [row for row in mine if row["waiting_us"]]
    assert row["tgid"] == leaderless.pid
    waiting = {"comm": comm, "kind": "lock"}
    lockd.until(lambda m: m.max("lockd_futex_max_blocked_us", **waiting) > ASKED_AGAIN_US, SEEN_SECONDS)
