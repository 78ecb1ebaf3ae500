"""`lockd trace stackcount` and `stacksnoop` on kernel functions: those of system calls, which a process makes
as often as it is told."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockd.load.hooks import SYSTEM_CALL
from lockd.load.programs import KPROBE_TYPE
from lockd.load.source import HEADERS
from tests.support.checks import beside_another_tool
from tests.support.lockd_process import CHECKOUT, ROOT
from tests.support.trace_process import Trace

ASKS = """
import os, sys
for _ in sys.stdin.buffer:
    for n in range(40): os.getpgid(0)
    for n in range(15): os.getsid(0)
    print(flush=True)
"""
GETPGID, GETSID = f"{SYSTEM_CALL}getpgid", f"{SYSTEM_CALL}getsid"
CALLS = {GETPGID: 40, GETSID: 15}
ORIGINAL = ROOT / "originals/stackcount"
"""bcc's stackcount, where tests/vm/guests.py puts it. If it is not there, the host's own is used."""
MECHANISMS = ("kprobe", "fentry")
DEBUGFS = "/sys/kernel/debug"
BLACKLIST = Path(DEBUGFS, "kprobes/blacklist")

pytestmark = pytest.mark.skipif(not KPROBE_TYPE.exists(), reason="host: this kernel has no kprobes")


class Asking:
    """A process that makes CALLS each time that it is told to."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", ASKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.pid = self.process.pid
        self.ask()  # so that Python has done what it does only once

    def ask(self) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()
        self.process.stdout.readline()


@pytest.fixture
def asking() -> Iterator[Asking]:
    one = Asking()
    yield one
    one.process.communicate()


def counted(text: str) -> Counter[str]:
    """Return the counts in the JSON of a trace, by the function that is called."""
    found: Counter[str] = Counter()
    for line in text.splitlines():
        one = json.loads(line)
        found[one["stack"][-1]] += one["count"]
        assert any(frame.startswith("do_syscall_64") or "el0_svc" in frame for frame in one["stack"])
    return found


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_calls_are_counted_exactly(mechanism: str, asking: Asking) -> None:
    trace = Trace("stackcount", GETPGID, "-p", asking.pid, "--mechanism", mechanism, "--format", "json")
    asking.ask()
    assert counted(trace.stop()) == {GETPGID: CALLS[GETPGID]}
    assert trace.lost == {}


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_calls_of_many_functions(mechanism: str, asking: Asking) -> None:
    pattern = f"{SYSTEM_CALL}get*"
    trace = Trace("stackcount", pattern, "-p", asking.pid, "--mechanism", mechanism, "--format", "json")
    asking.ask()
    found = counted(trace.stop())
    assert {name: found[name] for name in CALLS} == CALLS
    assert re.search(r"tracing \d+ kernel functions", trace.said)


def test_offsets_and_addresses_are_those_of_kallsyms(asking: Asking) -> None:
    trace = Trace("stackcount", GETPGID, "-p", asking.pid, "-s", "-v", "-K")
    asking.ask()
    found = re.findall(r"^  ([0-9a-f]{16}) (\w+)\+(0x[0-9a-f]+)", trace.stop(), re.MULTILINE)
    lines = Path("/proc/kallsyms").read_text().splitlines()
    starts = {name: int(address, 16) for address, _, name, *_ in map(str.split, lines)}
    assert found[0][1] == GETPGID
    assert len(found) > 2
    for address, name, offset in found:
        assert int(address, 16) == starts[name] + int(offset, 16)


def test_events(asking: Asking) -> None:
    trace = Trace("stacksnoop", GETPGID, "-p", asking.pid, "--format", "json")
    asking.ask()
    events = [json.loads(line) for line in trace.stop().splitlines()]
    assert [event["stack"][-1] for event in events] == [GETPGID] * CALLS[GETPGID]
    assert {(event["pid"], event["function"]) for event in events} == {(asking.pid, GETPGID)}


@pytest.fixture
def debugfs() -> Iterator[None]:
    """Mounts debugfs for the time of the test, unless the host has mounted it."""
    if BLACKLIST.exists():
        yield
        return
    subprocess.run(["mount", "-t", "debugfs", "nodev", DEBUGFS], check=True)
    yield
    subprocess.run(["umount", "--lazy", DEBUGFS], check=True)  # the kernel may have mounted tracefs below it


@pytest.mark.usefixtures("debugfs")
def test_what_cannot_be_probed_is_left_out_and_told() -> None:
    names = [line.split()[-1] for line in BLACKLIST.read_text().splitlines()]
    kallsyms = set(re.findall(r" [tTwW] (\S+)$", Path("/proc/kallsyms").read_text(), re.MULTILINE))
    name = next(one for one in names if one in kallsyms and not one.startswith("__pfx"))
    done = subprocess.run(
        [*CHECKOUT, "trace", "stackcount", name, "1"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 3
    assert f"the kernel allows no probes on it (kprobes/blacklist): {name}" in done.stderr


@beside_another_tool
def test_side_by_side_with_bcc(asking: Asking, tmp_path: Path) -> None:
    original = ORIGINAL if ORIGINAL.exists() else Path(shutil.which("stackcount-bpfcc") or "")
    assert original.is_file(), "bpfcc-tools is not installed"
    shutil.copytree(HEADERS, tmp_path / "headers")
    (tmp_path / "headers/include/linux/sched.h").write_text("#define TASK_COMM_LEN 16\n")
    environment = {**os.environ, "BCC_KERNEL_SOURCE": str(tmp_path / "headers"), "PYTHONUNBUFFERED": "1"}
    theirs = subprocess.Popen(
        ["/usr/bin/python3", original, "-K", "-p", str(asking.pid), GETPGID],
        stdout=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    assert theirs.stdout
    line = theirs.stdout.readline()
    assert line.startswith("Tracing 1 functions"), line
    ours = Trace("stackcount", GETPGID, "-K", "-p", asking.pid)
    for _ in range(3):
        asking.ask()
    printed = ours.stop()
    theirs.send_signal(signal.SIGINT)
    text, _ = theirs.communicate(timeout=120)
    assert stacks(printed) == stacks(text.replace("Detaching...", ""))
    assert sum(stacks(printed).values()) == 3 * CALLS[GETPGID]


def stacks(text: str) -> Counter[tuple[str, ...]]:
    """Return the counts by stack from text as bcc's stackcount prints it. The functions that a kprobe itself
    puts on top of a stack are left out.
    """
    found: Counter[tuple[str, ...]] = Counter()
    for part in text.split("\n\n"):
        *frames, count = [line.strip() for line in part.splitlines() if line.strip()] or [""]
        if count:
            start = frames.index(GETPGID) if GETPGID in frames else 0
            found[tuple(frames[start:])] += int(count)
    return found
