"""Whatever processes call themselves, lockd goes on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.checks import until_names_come
from tests.support.lockd_process import CHECKOUT, ROOT, Lockd
from tests.support.workload import Workload

SEEN_SECONDS = 10.0
ASKED_AGAIN_US = 2e6
"""The time that a wait has to last before the test ends. At the first look at a wait, lockd reads the name of
its process again if it learnt the name before the wait began."""

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

EVIL = b'<script>alert(1)</script>\x1b[31m"\\\n\x07{}\xff\xe2\x80\xae'
"""A name with markup, a terminal's colour, what ends labels and lines, invalid UTF-8, and text from right to
left."""
FIGHT = r"""
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>
static _Atomic int waiter;
pthread_mutex_t fought_for = PTHREAD_MUTEX_INITIALIZER;
__attribute__((noinline)) void fight(void)
{
    pthread_mutex_lock(&fought_for);
    pthread_mutex_unlock(&fought_for);
    __asm__ volatile("");
}
static void *fighter(void *arg)
{
    waiter = gettid();
    fight();
    return arg;
}
static int is_asleep(void)
{
    char path[64], text[32] = "";
    snprintf(path, sizeof path, "/proc/self/task/%d/syscall", waiter);
    FILE *file = waiter ? fopen(path, "r") : 0;
    if (!file)
        return 0;
    int is_call = fgets(text, sizeof text, file) && text[0] >= '0' && text[0] <= '9';
    fclose(file);
    return is_call && strtol(text, 0, 10) == SYS_futex;
}
int main(void)
{
    for (int i = 0; i < 5; i++) {
        pthread_t one;
        waiter = 0;
        pthread_mutex_lock(&fought_for);
        pthread_create(&one, 0, fighter, 0);
        while (!is_asleep())
            usleep(1000);
        usleep(200000);
        pthread_mutex_unlock(&fought_for);
        pthread_join(one, 0);
    }
    puts("done");
    fflush(stdout);
    pause();
}
"""
"""A program with five waits of 0.2 s for a mutex, each by a thread of its own."""


@pytest.fixture
def leaderless() -> Iterator[subprocess.Popen[str]]:
    """A process with a strange name, whose first thread has ended and whose other thread waits for ever."""
    process = subprocess.Popen([sys.executable, "-c", LEADERLESS], stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def lockd(tmp_path: Path, host: None) -> Iterator[Lockd]:
    """A daemon for one test alone: if it does not survive, no other test misses it."""
    daemon = Lockd(tmp_path, {"filter": {"comms": ["lockd?*", "<script>*"]}})
    yield daemon
    assert daemon.stop() == 0, "".join(daemon.log)


@pytest.fixture
def evil(tmp_path: Path) -> Iterator[Path]:
    """A program whose file, variable and function have EVIL names."""
    source, plain = tmp_path / "fight.c", tmp_path / "fight"
    source.write_text(FIGHT)
    subprocess.run(["gcc", "-O1", "-pthread", "-o", plain, source], check=True)
    program = tmp_path / os.fsdecode(EVIL.replace(b"/", b"|"))
    names = [b"--redefine-sym=fought_for=" + EVIL, b"--redefine-sym=fight=fight" + EVIL]
    subprocess.run(["objcopy", *names, plain, program], check=True)
    return program


def test_names_of_evil_bytes_are_harmless_wherever_they_are_shown(lockd: Lockd, evil: Path) -> None:
    until_names_come(lockd, Workload("timed_wait", 10, comm="lockd-first"))
    with subprocess.Popen([evil], stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"done\n"
        metrics = lockd.metrics()
        comms = {
            labels["comm"] for labels in metrics.labels("lockd_futex_blocked_seconds_count", kind="lock")
        }
        (comm,) = [one for one in comms if one.startswith("<script>")]
        assert metrics.sum("lockd_futex_blocked_seconds_count", comm=comm, kind="lock") == 5
        assert metrics.sum("lockd_futex_lock_blocked_total", comm=comm, kind="lock") == 5
        (row,) = [one for one in lockd.waited_for(kind="lock") if one["comm"] == comm]
        top = [*CHECKOUT, "top", "--once", f"--url=http://{lockd.address}"]
        shown = {
            "terminal": subprocess.run(top, capture_output=True, check=True, cwd=ROOT).stdout,
            "log": "".join(lockd.log).encode(),
            **{path: lockd.get(path) for path in ("/", "/metrics", "/flamegraph?program=futex")},
            "json": row["lock"].encode() + row["site"].encode() + "".join(row["stack"]).encode(),
        }
        process.kill()
    for what in ("/metrics", "json"):
        assert shown[what].count(b"<script>alert(1)") >= 2, f"{what} has these names"
    for what, text in shown.items():
        text.decode()
        assert not re.search(rb"[\x00-\x09\x0b-\x1f\x7f]", text), what
        assert "\u202e" not in text.decode(), what
    graph = shown["/flamegraph?program=futex"]
    assert b"alert(1)" in graph
    assert b"<script>alert(1)" not in graph


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
