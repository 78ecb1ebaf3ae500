"""What lockd attaches goes with it: nothing stays in the kernel, however lockd ends and however often.

Other processes on this host may use BPF too, and may begin to while a test runs. If a process that is not the
test's has a descriptor of an object, the object is not lockd's.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Collection
from pathlib import Path

import pytest

from tests.support.lockd_process import CANNOT, ROOT, is_lack, lockd_or_reason

TIMES = 100
BPFTOOL_TRIES = 5
FREED_SECONDS = 30.0
"""How long the kernel may take to free programs and maps, which it does after grace periods."""
TRACEFS = (Path("/sys/kernel/tracing"), Path("/sys/kernel/debug/tracing"))
IDS = re.compile(r"^(prog|map|link)_id:\s*(\d+)", re.MULTILINE)
"""The lines of a descriptor's fdinfo (proc(5)) that tell the id of a BPF object."""
KPROBES = Path("/sys/kernel/debug/kprobes/list")
ATTACH_OFTEN = Path(__file__).with_name("attach_often.py")

MECHANISMS = ("auto", "fentry", "kprobe")


def listed_by_bpftool(what: str) -> bytes:
    """Return bpftool's list of all objects of a kind. It is run again if it fails, as it does when an object
    goes while it lists."""
    for _ in range(BPFTOOL_TRIES - 1):
        done = subprocess.run(["bpftool", "-j", what, "list"], check=False, capture_output=True)
        if done.returncode == 0:
            return done.stdout
    return subprocess.check_output(["bpftool", "-j", what, "list"])


def in_kernel() -> set[str]:
    """Return everything that lockd could leave behind: programs, maps, links, probes, events of tracefs."""
    found = set()
    for what in ("prog", "map", "link"):
        listed = json.loads(listed_by_bpftool(what))
        found |= {f"{what} {one['id']} {one.get('name', '')}" for one in listed}
    files = [place / name for place in TRACEFS for name in ("kprobe_events", "dynamic_events")]
    for file in (*files, KPROBES):
        if file.exists():
            found |= {f"{file}: {line}" for line in file.read_text().splitlines()}
    return found


def in_use(except_by: Collection[int] = ()) -> set[str]:
    """Return the programs, maps and links of which processes have descriptors, as in_kernel() begins their
    lines. Processes in `except_by` are left out."""
    found = set()
    for file in Path("/proc").glob("[0-9]*/fdinfo/*"):
        if int(file.parts[2]) in except_by:
            continue
        with contextlib.suppress(OSError):  # the process has ended, or has closed this descriptor
            found |= {f"{what} {number}" for what, number in IDS.findall(file.read_text())}
    return found


def new_since(before: set[str], ours: Collection[int] = ()) -> set[str]:
    """Return what has come to the kernel since `before`, except what other processes than `ours` use."""
    now = in_kernel() - before
    used = in_use(ours)
    return {one for one in now if " ".join(one.split()[:2]) not in used}


def processes_of(daemon: int) -> list[int]:
    """Return the ids of the daemon and of the processes that it has started."""
    return [daemon, *map(int, Path(f"/proc/{daemon}/task/{daemon}/children").read_text().split())]


def check_gone(found: set[str], before: set[str], ours: Collection[int] = ()) -> None:
    deadline = time.monotonic() + FREED_SECONDS
    while left := found & new_since(before, ours):
        assert time.monotonic() < deadline, f"left behind: {sorted(left)}"
        time.sleep(0.2)


SMALL = {"entries": 64, "threads": 64, "stacks": 64}
"""Sizes of maps that take no time to make."""


def config(mechanism: str) -> dict[str, dict[str, dict[str, object]]]:
    """Return a configuration by which this mechanism does as much as it can."""
    futex, mode = ("blocked", "contention") if mechanism == "auto" else ("calls", "all")
    return {
        "programs": {
            "futex": {"mechanism": mechanism, "mode": futex},
            "offcpu": {"enabled": mechanism == "auto"},
            "kernel_locks": {"mechanism": mechanism, "mode": mode},
        }
    }


def small_config(mechanism: str) -> dict[str, object]:
    """Return a configuration with few hooks of this mechanism, at a beginning and an end: an emulated machine
    takes 50 ms to let go of one hook."""
    programs = config(mechanism)["programs"]
    programs["futex"]["enabled"] = mechanism == "auto"
    programs["kernel_locks"]["mode"] = "contention"
    return {"programs": programs, "maps": SMALL}


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_the_daemon_killed_leaves_nothing(mechanism: str, tmp_path: Path) -> None:
    before = in_kernel()
    daemon = lockd_or_reason(tmp_path, config(mechanism))
    if isinstance(daemon, str):
        pytest.skip(f"host: {daemon}")
    with daemon:
        ours = processes_of(daemon.process.pid)
        during = new_since(before, ours)
        assert len([one for one in during if one.startswith("prog")]) >= 5
        daemon.process.send_signal(signal.SIGKILL)
        daemon.process.wait(30)
    check_gone(during, before, ours)


@pytest.mark.thorough("half a minute, and minutes in a machine")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_attaching_and_detaching_often_leaves_nothing(mechanism: str) -> None:
    before = in_kernel()
    command = ["/usr/bin/python3", ATTACH_OFTEN, json.dumps(small_config(mechanism)), str(TIMES)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    if done.returncode == CANNOT and is_lack(done.stderr):
        pytest.skip(f"host: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    attached = {int(line) for line in done.stdout.split()}
    assert len(done.stdout.split()) == TIMES and len(attached) == 1 and attached.pop() >= 2, done.stdout
    check_gone(new_since(before), before)
